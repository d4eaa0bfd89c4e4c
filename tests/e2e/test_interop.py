"""Checkpoints of others: unquantized models against transformers, EXL3 models against the
library that made them.

Stored logits are float16. Those of the sources come from a float32 run of transformers, those of
the quantized models from a float16 run on a GPU, hence the wider bounds.
"""

import pytest
from safetensors.torch import load_file
from tiny_models import load_model, relative_error

SOURCES = {"tiny-llama": 2e-3, "tiny-qwen2": 2e-3, "tiny-qwen3": 2e-3, "tiny-qwen35-vl": 5e-3}
QUANTIZED = {
    "tiny-llama-4bpw-mul1-always": 1e-2,
    "tiny-qwen2-4bpw-mul1-always": 1e-2,
    "tiny-qwen3-4bpw-mcg-always": 1e-2,
    "tiny-qwen35-vl-4bpw-mul1-always": 3e-2,
}


def logits_and_reference(folder, device="cpu"):
    reference = load_file(f"{folder}.logits.safetensors")
    logits = load_model(folder, device).forward(reference["input_ids"], {}).cpu()
    assert logits.shape == reference["logits"].shape
    return logits, reference["logits"]


@pytest.mark.parametrize("name", SOURCES)
def test_an_unquantized_model_gives_the_logits_of_transformers(data_dir, name):
    logits, reference = logits_and_reference(data_dir / "interop" / "source" / name)
    assert relative_error(logits, reference) < SOURCES[name]


def test_the_trained_example_gives_the_logits_of_transformers(data_dir, example_model):
    reference = load_file(data_dir / "tiny-qwen35-lm.logits.safetensors")
    logits = load_model(example_model).forward(reference["input_ids"], {})
    assert relative_error(logits, reference["logits"]) < 2e-3


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_model_of_the_established_library_gives_its_logits(data_dir, name, device):
    logits, reference = logits_and_reference(data_dir / "interop" / "quantized" / name, device)
    assert relative_error(logits, reference) < QUANTIZED[name]
    assert int((logits.argmax(-1) == reference.argmax(-1)).sum()) >= 123  # of 128


@pytest.mark.cuda
@pytest.mark.parametrize("name", SOURCES)
def test_an_unquantized_model_in_float16_on_a_gpu_stays_close_to_transformers(data_dir, name):
    logits, reference = logits_and_reference(data_dir / "interop" / "source" / name, "cuda")
    assert relative_error(logits, reference) < 1e-2


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_tensor_of_a_quantized_model_is_accounted_for(data_dir, name):
    model = load_model(data_dir / "interop" / "quantized" / name)
    assert model.unclaimed(model.config.files.names()) == []
