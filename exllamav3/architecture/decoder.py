"""From the facts of a decoder-only model to its module tree.

Every family here is one shape: embedding, blocks of a mixer and a gated MLP, final norm, head.
A `DecoderSpec` says what differs; the files beside this one fill it from a configuration.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch

from exllamav3.modules.attention import Attention
from exllamav3.modules.block import TransformerBlock
from exllamav3.modules.embedding import Embedding
from exllamav3.modules.gated_delta_net import DeltaGeometry, GatedDeltaNet
from exllamav3.modules.linear import Linear, LinearKind
from exllamav3.modules.mlp import GatedMlp
from exllamav3.modules.module import Module
from exllamav3.modules.norm import RMSNorm
from exllamav3.modules.qkv import QkvGeometry
from exllamav3.modules.rope import Rope, RopeSettings
from exllamav3.topology import AttentionFacts, ModelFacts

FULL, LINEAR = "full_attention", "linear_attention"
MTP_LABEL = "MTP attention"
MTP_PREFIX = "mtp."
"""Of all tensors of the multi-token-prediction head."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Everything that distinguishes one decoder from another.

    prefix: of all keys but the head's: `<prefix>.embed_tokens`, `.layers.N`, `.norm`.
    layer_types: "full_attention" or "linear_attention" for each block.
    norm_offset: 1 where norms store `weight - 1` (not the output norm of the delta net).
    qk_norm: RMS norms over the head dimension of q and k before the rotation.
    delta: sizes of linear attention, None where no block has it.
    tied: the head is the embedding table.
    mtp_layers: blocks of the multi-token-prediction head under `mtp.`, stored but not run.
    side_attention: attention modules outside the decoder, by path, and what they are.
    copied: prefixes of tensors that belong to the model and are neither run nor quantized.
    """

    prefix: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    eps: float
    attention: QkvGeometry
    rope: RopeSettings
    norm_offset: float = 0.0
    qk_norm: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    delta: DeltaGeometry | None = None
    tied: bool = False
    mtp_layers: int = 0
    side_attention: Mapping[str, str] = field(default_factory=dict)
    copied: tuple[str, ...] = ()

    def mixer_key(self, layer: int) -> str:
        """Path of the attention or delta net of one block."""
        name = "self_attn" if self.layer_types[layer] == FULL else "linear_attn"
        return f"{self.prefix}.layers.{layer}.{name}"


def model_facts(spec: DecoderSpec) -> ModelFacts:
    """What a topology may say about this model: its full attention, and all that is not."""
    qmap = "block.attn.input"
    attention = []
    other = dict(spec.side_attention)
    for layer, kind in enumerate(spec.layer_types):
        key = spec.mixer_key(layer)
        if kind == FULL:
            attention.append(
                AttentionFacts(
                    key, spec.hidden_size, spec.attention.output_splits, (qmap, qmap, qmap)
                )
            )
        else:
            other[key] = "gated delta net"
    other.update({f"mtp.layers.{n}.self_attn": MTP_LABEL for n in range(spec.mtp_layers)})
    return ModelFacts(tuple(attention), other)


def build_decoder(spec: DecoderSpec, fused: Container[str] = ()) -> list[Module]:
    """The flat list of top-level modules: embedding, blocks, final norm, head.

    Args:
        spec: facts of the model.
        fused: paths of the attention modules that store one `qkv_proj`.
    """
    rope = Rope(spec.rope)
    embed_key = f"{spec.prefix}.embed_tokens"
    modules: list[Module] = [Embedding(embed_key, spec.vocab_size, spec.hidden_size)]
    for layer in range(len(spec.layer_types)):
        key = spec.mixer_key(layer)
        mixer: Attention | GatedDeltaNet
        if spec.layer_types[layer] == FULL:
            mixer = _attention(spec, key, layer, rope, fused=key in fused)
        else:
            assert spec.delta is not None
            mixer = GatedDeltaNet(key, layer, spec.delta, spec.eps)
        modules.append(_block(spec, f"{spec.prefix}.layers.{layer}", mixer))
    modules.append(_norm(spec, f"{spec.prefix}.norm"))
    modules.append(
        Linear(
            "lm_head",
            spec.hidden_size,
            spec.vocab_size,
            qmap="block",
            qbits_key="head_bits",
            alt_key=embed_key if spec.tied else None,
            out_dtype=torch.float32,
        )
    )
    return modules


def build_mtp(spec: DecoderSpec) -> list[Module]:
    """The multi-token-prediction modules: loaded, quantized and stored, never run.

    Their linears follow `mtp_bits`; their layer numbers start at 0 again, only keys tell them from
    the decoder's.
    """
    if not spec.mtp_layers:
        return []
    rope = Rope(spec.rope)
    modules: list[Module] = [
        _norm(spec, "mtp.pre_fc_norm_embedding"),
        _norm(spec, "mtp.pre_fc_norm_hidden"),
        Linear(
            "mtp.fc",
            2 * spec.hidden_size,
            spec.hidden_size,
            qmap="block.mtp.fc",
            qbits_key="mtp_bits",
            out_dtype=torch.float32,
        ),
    ]
    for layer in range(spec.mtp_layers):
        key = f"mtp.layers.{layer}"
        mixer = _attention(spec, f"{key}.self_attn", layer, rope, qbits_key="mtp_bits")
        modules.append(_block(spec, key, mixer, qbits_key="mtp_bits"))
    modules.append(_norm(spec, "mtp.norm"))
    return modules


def _norm(spec: DecoderSpec, key: str) -> RMSNorm:
    return RMSNorm(key, spec.hidden_size, spec.eps, spec.norm_offset)


def _attention(
    spec: DecoderSpec,
    key: str,
    layer: int,
    rope: Rope,
    *,
    fused: bool = False,
    qbits_key: LinearKind = "bits",
) -> Attention:
    return Attention(
        key,
        layer,
        spec.attention,
        rope,
        qk_norm=(spec.eps, spec.norm_offset) if spec.qk_norm else None,
        fused=fused,
        output_bias=spec.output_bias,
        qbits_key=qbits_key,
    )


def _block(
    spec: DecoderSpec, key: str, mixer: Attention | GatedDeltaNet, qbits_key: LinearKind = "bits"
) -> TransformerBlock:
    mlp = GatedMlp(
        f"{key}.mlp",
        spec.hidden_size,
        spec.intermediate_size,
        bias=spec.mlp_bias,
        qbits_key=qbits_key,
    )
    return TransformerBlock(
        key,
        _norm(spec, f"{key}.input_layernorm"),
        mixer,
        _norm(spec, f"{key}.post_attention_layernorm"),
        mlp,
    )
