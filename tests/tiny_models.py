"""Small models with random weights, made on the fly: configurations, tensors, folders."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from exllamav3.codec.params import Codebook, pad_to_block
from exllamav3.codec.tensor import Exl3Tensor, is_exl3, marker_tensor
from exllamav3.model.config import Config
from exllamav3.model.model import Model
from exllamav3.modules.embedding import Embedding
from exllamav3.modules.gated_delta_net import GatedDeltaNet
from exllamav3.modules.linear import Linear
from exllamav3.modules.norm import RMSNorm
from exllamav3.ops import decode


def llama_config(**changes):
    """A two-layer Llama, hidden 128, 2 heads of 64, 1 key/value head."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "vocab_size": 130,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    return {k: v for k, v in (config | changes).items() if v != "absent"}


def qwen35_config(**changes):
    """A two-layer Qwen3.5: one gated delta net, one gated attention block."""
    return llama_config(
        architectures=["Qwen3_5ForCausalLM"],
        head_dim=64,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "default",
            "partial_rotary_factor": 0.5,
        },
        **changes,
    )


def random_exl3(key, in_features, out_features, *, bits=4, codebook="mul1", seed=0, bias=False):
    """A quantized linear of random trellis bits, padded; every bit pattern is a valid trellis."""
    random = torch.Generator().manual_seed(seed)
    k, n = pad_to_block(in_features), pad_to_block(out_features)

    def signs(size):
        return torch.randint(0, 2, (size,), generator=random).to(torch.float16) * 2 - 1

    words = int(16 * bits)
    shape = (k // 16, n // 16, words)
    codebook = Codebook.from_name(codebook)
    svh = signs(n)
    svh[out_features:] = 0
    tensors = {
        f"{key}.trellis": torch.randint(-(2**15), 2**15, shape, generator=random).to(torch.int16),
        f"{key}.suh": signs(k) * in_features**-0.5,
        f"{key}.svh": svh,
    }
    if codebook.marker:
        tensors[f"{key}.{codebook.marker}"] = marker_tensor(codebook)
    if bias:
        tensors[f"{key}.bias"] = torch.randn(n, generator=random).to(torch.float16)
    return tensors


def exact_weight(weight):
    """An `Exl3Tensor` in float64 `(in, out)`: diag(suh) P inner P diag(svh) of the definition."""
    block = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    block = block / 128**0.5
    inner = decode(weight.trellis_IOW, weight.codebook).double()
    k, n = inner.shape
    rows = torch.einsum("ij,bjn->bin", block, inner.view(k // 128, 128, n)).reshape(k, n)
    both = torch.einsum("kbj,ij->kbi", rows.view(k, n // 128, 128), block).reshape(k, n)
    return weight.suh_K.double()[:, None] * both * weight.svh_N.double()


def random_tensors(config, *, topology=None, quantize=None, seed=0):
    """Every tensor of a model.

    Args:
        config: a config.json object or a `Config`.
        topology: which blocks are fused.
        quantize: `Linear -> dict | None`, the stored form of a linear; None keeps it dense.
    """
    config = Config(config) if isinstance(config, dict) else config
    model = Model.from_config(config, topology=topology)
    random = torch.Generator().manual_seed(seed)

    def noise(*shape, scale=1.0):
        return (torch.randn(shape, generator=random) * scale).to(torch.bfloat16)

    tensors = {}
    for module in [m for top in (*model.modules, *model.side_modules) for m in top]:
        if isinstance(module, Linear):
            stored = quantize(module) if quantize is not None and module.qmap else None
            if stored is None and not (module.alt_key and module.key == "lm_head"):
                shape = (module.out_features, module.in_features)
                stored = {f"{module.key}.weight": noise(*shape, scale=module.in_features**-0.5)}
                if module.has_bias:
                    stored[f"{module.key}.bias"] = noise(module.out_features)
            tensors |= stored or {}
        elif isinstance(module, RMSNorm):
            tensors[f"{module.key}.weight"] = noise(module.size, scale=0.2) + 1 - module.offset
        elif isinstance(module, Embedding):
            tensors[f"{module.key}.weight"] = noise(module.vocab_size, module.hidden_size)
        elif isinstance(module, GatedDeltaNet):
            g = module.geometry
            tensors[f"{module.key}.A_log"] = noise(g.value_heads)
            tensors[f"{module.key}.dt_bias"] = noise(g.value_heads)
            tensors[f"{module.key}.conv1d.weight"] = noise(g.conv_channels, 1, g.conv_kernel)
    return tensors


def dequantized(tensors, widths):
    """The same checkpoint with every EXL3 linear as a dense float32 weight.

    Args:
        widths: `Linear.key -> (in_features, out_features)`, to cut the padding off.
    """
    dense = {}
    keys = {n.removesuffix(".trellis") for n in tensors if n.endswith(".trellis")}
    for key in sorted(keys):
        assert is_exl3(key, tensors)
        weight = Exl3Tensor.from_tensors(
            key, {n: t for n, t in tensors.items() if n.rpartition(".")[0] == key}
        )
        rows, columns = widths[key]
        dense[f"{key}.weight"] = weight.reconstruct(torch.float32)[:rows, :columns].t().contiguous()
        if weight.bias_N is not None:
            dense[f"{key}.bias"] = weight.bias_N[:columns].clone()
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in keys:
            dense[name] = tensor
    return dense


def linear_widths(model):
    """`(in_features, out_features)` of every linear of a model, by key."""
    return {m.key: (m.in_features, m.out_features) for m in model.walk() if isinstance(m, Linear)}


def write_folder(folder: Path, config, tensors, *, shards=1, metadata=None, index_metadata=None):
    """Write config.json and the tensors, with an index where there are several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": index_metadata or {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load_model(folder, device="cpu", **options):
    """Load a folder."""
    model = Model.from_config(Config.from_directory(folder))
    model.load(device=device, **options)
    return model


def relative_error(found, expected):
    """Relative Frobenius distance, in float64."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())
