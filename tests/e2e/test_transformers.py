"""Random models against a float32 run of transformers, for what no stored logits cover."""

import pytest
import torch
from tiny_models import llama_config, load_model, qwen35_config, relative_error

pytestmark = pytest.mark.slow

ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
# transformers writes "partial_rotary_factor": 0.25 beside whatever rope_parameters says
PARTIAL = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}
HYBRID = qwen35_config() | {
    "num_experts": 0,
    "mlp_only_layers": [0, 1],
    "rope_parameters": PARTIAL,
}


def family(name, **changes):
    return llama_config(**changes) | {"architectures": [name]}


CASES = {
    **{
        f"llama-{name}": family("LlamaForCausalLM", rope_parameters=rope | {"rope_theta": 1e4})
        for name, rope in ROPE.items()
    },
    "llama-head80": family(
        "LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=1, head_dim=80
    ),
    "llama-biases": family("LlamaForCausalLM", attention_bias=True, mlp_bias=True),
    "llama-tied": family("LlamaForCausalLM", tie_word_embeddings=True),
    "qwen2-tied": family("Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen3-head96": family("Qwen3ForCausalLM", head_dim=96, num_key_value_heads=1),
    "qwen3.5": HYBRID | {"architectures": ["Qwen3_5ForCausalLM"]},
    "qwen3-next": HYBRID | {"architectures": ["Qwen3NextForCausalLM"]},
}


@pytest.mark.parametrize("name", CASES)
def test_a_random_model_gives_the_logits_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = {k: v for k, v in CASES[name].items() if k != "architectures"}
    architecture = CASES[name]["architectures"][0]
    if architecture == "Qwen3_5ForCausalLM":
        model_class, config_class = Qwen3_5ForCausalLM, Qwen3_5TextConfig
    else:
        model_class = getattr(transformers, architecture)
        config_class = model_class.config_class
    torch.manual_seed(0)
    made = model_class(config_class(**config)).to(torch.bfloat16)
    with torch.no_grad():  # norms and biases are born trivial
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    made.save_pretrained(tmp_path)
    theirs = model_class.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 130, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids).logits
    assert relative_error(load_model(tmp_path).forward(ids), expected) < 2e-5
