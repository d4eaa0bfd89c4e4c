"""Tiny models of four layers, for tests that spread layers over devices."""

from __future__ import annotations

from tiny_models import llama_config, qwen35_config, random_exl3, random_tensors

from exllamav3 import Cache, Config, Model
from exllamav3.modules.module import DictSource
from exllamav3.topology import Projection, ResolvedTopology, TopologyRow

KINDS = ["llama", "qwen3.5", "half fused", "dense", "quantized cache"]
HALF_FUSED = ResolvedTopology(
    tuple(
        TopologyRow(f"model.layers.{layer}.self_attn", (256, 64, 64), projections)
        for layer, projections in (
            (1, (Projection("qkv_proj", 4, "mcg", "always"),)),
            (
                3,
                (
                    Projection("q_proj", 3, "mul1", "always"),
                    Projection("k_proj", 6, "mul1", "always"),
                    Projection("v_proj", 5, "mcg", "always"),
                ),
            ),
        )
    )
)


class FourLayers:
    """A model of four layers with random weights, loadable any number of times.

    Args:
        kind: one of `KINDS`. "llama" and "dense" are a Llama, "dense" without EXL3 weights; the
            others have two gated delta nets and two gated attention blocks, of which "half fused"
            fuses one; "quantized cache" rounds keys and values.
    """

    def __init__(self, kind):
        self.cache_bits = {"k_bits": 8, "v_bits": 6} if kind == "quantized cache" else {}
        self.topology = HALF_FUSED if kind == "half fused" else None
        config = llama_config() if kind in ("llama", "dense") else qwen35_config()
        config |= {"num_hidden_layers": 4, "max_position_embeddings": 2048}
        if "layer_types" in config:
            config["layer_types"] = ["linear_attention", "full_attention"] * 2
        self.config = Config(config)
        quantize = None if kind == "dense" else self._quantize
        tensors = random_tensors(self.config, topology=self.topology, quantize=quantize)
        self.source = DictSource(tensors)

    def _quantize(self, linear):
        declared = self.topology.projection(linear.key) if self.topology else None
        bits, codebook = (declared.bits, declared.codebook) if declared else (4, "mul1")
        return random_exl3(
            linear.key, linear.in_features, linear.out_features, bits=bits, codebook=codebook
        )

    def build(self):
        """The model without weights."""
        return Model.from_config(self.config, topology=self.topology)

    def load(self, **where):
        """A loaded model; arguments as for `Model.load`."""
        model = self.build()
        model.load(source=self.source, **where)
        return model

    def cache(self, model):
        """A cache of 16 pages."""
        return Cache(model, 4096, **self.cache_bits)


def cached_devices(model, cache):
    """Of each layer with state: its own device, and that of its state."""
    layers = {m.layer: m.device for m in model.walk() if hasattr(m, "cache_spec")}
    kept = {layer: storage.device for layer, storage in cache._kv.items()}
    kept |= {layer: storage.delta.device for layer, storage in cache._recurrent.items()}
    return layers, kept
