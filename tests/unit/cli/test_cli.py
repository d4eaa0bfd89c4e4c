import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exllamav3.cli.inventory import take_inventory, totals
from exllamav3.cli.main import COMMANDS, main
from exllamav3.cli.output import human_bytes, print_table
from exllamav3.errors import FormatError
from exllamav3.topology import TensorMeta, parse_declaration

ROOT = Path(__file__).parents[3]
TRAINED = str(ROOT / "examples/tiny-qwen35-lm")
QUANTIZED = str(ROOT / "tests/data/interop/quantized/tiny-qwen3-4bpw-mcg-always")
SOURCE = str(ROOT / "tests/data/interop/source/tiny-qwen3")


def run(capsys, *arguments):
    """Exit code, stdout and stderr of a command."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_the_commands_and_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from exllamav3.cli.main import main\n"
        "main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "exllamav3", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.strip() == "0.1.0"


@pytest.mark.parametrize("command", ["inspect", "generate", "eval"])
def test_every_command_describes_itself(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"exllamav3 {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-command"], ["eval"], ["eval", "a", "--rows=0"]]
)
def test_wrong_usage_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: exllamav3" in capsys.readouterr().err


def test_a_missing_command_is_the_only_thing_asked_for(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.endswith("arguments are required: COMMAND\n")


@pytest.mark.parametrize("command", [["inspect"], ["eval"], ["generate"]])
def test_a_folder_without_a_model_is_one_line_and_exit_code_1(capsys, tmp_path, command):
    prompt = ["hello"] if command == ["generate"] else []
    code, out, err = run(capsys, *command, str(tmp_path), *prompt)
    assert code == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "config.json" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", TRAINED, "--rows", "100000"], "such rows fit"),
        (["eval", TRAINED, "--text", "/nowhere/text.txt"], "/nowhere/text.txt: no such text file"),
        (["eval", TRAINED, "--add-bos"], "no BOS token"),
        (["eval", TRAINED, "--reference", "/nowhere"], "/nowhere"),
        (["generate", TRAINED, ""], "the prompt has no tokens"),
        (["generate", TRAINED, "a", "--chat"], "no chat template"),
        (["generate", TRAINED, "a", "--top-p", "7"], "TopP: p is 7.0"),
        (["generate", TRAINED, "a", "-n", "5000"], "limited to 4096 tokens"),
        (["generate", TRAINED, "a", "--device", "tpu"], "tpu"),
    ],
)
def test_requests_that_cannot_be_met_are_one_line_and_exit_code_1(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


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


def test_generation_prints_the_text_alone_on_stdout(capsys):
    arguments = ["generate", TRAINED, "The king said", "-n", "8", "--greedy"]
    code, out, err = run(capsys, *arguments)
    assert code == 0
    assert out == "The king said unto him, What is this th\n"
    assert "8 new tokens" in err
    assert "ended by max_new_tokens" in err
    _, out, err = run(capsys, *arguments, "--completion-only", "--quiet", "--stop", " What")
    assert out == " unto him,\n"
    assert err == ""


def test_generation_repeats_itself_for_a_seed(capsys):
    arguments = ["generate", TRAINED, "And", "-n", "12", "--seed", "3", "--temperature", "1.5"]
    first, second = run(capsys, *arguments)[1], run(capsys, *arguments)[1]
    assert first == second
    assert first != run(capsys, *arguments, "--seed", "4")[1]


def test_the_prompt_can_come_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.read", lambda: "The king said")
    code, out, _ = run(capsys, "generate", TRAINED, "-", "-n", "2", "--greedy")
    assert code == 0
    assert out == "The king said unto him\n"


def test_an_ignored_file_is_one_line_on_stderr(capsys, tmp_path):
    shutil.copytree(QUANTIZED, tmp_path / "model")
    index = {"metadata": {}, "weight_map": {}}
    main(["inspect", QUANTIZED, "--json"])
    for weight in json.loads(capsys.readouterr().out)["weights"]:
        index["weight_map"] |= dict.fromkeys(weight["tensors"], "model.safetensors")
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(f"{QUANTIZED}/model.safetensors", tmp_path / "model/extra.safetensors")
    code, _, err = run(capsys, "inspect", str(tmp_path / "model"))
    assert code == 0
    assert err.startswith("warning: ")
    assert err.count("\n") == 1
    assert "extra.safetensors" in err


WEIGHT_KEYS = {
    "key": str,
    "kind": str,
    "shape": list,
    "dtype": str,
    "K": (int, float, type(None)),
    "codebook": (str, type(None)),
    "topology": (str, type(None)),
    "numel": int,
    "size_bytes": int,
    "tensors": list,
}


@pytest.mark.parametrize("directory", [TRAINED, QUANTIZED])
def test_inspection_as_json_has_a_fixed_form(capsys, directory):
    code, out, _ = run(capsys, "inspect", directory, "--json")
    report = json.loads(out)
    assert code == 0
    assert list(report) == [
        "directory", "architecture", "quantization", "topology", "weights", "totals",
    ]  # fmt: skip
    for weight in report["weights"]:
        assert list(weight) == list(WEIGHT_KEYS)
        assert all(isinstance(weight[key], kind) for key, kind in WEIGHT_KEYS.items())
        assert (weight["kind"] == "exl3") == (weight["K"] is not None)
    sizes = sum(weight["size_bytes"] for weight in report["weights"])
    header_bytes = 20_000
    stored = sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
    assert sizes <= stored <= sizes + header_bytes
    assert report["totals"]["size_bytes"] == sizes


def test_inspection_shows_rate_and_codebook_of_quantized_weights(capsys):
    _, out, _ = run(capsys, "inspect", QUANTIZED, "--json")
    weights = {weight["key"]: weight for weight in json.loads(out)["weights"]}
    q = weights["model.layers.0.self_attn.q_proj"]
    assert (q["kind"], q["K"], q["codebook"], q["shape"]) == ("exl3", 4, "mcg", [256, 512])
    assert q["topology"] is None
    assert weights["lm_head"]["K"] == 6
    code, out, _ = run(capsys, "inspect", QUANTIZED)
    assert code == 0
    assert "15 EXL3 linears" in out
    assert "4.15 bits" in out


def fused_model():
    """Headers and declaration of one fused and one split block."""

    def exl3(key, rows, columns, bits, marker):
        return {
            f"{key}.trellis": TensorMeta((rows // 16, columns // 16, 16 * bits), "I16"),
            f"{key}.suh": TensorMeta((rows,), "F16"),
            f"{key}.svh": TensorMeta((columns,), "F16"),
            f"{key}.{marker}": TensorMeta((), "I32"),
        }

    tensors = {"norm.weight": TensorMeta((128,), "BF16")}
    tensors |= exl3("a.self_attn.qkv_proj", 128, 512, 6, "mcg")
    rows = [
        {
            "layer": "a.self_attn",
            "variant": "fused_uniform",
            "components": ["q_proj", "k_proj", "v_proj"],
            "output_splits": [256, 128, 128],
            "projection": {"name": "qkv_proj", "K": 6, "codebook": "mcg", "scale": "always"},
        },
        {
            "layer": "b.self_attn",
            "variant": "split",
            "components": ["q_proj", "k_proj", "v_proj"],
            "output_splits": [256, 128, 128],
            "projections": [],
        },
    ]
    for name, width, bits in (("q_proj", 256, 3), ("k_proj", 128, 4), ("v_proj", 128, 5)):
        tensors |= exl3(f"b.self_attn.{name}", 128, width, bits, "mul1")
        rows[1]["projections"].append(
            {"name": name, "K": bits, "codebook": "mul1", "scale": "always"}
        )
    return tensors, parse_declaration({"schema": "exl3_qkv_topology/1", "layers": rows}, "test")


def test_the_inventory_names_the_declared_topology_of_each_weight():
    entries = take_inventory(*fused_model())
    assert [(e.key, e.topology, e.K, e.codebook) for e in entries] == [
        ("norm.weight", None, None, None),
        ("a.self_attn.qkv_proj", "fused_uniform", 6, "mcg"),
        ("b.self_attn.q_proj", "split", 3, "mul1"),
        ("b.self_attn.k_proj", "split", 4, "mul1"),
        ("b.self_attn.v_proj", "split", 5, "mul1"),
    ]
    fused = entries[1]
    assert fused.shape == [128, 512]
    assert fused.size_bytes == 128 * 512 * 6 // 8 + 2 * (128 + 512) + 4
    weights = 128 * (512 + 256 + 128 + 128)
    bits = 128 * (512 * 6 + 256 * 3 + 128 * 4 + 128 * 5) / weights
    assert totals(entries)["mean_bits"] == pytest.approx(bits)
    assert totals(entries)["exl3_weights"] == weights


def test_a_trellis_of_no_rate_is_refused():
    tensors, _ = fused_model()
    tensors["a.self_attn.qkv_proj.trellis"] = TensorMeta((8, 32, 100), "I16")
    with pytest.raises(FormatError, match=r"qkv_proj\.trellis"):
        take_inventory(tensors, None)


@pytest.mark.parametrize("shape", [(), (8,), (8, 64), (1, 8, 8, 64)])
def test_a_trellis_of_another_rank_is_refused(shape):
    tensors = {"a.trellis": TensorMeta(shape, "I16")}
    tensors |= {f"a.{name}": TensorMeta((128,), "F16") for name in ("suh", "svh")}
    with pytest.raises(FormatError, match=r"a\.trellis: has shape .*expected 3 dimensions"):
        take_inventory(tensors, None)


def test_a_table_in_a_pipe_is_aligned_and_uncut(capsys):
    print_table(("name", "size"), [("x" * 200, "1"), ("y", "1000")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "x" * 200 + "     1"
    assert lines[2] == "y" + " " * 199 + "  1000"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * 1024, "1.5 MiB")],
)
def test_sizes_are_readable(size, text):
    assert human_bytes(size) == text


def test_a_prompt_from_stdin_that_is_no_text_is_one_line_and_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(["generate", QUANTIZED, "-"]) == 1
    assert "stdin: the prompt is not text" in capsys.readouterr().err


def test_a_prompt_of_undecodable_bytes_is_one_line_and_exit_code_1(capsys):
    assert main(["generate", QUANTIZED, "a\udcff"]) == 1
    assert "bytes that are not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "1025", "100000"])
def test_thread_counts_that_no_runtime_can_serve_are_wrong_usage(capsys, count):
    with pytest.raises(SystemExit):
        main(["eval", QUANTIZED, "--threads", count])
    assert "argument --threads: " in capsys.readouterr().err
