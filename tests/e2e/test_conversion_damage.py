"""A work folder with damaged files: what can be made again is, the rest is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conversion_support import (
    Recorder,
    folder_bytes,
    interrupt,
    job_options,
    stand_in_quantize,
    write_source,
)
from exllamav3.conversion import ConversionJob, convert, pipeline
from safetensors.torch import load_file, save_file
from tiny_models import llama_config

from exllamav3.cli.main import main
from exllamav3.errors import ConversionError

MODULES = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]


pytestmark = pytest.mark.usefixtures("stand_in")


class Job:
    """A source, a work folder interrupted before the head, and the bytes of a whole job."""

    def __init__(self, root: Path) -> None:
        self.source = write_source(root / "source", llama_config(intermediate_size=128))
        self.expected = folder_bytes(convert(job_options(self.source, root / "whole")).out_dir)
        self.root = root / "stopped"
        self.options = job_options(self.source, self.root)
        interrupt(self.options, occurrence=len(MODULES))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Job:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "quantize_linear", stand_in_quantize)
        return Job(tmp_path_factory.mktemp("damage"))


@pytest.fixture
def work(stopped, tmp_path) -> Path:
    """A copy of the interrupted work folder; the output folder keeps the job's claim."""
    shutil.copytree(stopped.root, tmp_path / "job")
    return tmp_path / "job" / "work"


def resume(work: Path) -> tuple[dict[str, bytes], Recorder]:
    listener = Recorder()
    given = {"out_dir": str(work.parent / "out")}
    with ConversionJob.resume(str(work), given, listener=listener) as job:
        made = job.run().out_dir
    return folder_bytes(made), listener


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def behead(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


DAMAGE = [cut, behead, empty, garble, Path.unlink, replace_by_a_folder]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("key", MODULES[:-1])
def test_a_damaged_module_is_made_again_and_the_bytes_are_the_same(stopped, work, key, damage):
    path = work / "qtensors" / f"{key}.safetensors"
    damage(path)
    found, listener = resume(work)
    assert found == stopped.expected
    assert listener.made() == [key, "lm_head"]
    said = [line for line in listener.lines if line.startswith(str(path))]
    assert said == [] if damage is Path.unlink else "is made again" in said[0]


def test_a_module_file_with_other_contents_is_made_again(stopped, work):
    path = work / "qtensors" / "model.layers.0.safetensors"
    shutil.copy(work / "qtensors" / "model.layers.1.safetensors", path)
    found, listener = resume(work)
    assert found == stopped.expected
    assert any("model.layers.0.input_layernorm.weight is missing" in s for s in listener.lines)


@pytest.mark.parametrize("report", ["", "{", "[]", '{"key": 1}', '{"linears": [{}]}'])
def test_a_module_file_with_a_damaged_report_is_made_again(stopped, work, report):
    path = work / "qtensors" / "model.layers.0.safetensors"
    save_file(load_file(path), path, metadata={"report": report} if report else None)
    found, listener = resume(work)
    assert found == stopped.expected
    assert any("report" in line and "is made again" in line for line in listener.lines)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("folders", [["ckpt"], ["ckpt", "ckpt_old"]])
def test_a_damaged_checkpoint_costs_time_only(stopped, work, folders, name, damage):
    for folder in folders:
        damage(work / folder / name)
    found, listener = resume(work)
    assert found == stopped.expected
    assert listener.made() == ["lm_head"]
    assert sum("this checkpoint is dropped" in line for line in listener.lines) == len(folders)


@pytest.mark.parametrize(
    "text", ["3", "{}", '{"next_module": "4", "rows": 6, "bad_rows": []}',
             '{"next_module": 4, "rows": 5, "bad_rows": []}',
             '{"next_module": 4, "rows": 6, "bad_rows": [6]}'],
)  # fmt: skip
def test_progress_that_cannot_be_is_not_believed(stopped, work, text):
    (work / "ckpt" / "state.json").write_text(text)
    assert resume(work)[0] == stopped.expected


def test_with_checkpoints_and_a_module_damaged_everything_is_still_made(stopped, work):
    cut(work / "ckpt" / "state.safetensors")
    empty(work / "ckpt_old" / "state.json")
    empty(work / "qtensors" / "model.layers.1.safetensors")
    found, listener = resume(work)
    assert found == stopped.expected
    assert listener.made() == ["model.layers.1", "lm_head"]


def test_a_finished_job_with_a_damaged_module_can_be_written_once_more(stopped, tmp_path):
    options = job_options(stopped.source, tmp_path)
    convert(options)
    cut(Path(options.work_dir) / "qtensors" / "model.layers.1.safetensors")
    given = {"out_dir": str(tmp_path / "again")}
    listener = Recorder()
    with ConversionJob.resume(options.work_dir, given, listener=listener) as job:
        job.run()
    assert folder_bytes(tmp_path / "again") == stopped.expected
    assert listener.made() == ["model.layers.1"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_token_rows_are_not_cut_a_second_time(work, damage):
    for name in ("ckpt", "ckpt_old"):
        shutil.rmtree(work / name)
    damage(work / "calibration.safetensors")
    with pytest.raises(ConversionError, match=r"calibration rows of this job cannot be read.*new"):
        resume(work)


def test_token_rows_of_another_shape_are_refused(work):
    for name in ("ckpt", "ckpt_old"):
        shutil.rmtree(work / name)
    save_file(
        {"input_ids": torch.zeros(6, 15, dtype=torch.int32)}, work / "calibration.safetensors"
    )
    with pytest.raises(ConversionError, match=r"expected input_ids \[6, 16\], found \[6, 15\]"):
        resume(work)


@pytest.mark.parametrize("damage", [cut, behead, empty, garble])
def test_a_damaged_record_is_named_with_what_to_do(work, damage, capsys):
    damage(work / "job.json")
    assert main(["convert", "--resume", "-w", str(work)]) == 1
    captured = capsys.readouterr().err
    assert captured.startswith(f"error: {work / 'job.json'}: not valid JSON")
    assert "start a new job in an empty folder" in captured


@pytest.mark.parametrize("key", ["format", "id", "options", "qkv_topology", "source"])
def test_a_record_without_one_of_its_parts_is_refused(work, key):
    record = json.loads((work / "job.json").read_text())
    del record[key]
    (work / "job.json").write_text(json.dumps(record))
    with pytest.raises(ConversionError, match=rf"job\.json: .*{key}.*start a new job"):
        ConversionJob.resume(str(work))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_mark_of_a_finished_job_says_where_the_result_is(stopped, work, text):
    (work / "finished.json").write_text(text)
    with pytest.raises(ConversionError, match=r"finished\.json: .*complete where it has a config"):
        resume(work)
    (work / "finished.json").unlink()
    assert resume(work)[0] == stopped.expected
