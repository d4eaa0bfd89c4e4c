"""The table of architectures: what `config.json` calls a model, and how it differs from Llama."""

from __future__ import annotations

from collections.abc import Mapping

from exllamav3.architecture.decoder import DecoderSpec
from exllamav3.architecture.family import Family, read_family
from exllamav3.errors import UnsupportedError
from exllamav3.model.config import Config


def _refuse_experts(config: Config) -> None:
    """Qwen3-Next mixes experts in most models; only the dense parts are implemented."""
    text = config.text
    if not text.integer("num_experts", 512, minimum=0):
        return
    dense = text.get("mlp_only_layers", (list,), "a list of layer numbers") or []
    step = text.integer("decoder_sparse_step", 1)
    for layer in range(config.num_hidden_layers):
        if layer not in dense and (layer + 1) % step == 0:
            raise UnsupportedError(
                f"{text.where}.num_experts: layer {layer} is a mixture of experts, which is not "
                f"implemented; only models whose MLPs are all dense are read"
            )


ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128),
    "Qwen3NextForCausalLM": Family(
        norm_offset=1.0,
        qk_norm=True,
        gated=True,
        head_dim=256,
        partial_rotary=0.25,
        delta="grouped",
        refuse=_refuse_experts,
    ),
    "Qwen3_5ForCausalLM": Family(
        prefixes=("model", "model.language_model"),
        norm_offset=1.0,
        qk_norm=True,
        gated=True,
        head_dim=256,
        partial_rotary=0.25,
        delta="split",
    ),
    "Qwen3_5ForConditionalGeneration": Family(
        prefixes=("model.language_model",),
        norm_offset=1.0,
        qk_norm=True,
        gated=True,
        head_dim=256,
        partial_rotary=0.25,
        delta="split",
        vision="model.visual",
    ),
}


def read_spec(config: Config) -> DecoderSpec:
    """The facts of the model that a configuration describes.

    Raises:
        UnsupportedError: the architecture is not in the table, or uses something not implemented.
        FormatError: a setting is missing or wrong.
    """
    family = ARCHITECTURES.get(config.architecture)
    if family is None:
        raise UnsupportedError(
            f"{config.top.where}.architectures: {config.architecture!r} is not implemented; there "
            f"are {', '.join(ARCHITECTURES)}"
        )
    return read_family(config, family)
