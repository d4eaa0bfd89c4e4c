"""What each architecture of the table reads out of a configuration, and what it refuses."""

import pytest
from tiny_models import llama_config, qwen35_config, random_tensors, write_folder

from exllamav3.architecture.decoder import build_decoder, model_facts
from exllamav3.architecture.table import ARCHITECTURES, read_spec
from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.model.config import Config
from exllamav3.model.model import Model


def spec(**changes):
    return read_spec(Config(llama_config(**changes)))


def hybrid(**changes):
    return read_spec(Config(qwen35_config() | changes))


def test_an_unknown_architecture_is_refused_and_the_known_ones_listed():
    with pytest.raises(UnsupportedError, match=r"'GPT9' is not implemented.*LlamaForCausalLM"):
        spec(architectures=["GPT9"])


def test_llama_takes_its_head_size_from_the_hidden_size_unless_stated():
    assert spec().attention.head_dim == 64
    assert spec(head_dim=80).attention.head_dim == 80


def test_llama_biases_follow_the_configuration():
    plain, biased = spec(), spec(attention_bias=True, mlp_bias=True)
    assert (plain.attention.bias, plain.output_bias, plain.mlp_bias) == (False, False, False)
    assert (biased.attention.bias, biased.output_bias, biased.mlp_bias) == (True, True, True)


def test_qwen2_has_biases_on_q_k_and_v_only():
    found = spec(architectures=["Qwen2ForCausalLM"])
    assert (found.attention.bias, found.output_bias, found.qk_norm) == (True, False, False)


def test_qwen3_normalises_q_and_k():
    found = spec(architectures=["Qwen3ForCausalLM"])
    assert (found.qk_norm, found.norm_offset, found.attention.head_dim) == (True, 0.0, 128)


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_qwen3_5_and_qwen3_next_store_norms_minus_one_and_gate_their_attention(name):
    found = hybrid(architectures=[name], num_experts=0)
    assert (found.norm_offset, found.qk_norm, found.attention.gated) == (1.0, True, True)
    assert found.attention.output_splits == (256, 64, 64)
    assert found.delta.grouped == (name == "Qwen3NextForCausalLM")


def test_every_fourth_block_is_full_attention_where_kinds_are_not_listed():
    kinds = hybrid(layer_types=None, num_hidden_layers=9).layer_types
    assert [n for n, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7]
    kinds = hybrid(layer_types=None, num_hidden_layers=4, full_attention_interval=2).layer_types
    assert [n for n, kind in enumerate(kinds) if kind == "full_attention"] == [1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not implemented"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' is not"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' is not"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "layers 1 to 1 attend in a sliding window",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        spec(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "sliding_window": 64},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_no_matter(changes):
    assert spec(**changes).layer_types == ("full_attention",) * 2


def test_experts_are_refused_and_dense_qwen3_next_is_read():
    name = {"architectures": ["Qwen3NextForCausalLM"]}
    with pytest.raises(UnsupportedError, match="layer 0 is a mixture of experts"):
        hybrid(**name, num_experts=8)
    assert hybrid(**name, num_experts=8, mlp_only_layers=[0, 1]).delta.grouped


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "lists 1 layers, num_hidden_layers is 2"),
        ({"num_key_value_heads": 3}, "3 does not divide the 2 heads"),
        ({"hidden_size": None}, "hidden_size: missing"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            "head_dim: missing, and hidden_size 128",
        ),
        ({"intermediate_size": 0}, "intermediate_size: is 0"),
    ],
)
def test_a_setting_that_cannot_be_is_an_error(changes, message):
    with pytest.raises(FormatError, match=message):
        spec(**changes)


def test_value_heads_must_be_a_multiple_of_key_heads():
    with pytest.raises(FormatError, match="4 is no multiple of the 3 key heads"):
        hybrid(linear_num_key_heads=3)


@pytest.mark.parametrize("prefix", ["model", "model.language_model"])
def test_either_prefix_of_qwen3_5_is_told_by_its_tensors(tmp_path, prefix):
    tensors = {
        name.replace("model.", f"{prefix}.", 1): tensor
        for name, tensor in random_tensors(qwen35_config()).items()
    }
    folder = write_folder(tmp_path, qwen35_config(), tensors)
    model = Model.from_config(Config.from_directory(folder))
    assert model.facts().attention[0].layer == f"{prefix}.layers.1.self_attn"
    assert model.unclaimed(tensors) == []


def test_tensors_under_neither_prefix_are_an_error(tmp_path):
    folder = write_folder(
        tmp_path, qwen35_config(), {"x": random_tensors(qwen35_config()).popitem()[1]}
    )
    with pytest.raises(
        FormatError, match=r"is stored under neither of model, model\.language_model"
    ):
        Model.from_config(Config.from_directory(folder))


def test_every_architecture_of_the_table_builds_the_same_kind_of_tree():
    for name in ARCHITECTURES:
        config = qwen35_config() if "3_5" in name or "Next" in name else llama_config()
        config = config | {"architectures": [name], "num_experts": 0}
        found = read_spec(Config(config))
        kinds = [type(module).__name__ for module in build_decoder(found)]
        expected = ["Embedding", "TransformerBlock", "TransformerBlock", "RMSNorm", "Linear"]
        assert kinds == expected, name


def test_facts_name_full_attention_and_what_a_plan_must_not_name(data_dir):
    folder = data_dir / "interop" / "source" / "tiny-qwen35-vl"
    model = Model.from_config(Config.from_directory(folder))
    facts = model_facts(model.spec)
    assert [block.layer for block in facts.attention] == [
        "model.language_model.layers.1.self_attn",
        "model.language_model.layers.3.self_attn",
    ]
    assert facts.attention[0].in_features == 256
    assert facts.attention[0].output_splits == (512, 128, 128)
    assert set(facts.attention[0].qmaps) == {"block.attn.input"}
    assert facts.other == {
        "model.language_model.layers.0.linear_attn": "gated delta net",
        "model.language_model.layers.2.linear_attn": "gated delta net",
        "mtp.layers.0.self_attn": "MTP attention",
        "model.visual.blocks.0.attn": "vision attention",
    }


def test_the_mtp_head_is_a_side_module_with_bits_of_its_own(data_dir):
    folder = data_dir / "interop" / "source" / "tiny-qwen35-vl"
    model = Model.from_config(Config.from_directory(folder))
    linears = {m.key: m for top in model.side_modules for m in top if type(m).__name__ == "Linear"}
    assert sorted(linears) == [
        "mtp.fc",
        *(f"mtp.layers.0.mlp.{name}" for name in ("down_proj", "gate_proj", "up_proj")),
        *(f"mtp.layers.0.self_attn.{name}" for name in ("k_proj", "o_proj", "q_proj", "v_proj")),
    ]
    assert {linear.qbits_key for linear in linears.values()} == {"mtp_bits"}
    assert linears["mtp.fc"].qmap == "block.mtp.fc"
    assert (linears["mtp.fc"].in_features, linears["mtp.fc"].out_features) == (512, 256)
    assert not any(module.key.startswith("mtp") for module in model.walk())
    assert model.copied == ("model.visual.",)


def test_linears_carry_the_labels_of_the_activations_they_share(data_dir):
    folder = data_dir / "interop" / "source" / "tiny-qwen35-vl"
    model = Model.from_config(Config.from_directory(folder))
    labels = {
        module.key.removeprefix("model.language_model.layers."): (module.qmap, module.qgroup)
        for module in model.walk()
        if type(module).__name__ == "Linear"
    }
    base = "model.language_model.layers."
    assert labels["0.linear_attn.in_proj_qkv"] == (
        "block.attn.input",
        f"{base}0.linear_attn.qkvz",
    )
    assert labels["0.linear_attn.in_proj_z"] == labels["0.linear_attn.in_proj_qkv"]
    assert labels["0.linear_attn.out_proj"] == ("block.attn.output", f"{base}0.linear_attn.o")
    assert labels["0.linear_attn.in_proj_a"][0] is None
    assert labels["0.linear_attn.in_proj_b"][0] is None
    assert labels["1.self_attn.q_proj"] == ("block.attn.input", f"{base}1.self_attn.qkv")
    assert labels["1.self_attn.v_proj"] == labels["1.self_attn.k_proj"]
    assert labels["1.self_attn.o_proj"] == ("block.attn.o", f"{base}1.self_attn.o")
    assert labels["1.mlp.gate_proj"] == ("block.mlp.input", f"{base}1.mlp.gu")
    assert labels["1.mlp.up_proj"] == labels["1.mlp.gate_proj"]
    assert labels["1.mlp.down_proj"] == ("block.mlp.down", f"{base}1.mlp.d")
    assert labels["lm_head"] == ("block", "lm_head")
