"""`exllamav3 eval`: what is measured, and what is refused before a model is loaded."""

import json

import pytest
from command_line import QUANTIZED, ROOT, SOURCE, TRAINED, run
from tiny_models import llama_config, random_tensors, write_folder

from exllamav3.cli.main import main
from exllamav3.model.model import Model


def test_a_text_that_is_not_utf8_is_refused(capsys, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc\xff\xfe")
    code, _, err = run(capsys, "eval", TRAINED, "--text", str(path))
    assert code == 1
    assert "not UTF-8" in err


def test_evaluation_compares_with_a_reference(capsys):
    text = str(ROOT / "examples/text/evaluation.txt")
    code, out, _ = run(
        capsys, "eval", TRAINED, "--reference", TRAINED, "--rows=2", "--cols=64", "--text", text,
        "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert code == 0
    assert (result["rows"], result["cols"]) == (2, 64)
    assert (result["kl"], result["top1_agreement"]) == (0.0, 1.0)
    assert result["perplexity"] == result["reference_perplexity"]
    code, out, _ = run(capsys, "eval", TRAINED, "--rows=2", "--cols=64")
    assert code == 0
    assert f"perplexity            {result['perplexity']:.4f}" in out
    assert "KL" not in out


def test_evaluation_sees_the_distance_between_a_model_and_its_quantized_form(capsys):
    code, out, _ = run(
        capsys, "eval", QUANTIZED, "--reference", SOURCE, "--rows=2", "--cols=64", "--json"
    )
    result = json.loads(out)
    assert code == 0
    assert 0 < result["kl"] < 1
    assert 0.3 < result["top1_agreement"] < 1


def test_a_reference_with_another_vocabulary_is_refused_before_a_weight_is_read(
    capsys, tmp_path, monkeypatch
):
    config = llama_config(vocab_size=130)
    folder = write_folder(tmp_path / "other", config, random_tensors(config))
    monkeypatch.setattr(Model, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    code, out, err = run(capsys, "eval", TRAINED, "--reference", str(folder))
    assert (code, out) == (1, "")
    assert err.startswith(f"error: --reference {folder}: its vocabulary has 130 entries, that of")


@pytest.mark.parametrize("option", ["--rows", "--cols", "--threads"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e3", ""])
def test_a_count_that_is_none_is_wrong_usage_that_names_the_option(capsys, option, value):
    with pytest.raises(SystemExit) as stopped:
        main(["eval", TRAINED, f"{option}={value}"])
    assert stopped.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[-1]
