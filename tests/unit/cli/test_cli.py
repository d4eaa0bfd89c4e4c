"""The command line as a whole: usage, exit codes, output."""

import json
import shutil
import subprocess
import sys

import pytest
from command_line import QUANTIZED, TRAINED, run

from exllamav3.cli.main import COMMANDS, main
from exllamav3.cli.output import human_bytes, print_table


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


@pytest.mark.parametrize("count", ["0", "1025", "100000"])
def test_thread_counts_that_no_runtime_can_serve_are_wrong_usage(capsys, count):
    with pytest.raises(SystemExit):
        main(["eval", QUANTIZED, "--threads", count])
    assert "argument --threads: " in capsys.readouterr().err
