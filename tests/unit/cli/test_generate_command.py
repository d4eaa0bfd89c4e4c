"""`exllamav3 generate`: text on stdout, the rest on stderr, numbers in their domains."""

import io
import shutil
from pathlib import Path

import pytest
from command_line import QUANTIZED, TRAINED, run

from exllamav3.cli.main import main


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


def test_a_prompt_from_stdin_that_is_no_text_is_one_line_and_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(["generate", QUANTIZED, "-"]) == 1
    assert "stdin: the prompt is not text" in capsys.readouterr().err


def test_a_prompt_of_undecodable_bytes_is_one_line_and_exit_code_1(capsys):
    assert main(["generate", QUANTIZED, "a\udcff"]) == 1
    assert "bytes that are not UTF-8" in capsys.readouterr().err


def test_a_system_message_without_a_chat_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", TRAINED, "a", "--system", "Be brief."])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("give --chat too")


def test_a_tokenizer_of_another_model_is_refused_before_anything_is_printed(capsys, tmp_path):
    folder = tmp_path / "mixed"
    shutil.copytree(QUANTIZED, folder)
    shutil.copy(Path(TRAINED) / "tokenizer.json", folder)
    code, out, err = run(capsys, "generate", str(folder), "The king said")
    assert (code, out) == (1, "")
    assert "tokenizer and model do not belong together" in err


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--temperature", ["nan", "inf", "-1", "1e400", "1e31"]),
        ("--min-p", ["nan", "inf", "-0.1", "1.1"]),
        ("--top-p", ["nan", "inf", "-0.1", "7"]),
        ("--top-k", ["nan", "-1", "1.5", "1e3"]),
        ("--repetition-penalty", ["nan", "inf", "0", "-1", "1e400"]),
        ("--presence-penalty", ["nan", "inf", "-inf", "1e400", "one"]),
        ("--frequency-penalty", ["nan", "inf", "-inf", "-1e31", ""]),
        ("--max-new-tokens", ["0", "-1", "nan", "1.5"]),
        ("--seed", ["nan", "1.5"]),
    ],
)
def test_a_number_outside_its_domain_is_wrong_usage_that_names_the_option(capsys, option, values):
    for value in values:
        with pytest.raises(SystemExit) as stopped:
            main(["generate", TRAINED, "a", f"{option}={value}"])
        assert stopped.value.code == 2, value
        assert option in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "option",
    [
        "--temperature=1e-300", "--temperature=1e30", "--repetition-penalty=1e30",
        "--repetition-penalty=1e-30", "--presence-penalty=-1e30", "--frequency-penalty=1e30",
        "--frequency-penalty=-1e30", "--top-k=99999999999", "--min-p=1", "--top-p=0",
    ],
)  # fmt: skip
def test_the_ends_of_every_domain_still_generate(capsys, option):
    code, _, err = run(capsys, "generate", TRAINED, "And And", "-n", "3", option, "--seed", "1")
    assert code == 0, err
