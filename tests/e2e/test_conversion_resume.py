"""Resumed jobs: what they keep, what may change, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conversion_support import (
    CALIBRATION,
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

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import ConversionError

pytestmark = pytest.mark.usefixtures("stand_in")


def test_finished_modules_are_not_quantized_again(source, tmp_path, monkeypatch):
    options = job_options(source, tmp_path, checkpoint_interval=1000)
    interrupt(options, occurrence=4)
    made: list[int] = []

    def count(weight_KN, *arguments, **named):
        made.append(weight_KN.numel())
        return stand_in_quantize(weight_KN, *arguments, **named)

    monkeypatch.setattr(pipeline, "quantize_linear", count)
    listener = Recorder()
    with ConversionJob.resume(options.work_dir, listener=listener) as job:
        job.run()
    assert len(made) == 1  # lm_head
    assert [key for key, _, resumed in listener.modules if resumed] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1",
    ]  # fmt: skip
    assert ("model.layers.0", True, True) in listener.modules  # compared again, from its file


def test_a_resumed_job_keeps_codebook_and_scales_unless_given(source, tmp_path):
    options = job_options(source, tmp_path, codebook="mcg", out_scales="never")
    interrupt(options)
    with ConversionJob.resume(options.work_dir) as job:
        assert (job.options.codebook, job.options.out_scales) == ("mcg", "never")
        job.run()
    names = TensorFiles(options.out_dir).names()
    assert not any(name.endswith(".mul1") for name in names)


def test_a_codebook_given_on_resume_counts_from_there_on_and_is_stored(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupt(options, occurrence=3)
    listener = Recorder()
    with ConversionJob.resume(options.work_dir, {"codebook": "mcg"}, listener=listener):
        assert any("the 2 finished modules keep theirs" in line for line in listener.lines)
    with ConversionJob.resume(options.work_dir) as job:
        job.run()
    names = TensorFiles(options.out_dir).names()
    assert "model.layers.0.mlp.up_proj.mul1" in names
    assert "model.layers.1.mlp.up_proj.mcg" in names


def test_contradicting_options_are_refused_and_the_job_stays_usable(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupt(options)
    with pytest.raises(ConversionError, match=r"-b \(bits\) is stored as 3.0, given as 4.0"):
        ConversionJob.resume(options.work_dir, {"bits": 4.0})
    with ConversionJob.resume(options.work_dir) as job:
        job.run()


def test_a_job_resumes_after_source_work_and_output_were_moved(source, tmp_path):
    root = tmp_path / "old"
    root.mkdir()
    moved = shutil.copytree(source, root / "model")
    options = job_options(moved, root, cal_data=str(source.parent / CALIBRATION))
    interrupt(options)
    root.rename(tmp_path / "new")
    root = tmp_path / "new"
    given = {"in_dir": str(root / "model"), "out_dir": str(root / "out")}
    with ConversionJob.resume(str(root / "work"), given) as job:
        made = job.run().out_dir
    expected = convert(job_options(source, tmp_path / "whole")).out_dir
    assert folder_bytes(made) == folder_bytes(expected)


def test_another_source_is_refused_on_resume(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupt(options)
    other = write_source(tmp_path / "other" / "source", seed=1)
    with pytest.raises(ConversionError, match="not the source this job was started with"):
        ConversionJob.resume(options.work_dir, {"in_dir": str(other)})


def test_the_calibration_file_is_no_longer_needed_on_resume(tmp_path):
    folder = write_source(tmp_path / "source")
    options = job_options(folder, tmp_path)
    interrupt(options)
    (tmp_path / CALIBRATION).unlink()
    with ConversionJob.resume(options.work_dir) as job:
        job.run()


def test_resuming_where_there_is_no_job_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="no such folder"):
        ConversionJob.resume(str(tmp_path / "none"))
    with pytest.raises(ConversionError, match="no job to resume here"):
        ConversionJob.resume(str(tmp_path))


def test_resuming_a_finished_job_does_nothing(source, tmp_path):
    options = job_options(source, tmp_path)
    before = folder_bytes(convert(options).out_dir)
    listener = Recorder()
    with ConversionJob.resume(options.work_dir, listener=listener) as job:
        job.run()
    assert listener.lines == [f"{options.out_dir}: this job is finished already"]
    assert folder_bytes(Path(options.out_dir)) == before


def test_a_finished_job_can_be_written_again_with_another_shard_size(tmp_path):
    folder = write_source(tmp_path / "source", llama_config(vocab_size=4200))
    options = job_options(folder, tmp_path)
    first = convert(options).out_dir
    given = {"out_dir": str(tmp_path / "sharded"), "shard_size": 1}
    with ConversionJob.resume(options.work_dir, given) as job:
        second = job.run().out_dir
    one, two = TensorFiles(first), TensorFiles(second)
    assert len(two.headers) == 2
    for name in one.names():
        assert torch.equal(one.get(name), two.get(name))


def test_a_job_that_is_running_cannot_be_resumed(source, tmp_path):
    options = job_options(source, tmp_path)
    with (
        ConversionJob.create(options),
        pytest.raises(ConversionError, match="another process"),
    ):
        ConversionJob.resume(options.work_dir)


@pytest.mark.parametrize("shards", [1, 3])
def test_one_changed_tensor_makes_another_source(tmp_path, shards):
    folder = write_source(tmp_path / "source", shards=shards)
    options = job_options(folder, tmp_path)
    interrupt(options)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        name = next((n for n in tensors if n.endswith("layers.1.mlp.up_proj.weight")), None)
        if name is not None:
            tensors[name] += 1
            save_file(tensors, path)
    with pytest.raises(ConversionError, match="not the source this job was started with"):
        ConversionJob.resume(options.work_dir)


def test_the_same_tensors_in_other_shards_are_the_same_source(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupt(options)
    sharded = write_source(tmp_path / "sharded", shards=3)
    with ConversionJob.resume(options.work_dir, {"in_dir": str(sharded)}) as job:
        made = job.run().out_dir
    expected = convert(job_options(source, tmp_path / "whole")).out_dir
    assert folder_bytes(made) == folder_bytes(expected)


def test_what_somebody_put_into_the_output_folder_stays(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupt(options, "shards in place", 1)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with ConversionJob.resume(options.work_dir) as job:
        out = job.run().out_dir
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "config.json").is_file()


def test_files_of_another_shard_size_are_replaced(tmp_path):
    folder = write_source(tmp_path / "source", llama_config(vocab_size=4200))
    options = job_options(folder, tmp_path, shard_size=1)
    interrupt(options, "shards in place", 1)
    with ConversionJob.resume(options.work_dir, {"shard_size": 8192}) as job:
        out = job.run().out_dir
    assert sorted(path.name for path in out.glob("model*")) == ["model.safetensors"]
