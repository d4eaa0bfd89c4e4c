"""`exllamav3 convert`: spellings, defaults, resume, interruption, exit codes."""

from __future__ import annotations

import pytest
from conversion_support import CALIBRATION, folder_bytes, stand_in_quantize, write_source
from exllamav3.conversion import job as job_module
from exllamav3.conversion import pipeline

from exllamav3.cli.convert import build_parser
from exllamav3.cli.main import main

LONG = {
    "in_dir": "x", "work_dir": "x", "out_dir": "x", "shard_size": "5", "bits": "4.5",
    "head_bits": "5", "mtp_bits": "3", "vision_bits": "16", "cal_data": "x", "cal_rows": "5",
    "cal_cols": "6", "checkpoint_interval": "7", "devices": "cpu", "codebook": "mcg",
    "out_scales": "auto", "seed": "3", "qkv_topology": "p.json",
}  # fmt: skip
SHORT = {
    "-i": "in_dir", "-w": "work_dir", "-o": "out_dir", "-ss": "shard_size", "-b": "bits",
    "-hb": "head_bits", "-mb": "mtp_bits", "-vb": "vision_bits", "-cd": "cal_data",
    "-cr": "cal_rows", "-cc": "cal_cols", "-cpi": "checkpoint_interval", "-d": "devices",
    "-cb": "codebook",
}  # fmt: skip


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(pipeline, "quantize_linear", stand_in_quantize)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("cli") / "source")


def words(source, root, *more: str) -> list[str]:
    return [
        "convert", "-i", str(source), "-w", str(root / "work"), "-o", str(root / "out"),
        "-b", "3", "-hb", "4", "-cr", "6", "-cc", "16", "-d", "cpu",
        "-cd", str(source.parent / CALIBRATION), *more,
    ]  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_long_names_are_accepted_with_underscores_and_dashes(name):
    for spelling in (name, name.replace("_", "-")):
        given = vars(build_parser().parse_args(["-w", "w", f"--{spelling}", LONG[name]]))
        assert set(given) == {"work_dir", name}


@pytest.mark.parametrize(("flag", "name"), SHORT.items())
def test_short_names_mean_the_long_ones(flag, name):
    one = vars(build_parser().parse_args(["-w", "w", flag, LONG[name]]))
    two = vars(build_parser().parse_args(["-w", "w", f"--{name}", LONG[name]]))
    assert one == two


def test_the_plan_has_an_alias():
    for flag in ("--qkv-topology-plan", "--qkv_topology_plan"):
        assert build_parser().parse_args(["-w", "w", flag, "p"]).qkv_topology == "p"


@pytest.mark.parametrize("flag", ["--bit", "--head", "--in", "--qkv", "--res"])
def test_names_cannot_be_abbreviated(flag, capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["-w", "w", flag, "4"])


def test_options_that_are_not_given_stay_absent():
    assert vars(build_parser().parse_args(["-w", "w", "-r"])) == {"work_dir": "w", "resume": True}


def test_devices_are_numbers_or_the_cpu(capsys):
    parse = build_parser().parse_args
    assert parse(["-w", "w", "-d", "0, 1"]).devices == ("cuda:0", "cuda:1")
    assert parse(["-w", "w", "-d", "cpu"]).devices == ("cpu",)
    with pytest.raises(SystemExit):
        parse(["-w", "w", "-d", "0,"])


def test_a_job_runs_and_prints_a_line_for_each_linear_and_module(source, tmp_path, capsys):
    assert main(words(source, tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    for key in ("model.layers.0.self_attn.q_proj", "lm_head"):
        assert any(line.startswith(f"  {key} ") and "proxy err" in line for line in lines)
    blocks = [line for line in lines if line.startswith("-- model.layers.")]
    assert all("rel err" in line and "SQNR" in line and "ETA" in line for line in blocks)
    assert lines[-1].startswith("done        ")
    assert "(bits per weight: decoder 3.00, with head 3.12)" in lines[-1]


@pytest.mark.parametrize("missing", ["-i", "-o", "-b"])
def test_a_new_job_needs_source_output_and_bits(source, tmp_path, capsys, missing):
    line = words(source, tmp_path)
    at = line.index(missing)
    assert main(line[:at] + line[at + 2 :]) == 1
    assert f"error: {missing} " in capsys.readouterr().err


def test_refusals_are_one_line_on_stderr(source, tmp_path, capsys):
    assert main(words(source, tmp_path, "-vb", "6")) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: -vb (vision_bits) is 6, expected 16")


def test_ctrl_c_says_how_to_resume_and_resuming_finishes(source, tmp_path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job_module, "write_output", interrupt)
        assert main(words(source, tmp_path)) == 130
    command = f"exllamav3 convert --resume -w {tmp_path / 'work'}"
    assert f"finished modules are kept. Continue with: {command}" in capsys.readouterr().err
    assert main(command.split()[1:]) == 0
    assert main(words(source, tmp_path / "whole")) == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole" / "out")


def test_a_contradiction_on_resume_is_an_error(source, tmp_path, capsys):
    assert main(words(source, tmp_path)) == 0
    assert main(["convert", "-r", "-w", str(tmp_path / "work"), "-b", "4"]) == 1
    assert "-b (bits) is stored as 3.0, given as 4.0" in capsys.readouterr().err
    assert main(["convert", "-r", "-w", str(tmp_path / "work"), "-b", "3"]) == 0
    assert "finished already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("-b", ["nan", "inf", "-1", "0", "1e400"]),
        ("-cpi", ["nan", "inf", "-1", "1e400"]),
        ("-hb", ["-1", "0", "99999999999999999999"]),
        ("-mb", ["-1", "9"]),
        ("-ss", ["0", "-5"]),
        ("-cr", ["0", "-5", "99999999999999999999"]),
        ("-cc", ["0", "-5", "99999999999999999999"]),
        ("--seed", ["-1"]),
    ],
)
def test_a_number_outside_its_domain_is_refused_by_its_flag(source, tmp_path, capsys, flag, values):
    for value in values:
        assert main(words(source, tmp_path, flag, value)) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert flag in error
    assert not (tmp_path / "work").exists()
