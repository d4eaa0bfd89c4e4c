"""Loading and running whole models: what is refused, what is counted, what is given back."""

import pytest
import torch
from tiny_models import (
    dequantized,
    linear_widths,
    llama_config,
    load_model,
    qwen35_config,
    random_exl3,
    random_tensors,
    relative_error,
    write_folder,
)

from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.model.config import Config
from exllamav3.model.model import Model
from exllamav3.modules.module import DictSource

IDS = torch.arange(20).view(2, 10) * 5 % 130
EXL3 = {"quant_method": "exl3", "version": "0.1.0", "bits": 4.0}


def from_tensors(config, tensors, dtype=None):
    model = Model.from_config(Config(config))
    model.load(device="cpu", source=DictSource(tensors), dtype=dtype)
    return model


@pytest.fixture
def tensors():
    return random_tensors(llama_config())


def test_logits_are_float32_over_the_unpadded_vocabulary(tensors):
    logits = from_tensors(llama_config(), tensors).forward(IDS, {})
    assert logits.shape == (2, 10, 130)
    assert logits.dtype == torch.float32


def test_float16_activations_stay_close_to_float32(tensors):
    wide = from_tensors(llama_config(), tensors).forward(IDS)
    narrow = from_tensors(llama_config(), tensors, torch.float16).forward(IDS)
    assert narrow.dtype == torch.float32
    assert relative_error(narrow, wide) < 5e-3


def test_rows_do_not_influence_each_other(tensors):
    model = from_tensors(llama_config(), tensors)
    alone = torch.cat([model.forward(row[None]) for row in IDS])
    torch.testing.assert_close(model.forward(IDS), alone)


def test_only_the_last_places_are_computed_when_asked(tensors):
    model = from_tensors(llama_config(), tensors)
    full = model.forward(IDS)
    torch.testing.assert_close(model.forward(IDS, {"last_tokens_only": 3}), full[:, -3:])
    lengths = torch.tensor([10, 4])
    last = model.forward(IDS, {"last_tokens_only": 1, "new_lengths": lengths})
    torch.testing.assert_close(last[:, 0], torch.stack([full[0, 9], full[1, 3]]))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_loads_whole_or_in_shards(tmp_path, tensors, shards):
    folder = write_folder(tmp_path, llama_config(), tensors, shards=shards)
    expected = from_tensors(llama_config(), tensors).forward(IDS)
    assert torch.equal(load_model(folder).forward(IDS), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sources_in_other_dtypes_and_mixtures_load(tensors, dtype):
    mixed = {n: t.to(dtype) if i % 2 else t for i, (n, t) in enumerate(tensors.items())}
    expected = from_tensors(llama_config(), tensors).forward(IDS)
    assert relative_error(from_tensors(llama_config(), mixed).forward(IDS), expected) < 1e-3


@pytest.mark.parametrize(
    ("bits", "codebook"), [(4, "3inst"), (3, "mcg"), (1.5, "mul1"), (2.5, "mul1"), (3.5, "mul1")]
)
@pytest.mark.parametrize("make_config", [llama_config, qwen35_config])
def test_a_quantized_model_equals_the_dense_model_of_its_decoded_weights(
    make_config, bits, codebook
):
    config = make_config()
    numbers = iter(range(100))

    def quantize(linear):
        return random_exl3(
            linear.key,
            linear.in_features,
            linear.out_features,
            bits=bits,
            codebook=codebook,
            seed=next(numbers),
        )

    stored = random_tensors(config, quantize=quantize)
    model = from_tensors(config, stored)
    dense = from_tensors(config, dequantized(stored, linear_widths(model)))
    assert relative_error(model.forward(IDS), dense.forward(IDS)) < 1e-4


def quantized_llama(**changes):
    """Tensors of a quantized Llama, its stored tensors changed by suffix."""

    def quantize(linear):
        stored = random_exl3(linear.key, linear.in_features, linear.out_features)
        for suffix, change in changes.items():
            tensor = stored.pop(f"{linear.key}.{suffix}")
            name, tensor = change(tensor)
            stored[f"{linear.key}.{name}"] = tensor
        return stored

    return random_tensors(llama_config(), quantize=quantize)


def sign_bits(scales):
    bits = (scales < 0).view(-1, 16).to(torch.int32)
    packed = (bits << torch.arange(16)).sum(1)
    return torch.where(packed >= 2**15, packed - 2**16, packed).to(torch.int16)


def test_legacy_packed_signs_mean_scales_of_one():
    plain = quantized_llama(
        suh=lambda t: ("suh", t.sign()), svh=lambda t: ("svh", torch.where(t < 0, -1.0, 1.0).half())
    )
    legacy = quantized_llama(suh=lambda t: ("su", sign_bits(t)), svh=lambda t: ("sv", sign_bits(t)))
    assert "model.layers.0.self_attn.q_proj.su" in legacy
    expected = from_tensors(llama_config(), plain).forward(IDS)
    assert torch.equal(from_tensors(llama_config(), legacy).forward(IDS), expected)


@pytest.mark.parametrize(
    "change", [lambda t: t.reshape(1), lambda t: t.reshape(1, 1, 1), lambda t: t.to(torch.int64)]
)
def test_markers_of_other_shapes_and_dtypes_count_by_their_presence(change):
    odd = quantized_llama(mul1=lambda t: ("mul1", change(t)))
    expected = from_tensors(llama_config(), quantized_llama()).forward(IDS)
    assert torch.equal(from_tensors(llama_config(), odd).forward(IDS), expected)


def test_both_markers_at_once_are_an_error():
    tensors = quantized_llama()
    key = "model.layers.0.self_attn.q_proj"
    tensors[f"{key}.mcg"] = tensors[f"{key}.mul1"]
    with pytest.raises(FormatError, match="both markers"):
        from_tensors(llama_config(), tensors)


def test_a_tied_model_needs_no_head_tensor(tmp_path):
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    assert "lm_head.weight" not in tensors
    untied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    expected = from_tensors(llama_config(), untied).forward(IDS)
    assert torch.equal(from_tensors(config, tensors).forward(IDS), expected)
    assert torch.equal(from_tensors(config, untied).forward(IDS), expected)


def test_an_untied_model_without_a_head_is_an_error_that_says_what_may_be_wrong(tensors):
    del tensors["lm_head.weight"]
    with pytest.raises(FormatError, match=r"lm_head\.weight.*tie_word_embeddings"):
        from_tensors(llama_config(), tensors)


def test_all_missing_tensors_are_named_before_anything_is_read(tensors):
    class Unreadable(DictSource):
        def get(self, name):
            pytest.fail(f"{name} was read")

    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    model = Model.from_config(Config(llama_config()))
    with pytest.raises(FormatError, match=r"2 tensors .*mlp\.up_proj\.weight, model\.norm\.weight"):
        model.load(device="cpu", source=Unreadable(tensors))


def test_tensor_parallelism_is_refused_before_anything_is_read(tensors):
    model = Model.from_config(Config(llama_config()))
    with pytest.raises(UnsupportedError, match="tensor parallelism is not there yet"):
        model.load(device="cpu", source=DictSource({}), tensor_p=True)


def test_other_activation_dtypes_are_refused(tensors):
    with pytest.raises(UnsupportedError, match="float32 or float16"):
        from_tensors(llama_config(), tensors, torch.bfloat16)


def test_progress_is_reported_after_each_module(tensors):
    seen = []
    model = Model.from_config(Config(llama_config()))
    model.load(
        device="cpu",
        source=DictSource(tensors),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(n, 5) for n in range(1, 6)]


def test_an_unloaded_model_says_so(tensors):
    model = from_tensors(llama_config(), tensors)
    model.unload()
    with pytest.raises(FormatError, match="not loaded"):
        model.forward(IDS)


def test_stored_tensors_are_given_back_by_the_modules_that_hold_them(tensors):
    model = from_tensors(llama_config(), tensors)
    found = {n: t for module in model.walk() for n, t in module.get_tensors().items()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        kept = "norm" in name or "embed" in name
        assert found[name].dtype == (torch.bfloat16 if kept else torch.float16)
        assert torch.equal(found[name], tensor.to(found[name].dtype))


def test_what_a_cache_has_to_hold_is_listed_by_layer():
    specs = Model.from_config(Config(qwen35_config())).cache_specs()
    assert [(type(spec).__name__, spec.layer) for spec in specs] == [
        ("RecurrentSpec", 0),
        ("KvSpec", 1),
    ]
    assert (specs[0].conv_channels, specs[0].conv_kernel) == (256, 4)
    assert (specs[1].kv_heads, specs[1].head_dim) == (1, 64)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 2]), r"found torch.int64 \[2\]"),
        (torch.zeros(1, 2), "found torch.float32"),
        (torch.zeros(1, 0, dtype=torch.int64), "expected a non-empty"),
        ([[1]], "found list"),
        (torch.tensor([[130]]), r"range 130\.\.130 leaves the vocabulary of 130"),
        (torch.tensor([[-1, 3]]), r"range -1\.\.3 leaves"),
    ],
)
def test_ids_that_cannot_be_are_refused(tensors, ids, message):
    with pytest.raises(FormatError, match=message):
        from_tensors(llama_config(), tensors).forward(ids)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"chache": None}, r"params\['chache'\] is unknown"),
        ({"attn_mode": "sdpa"}, "attn_mode"),
        ({"attn_mode": "flash_attn"}, "needs params"),
        ({"past_len": 3}, "no cache that could hold them"),
        ({"past_len": -1}, "expected a count"),
        ({"cache_seqlens": torch.tensor([1])}, r"integer tensor of shape \(2,\)"),
        ({"new_lengths": torch.tensor([1.0, 2.0])}, r"integer tensor of shape \(2,\)"),
        ({"last_tokens_only": 0}, "expected a count"),
    ],
)
def test_parameters_that_cannot_be_are_refused(tensors, params, message):
    with pytest.raises(FormatError, match=message):
        from_tensors(llama_config(), tensors).forward(IDS, params)


def test_a_quantized_folder_without_a_declaration_is_all_split(tmp_path):
    stored = quantized_llama()
    folder = write_folder(tmp_path, llama_config(quantization_config=EXL3), stored)
    model = load_model(folder)
    assert model.topology is None
    assert torch.equal(model.forward(IDS), from_tensors(llama_config(), stored).forward(IDS))


@pytest.mark.parametrize(
    "kind", ["source/tiny-qwen35-vl", "quantized/tiny-qwen35-vl-4bpw-mul1-always"]
)
def test_side_modules_load_and_give_back_what_is_stored_but_do_not_run(data_dir, kind):
    model = Model.from_config(Config.from_directory(data_dir / "interop" / kind))
    files = model.config.files
    found = {}
    for top in model.side_modules:
        top.load(files, "cpu")
        found |= {n: t for module in top for n, t in module.get_tensors().items()}
    assert set(found) == {name for name in files.names() if name.startswith("mtp.")}
    for name, tensor in found.items():
        stored = files.get(name)
        assert torch.equal(tensor, stored.to(tensor.dtype)), name
        assert "quantized" not in kind or tensor.dtype == stored.dtype
    attention = next(m for top in model.side_modules for m in top if m.key.endswith("self_attn"))
    assert attention.layer == 0  # collides with the decoder's; the key does not
    with pytest.raises(FormatError, match="not loaded"):
        model.forward(IDS)
