#!/usr/bin/env python3
"""Decode on a GPU by QKV topology: one attention block, and a 4-layer model of Qwen3.5-27B's shape.

    python benchmarks/decode.py                 # tables on stdout
    python benchmarks/decode.py --profile       # also: which kernels a step consists of

Weights are random EXL3 payloads at 4 bits (head 6 bits), made on the GPU. The layers are delta net,
attention, delta net, attention, so that a plan can mix. "eager" launches every kernel from Python,
"graph" replays a captured step as `Generator` does; a step ends with its token on the host.
Medians; every step reads the same weights, which are many times the L2 cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from gpu_timing import environment, events, graph_of, kernel_rows, need_gpus
from torch import Tensor

import exllamav3_ext
from exllamav3 import Cache, Config, Model
from exllamav3.codec.params import Codebook, pad_to_block
from exllamav3.codec.tensor import marker_tensor
from exllamav3.generator.decode_graphs import DecodeGraphs
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.linear import Linear
from exllamav3.modules.module import DictSource
from exllamav3.topology import Projection, ResolvedTopology, TopologyRow

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_theta": 1e7,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
    },
    "vocab_size": 248320,
    "tie_word_embeddings": False,
}
BLOCKS = ("model.layers.1.self_attn", "model.layers.3.self_attn")
SPLITS = (12288, 1024, 1024)
NAMES = ("q_proj", "k_proj", "v_proj")
PAST = 500
"""Tokens in the cache before the first timed step."""


def row(layer: str, *rates: int) -> TopologyRow:
    """A block fused at one rate, or split at three."""
    names = ("qkv_proj",) if len(rates) == 1 else NAMES
    made = tuple(Projection(n, k, "mul1", "always") for n, k in zip(names, rates, strict=True))
    return TopologyRow(layer, SPLITS, made)


VARIANTS: dict[str, tuple[str, ResolvedTopology | None]] = {
    "split, three launches": ("split", None),
    "split, grouped": ("auto", None),
    "fused K=4": ("auto", ResolvedTopology(tuple(row(b, 4) for b in BLOCKS))),
    "mixed: fused K=4; q 4, k 6, v 6": (
        "auto",
        ResolvedTopology((row(BLOCKS[0], 4), row(BLOCKS[1], 4, 6, 6))),
    ),
}


class GpuSource(DictSource):
    """Tensors that are already where they are needed."""

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def packed(linear: Linear, bits: int) -> dict[str, Tensor]:
    """A random payload whose matrix keeps the size of activations."""
    k, n = pad_to_block(linear.in_features), pad_to_block(linear.out_features)
    shape = (k // 16, n // 16, 16 * bits)
    trellis = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda")
    suh = (torch.randint(0, 2, (k,), device="cuda") * 2 - 1).half() * (0.8 * k**-0.5)
    svh = (torch.randint(0, 2, (n,), device="cuda") * 2 - 1).half()
    marker = marker_tensor(Codebook.MUL1)
    names = ("trellis", "suh", "svh", "mul1")
    return {f"{linear.key}.{n}": t for n, t in zip(names, (trellis, suh, svh, marker), strict=True)}


def make_model(route: str, topology: ResolvedTopology | None, load=None) -> Model:
    """A loaded model of random weights; `load(model, source)` loads it elsewhere."""
    torch.manual_seed(0)
    config = Config(CONFIG)
    model = Model.from_config(config, topology=topology)
    tensors: dict[str, Tensor] = {}
    for module in model.walk():
        if isinstance(module, Linear) and module.qmap:
            declared = topology.projection(module.key) if topology else None
            bits = 6 if module.key == "lm_head" else declared.bits if declared else 4
            tensors |= packed(module, bits)
        else:
            shapes = own_shapes(module)
            tensors |= {
                name: (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)
                for name, (shape, scale) in shapes.items()
            }
    source = GpuSource(tensors)
    if load is None:
        model.load("cuda", source=source)
    else:
        load(model, source)
    model.set_qkv_route(route)
    return model


def own_shapes(module) -> dict[str, tuple[tuple[int, ...], float]]:
    """Shapes of the unquantized tensors of a module, and their spread."""
    if isinstance(module, Linear):
        shape = (module.out_features, module.in_features)
        return {f"{module.key}.weight": (shape, module.in_features**-0.5)}
    if hasattr(module, "vocab_size"):
        return {f"{module.key}.weight": ((module.vocab_size, module.hidden_size), 1.0)}
    if hasattr(module, "size"):
        return {f"{module.key}.weight": ((module.size,), 0.1)}
    if hasattr(module, "_own_shapes"):
        return {f"{module.key}.{n}": (s, 0.5) for n, s in module._own_shapes().items()}
    return {}


@torch.inference_mode()
def block_row(model: Model, batch: int, count: int) -> list[float]:
    """Microseconds of an attention block: projections, whole (both from graphs), whole eager."""
    attention = model.attention_layers()[1]
    cache = Cache(model, 1024 * batch, batch)
    sequences = [cache.new_sequence(1024) for _ in range(batch)]
    fixed = cache.fixed_batch(sequences, "cuda", read_tokens=512)
    x = torch.randn(batch, 1, 5120, device="cuda").half()
    positions = torch.full((batch, 1), PAST, device="cuda")

    def whole() -> Tensor:
        view = cache.bind({"sequences": fixed}, batch)
        return attention.forward(x, ForwardContext(positions=positions, cache=view))

    def projections() -> object:
        return attention.project_qkv(x, ForwardContext(positions=positions))

    # Between replays the weights of the other blocks would pass through the L2 cache. So much of
    # it that the launch of the replay is over before the GPU has finished.
    flush = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    replays = [graph_of(projections), graph_of(whole)]
    found = []
    for replay in replays:
        both = events(lambda replay=replay: (flush.zero_(), replay()), count)
        found.append(both - events(flush.zero_, count))
    return [*found, events(whole, count)]


@torch.inference_mode()
def step_us(model: Model, batch: int, capture: bool | None, count: int) -> float:
    """Median microseconds of a decode step with its tokens on the host; None is plain eager."""
    cache = Cache(model, 1024 * batch, batch)
    sequences = [cache.new_sequence(1024) for _ in range(batch)]
    ids = torch.randint(0, 1000, (batch, PAST))
    logits = model.forward(ids, {"cache": cache, "sequences": sequences, "last_tokens_only": 1})
    tokens = logits[:, -1].argmax(-1, keepdim=True).cpu()
    graphs = DecodeGraphs(model, cache, "cuda", capture) if capture is not None else None
    times = []
    for step in range(count + 3):
        lengths = torch.full((batch,), PAST + step)
        for sequence in sequences:
            sequence.length = PAST + step
        start = time.perf_counter()
        if graphs is None:
            params = {"cache": cache, "sequences": sequences, "cache_seqlens": lengths}
            logits = model.forward(tokens, params)[:, -1]
        else:
            logits = graphs.step(sequences, tokens)
        tokens = logits.argmax(-1, keepdim=True).cpu()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def profile_step(model: Model, batch: int = 1) -> None:
    """Kernels of one replayed step, by total time."""
    cache = Cache(model, 1024 * batch, batch)
    sequences = [cache.new_sequence(1024) for _ in range(batch)]
    for sequence in sequences:
        sequence.length = PAST
    graphs = DecodeGraphs(model, cache, "cuda")
    tokens = torch.ones(batch, 1, dtype=torch.long)
    for _ in range(3):
        graphs.step(sequences, tokens)
    kernel_rows(lambda: graphs.step(sequences, tokens), f"one step ({batch} rows)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--count", type=int, default=60, help="timed steps; default: 60")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16], help="default: 1 16")
    args = parser.parse_args()
    need_gpus()
    print(environment())
    print(exllamav3_ext.build_info())
    blocks, steps = [], []
    for name, (route, topology) in VARIANTS.items():
        model = make_model(route, topology)
        for batch in args.rows:
            times = block_row(model, batch, args.count)
            blocks.append(f"| {name} | {batch} | " + " | ".join(f"{t:.1f}" for t in times) + " |")
            eager = step_us(model, batch, None, args.count)
            graph = step_us(model, batch, True, args.count)
            cells = [f"{t:.0f} | {1e6 * batch / t:.0f}" for t in (eager, graph)]
            steps.append(f"| {name} | {batch} | " + " | ".join(cells) + " |")
            print(blocks[-1], steps[-1], flush=True)
        del model
    print("\nattention block, microseconds")
    print("| q/k/v | rows | projections (graph) | whole block (graph) | whole block (eager) |")
    print("|---|---|---|---|---|")
    print("\n".join(blocks))
    print("\n4-layer model")
    print("| q/k/v | rows | eager, us a step | tokens/s | graph, us a step | tokens/s |")
    print("|---|---|---|---|---|---|")
    print("\n".join(steps))
    if args.profile:  # last: once the profiler has run, every launch of the process is slower
        model = make_model(*VARIANTS["split, grouped"])
        for batch in args.rows:
            profile_step(model, batch)


if __name__ == "__main__":
    main()
