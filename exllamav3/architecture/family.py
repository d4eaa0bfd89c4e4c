"""From a configuration to the facts of a model, guided by a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from exllamav3.architecture.decoder import FULL, LINEAR, MTP_PREFIX, DecoderSpec
from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.model.config import Config
from exllamav3.model.fields import Fields
from exllamav3.model.rope_config import read_rope
from exllamav3.modules.gated_delta_net import DeltaGeometry
from exllamav3.modules.qkv import QkvGeometry


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes one architecture of the table from Llama.

    prefixes: of keys; where there are several, the stored tensors tell which.
    norm_offset: 1 where RMS norms store `weight - 1` (never the delta net's output norm).
    qk_norm: RMS norms over the head dimension of q and k.
    gated: q is interleaved with an output gate.
    qkv_bias: whether q, k and v (and not o) have biases; None means that `attention_bias`
        of the configuration says so, for all four.
    head_dim, partial_rotary: where the configuration is silent; None means hidden / heads.
    delta: how linear attention stores its projections, None where there is none.
    vision: prefix of the vision tower, copied and not run.
    refuse: raises UnsupportedError for what the family has and this library does not.
    """

    prefixes: tuple[str, ...] = ("model",)
    norm_offset: float = 0.0
    qk_norm: bool = False
    gated: bool = False
    qkv_bias: bool | None = None
    head_dim: int | None = None
    partial_rotary: float = 1.0
    delta: Literal["split", "grouped"] | None = None
    vision: str | None = None
    refuse: Callable[[Config], None] = lambda config: None


def read_family(config: Config, family: Family) -> DecoderSpec:
    """The facts of the model that a configuration describes.

    Raises:
        FormatError: a setting is missing, wrong or contradicts another.
        UnsupportedError: the model uses something that is not implemented.
    """
    family.refuse(config)
    text = config.text
    activation = text.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedError(
            f"{text.where}.hidden_act: {activation!r} is not implemented, only 'silu'"
        )
    attention, output_bias = _attention(config, family)
    mtp_layers, mtp_copied = _mtp(config)
    vision_blocks, vision_copied = _vision(config, family)
    return DecoderSpec(
        prefix=_prefix(config, family),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=text.integer("intermediate_size"),
        layer_types=_layer_types(text, _layer_count(config), family),
        eps=text.number("rms_norm_eps", 1e-6, above=0),
        attention=attention,
        rope=read_rope(text, attention.head_dim, family.partial_rotary),
        norm_offset=family.norm_offset,
        qk_norm=family.qk_norm,
        output_bias=output_bias,
        mlp_bias=text.flag("mlp_bias", False),
        delta=_delta(config, family),
        tied=config.tie_word_embeddings,
        mtp_layers=mtp_layers,
        side_attention=vision_blocks,
        copied=vision_copied + mtp_copied,
    )


def _layer_count(config: Config) -> int:
    """Number of blocks; one that the files cannot hold is refused before any is built."""
    layers, names = config.num_hidden_layers, config.tensor_names()
    if config.directory is not None and layers > len(names):
        raise FormatError(
            f"{config.text.where}.num_hidden_layers: is {layers}, but {len(names)} tensors are "
            f"stored; config.json and the tensors belong to different models"
        )
    return layers


def _prefix(config: Config, family: Family) -> str:
    names = config.tensor_names()
    if len(family.prefixes) == 1 or not names:
        return family.prefixes[0]
    found = [p for p in family.prefixes if f"{p}.embed_tokens.weight" in names]
    if len(found) != 1:
        raise FormatError(
            f"{config.directory}: embed_tokens.weight is stored under {found or 'neither'} of "
            f"{', '.join(family.prefixes)}; expected exactly one of them"
        )
    return found[0]


def _attention(config: Config, family: Family) -> tuple[QkvGeometry, bool]:
    """Widths of attention, and whether its output projection has a bias."""
    text = config.text
    heads = text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise FormatError(
            f"{text.where}.num_key_value_heads: {kv_heads} does not divide the {heads} heads"
        )
    head_dim = _head_dim(config, family, heads)
    stated = text.flag("attention_bias", False)
    bias = stated if family.qkv_bias is None else family.qkv_bias
    geometry = QkvGeometry(
        config.hidden_size, heads, kv_heads, head_dim, gated=family.gated, bias=bias
    )
    return geometry, stated and family.qkv_bias is None


def _head_dim(config: Config, family: Family, heads: int) -> int:
    """As stated, else the family's, else an even share of the hidden size."""
    text = config.text
    if text.has("head_dim") or family.head_dim is not None:
        return text.integer("head_dim", family.head_dim)
    if config.hidden_size % heads:
        raise FormatError(
            f"{text.where}.head_dim: missing, and hidden_size {config.hidden_size} is no multiple "
            f"of the {heads} heads; state it"
        )
    return config.hidden_size // heads


def _layer_types(text: Fields, layers: int, family: Family) -> tuple[str, ...]:
    """The kind of each block, as listed or as the family's older keys say."""
    kinds = text.texts("layer_types")
    if kinds is None:
        if family.delta is not None:
            interval = text.integer("full_attention_interval", 4)
            return tuple(LINEAR if (n + 1) % interval else FULL for n in range(layers))
        _refuse_sliding_window(text, layers)
        return (FULL,) * layers
    if len(kinds) != layers:
        raise FormatError(
            f"{text.where}.layer_types: lists {len(kinds)} layers, num_hidden_layers is {layers}"
        )
    known = (FULL,) if family.delta is None else (FULL, LINEAR)
    for layer, kind in enumerate(kinds):
        if kind not in known:
            raise UnsupportedError(
                f"{text.where}.layer_types[{layer}]: {kind!r} is not implemented for this "
                f"architecture, only {', '.join(known)}"
            )
    return kinds


def _refuse_sliding_window(text: Fields, layers: int) -> None:
    if text.flag("use_sliding_window", False) and text.has("sliding_window"):
        first = text.integer("max_window_layers", 0, minimum=0)
        if first < layers:
            raise UnsupportedError(
                f"{text.where}.use_sliding_window: layers {first} to {layers - 1} attend in a "
                f"sliding window, which is not implemented"
            )


def _delta(config: Config, family: Family) -> DeltaGeometry | None:
    if family.delta is None:
        return None
    text = config.text
    geometry = DeltaGeometry(
        config.hidden_size,
        key_heads=text.integer("linear_num_key_heads", 16),
        value_heads=text.integer("linear_num_value_heads", 32),
        key_dim=text.integer("linear_key_head_dim", 128),
        value_dim=text.integer("linear_value_head_dim", 128),
        conv_kernel=text.integer("linear_conv_kernel_dim", 4, minimum=2),
        grouped=family.delta == "grouped",
    )
    if geometry.value_heads % geometry.key_heads:
        raise FormatError(
            f"{text.where}.linear_num_value_heads: {geometry.value_heads} is no multiple of the "
            f"{geometry.key_heads} key heads"
        )
    return geometry


def _mtp(config: Config) -> tuple[int, tuple[str, ...]]:
    """Stored MTP blocks, and the prefix to copy where they are stored but not described."""
    if not any(name.startswith(MTP_PREFIX) for name in config.tensor_names()):
        return 0, ()
    layers = config.text.integer("mtp_num_hidden_layers", 0, minimum=0)
    return (layers, ()) if layers else (0, (MTP_PREFIX,))


def _vision(config: Config, family: Family) -> tuple[dict[str, str], tuple[str, ...]]:
    """Attention modules of the vision tower, and the prefix of all its tensors."""
    if family.vision is None:
        return {}, ()
    section = config.top.child("vision_config")
    blocks = section.integer("depth", minimum=0) if section is not None else 0
    found = {f"{family.vision}.blocks.{n}.attn": "vision attention" for n in range(blocks)}
    return found, (f"{family.vision}.",)
