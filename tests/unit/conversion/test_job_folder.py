"""The work folder: what survives an interruption between any two of its steps."""

from __future__ import annotations

import errno
import multiprocessing
import shutil

import pytest
import torch
from exllamav3.conversion.checkpoints import Checkpoint
from exllamav3.conversion.job_folder import JobFolder

from exllamav3.errors import ConversionError


class Stopped(Exception):
    """Stands for the end of the process."""


def stop_at(wanted: str):
    def step(name: str) -> None:
        if name == wanted:
            raise Stopped

    return step


def rows(value: float, count: int = 3) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((4, 2), value + number) for number in range(count))


def test_a_finished_module_is_read_back_with_its_report(tmp_path):
    tensors = {"m.suh": torch.ones(3).half(), "m.trellis": torch.ones(2, 2, 16).short()}
    with JobFolder(tmp_path) as folder:
        assert not folder.has_module("m")
        folder.save_module("m", tensors, {"bits": 4})
        assert folder.has_module("m")
        found = folder.load_module("m")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert folder.module_report("m") == {"bits": 4}


def test_a_module_interrupted_while_it_is_written_does_not_exist(tmp_path):
    with JobFolder(tmp_path, stop_at("module tensor")) as folder:
        with pytest.raises(Stopped):
            folder.save_module("m", {"a": torch.ones(3), "b": torch.ones(3)}, {})
        assert not folder.has_module("m")
        assert [p.name for p in (tmp_path / "qtensors").iterdir()] == ["m.safetensors.partial"]


def test_the_newest_checkpoint_is_loaded(tmp_path):
    with JobFolder(tmp_path) as folder:
        assert folder.checkpoints.load(9, 3, print) is None
        for number in (1, 2, 3):
            folder.checkpoints.save(Checkpoint(number, rows(number), (number - 1,)))
        found = folder.checkpoints.load(9, 3, print)
    assert found is not None
    assert found.next_module == 3
    assert found.bad_rows == (2,)
    assert all(torch.equal(a, b) for a, b in zip(found.rows, rows(3), strict=True))


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("checkpoint tensor", 2),
        ("checkpoint complete", 2),
        ("checkpoint old removed", 2),
        ("checkpoint set aside", 2),
        ("checkpoint in place", 3),
    ],
)
def test_an_interrupted_rotation_leaves_a_complete_checkpoint(tmp_path, point, expected):
    with JobFolder(tmp_path) as folder:
        folder.checkpoints.save(Checkpoint(1, rows(1), ()))
        folder.checkpoints.save(Checkpoint(2, rows(2), ()))
    with JobFolder(tmp_path, stop_at(point)) as folder, pytest.raises(Stopped):
        folder.checkpoints.save(Checkpoint(3, rows(3), ()))
    with JobFolder(tmp_path) as folder:
        found = folder.checkpoints.load(9, 3, print)
        assert found is not None
        assert found.next_module == expected
        assert torch.equal(found.rows[0], rows(expected)[0])
        folder.checkpoints.save(Checkpoint(4, rows(4), ()))
        again = folder.checkpoints.load(9, 3, print)
        assert again is not None
        assert again.next_module == 4


def test_a_full_disk_during_a_checkpoint_keeps_the_one_before(tmp_path):
    with JobFolder(tmp_path) as folder:
        folder.checkpoints.save(Checkpoint(1, rows(1), ()))

    def full(name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with JobFolder(tmp_path, full) as folder:
        with pytest.raises(ConversionError, match=r"Finished modules are kept.*--resume"):
            folder.checkpoints.save(Checkpoint(2, rows(2), ()))
        found = folder.checkpoints.load(9, 3, print)
    assert found is not None
    assert found.next_module == 1


def _lock_and_wait(path, ready, done) -> None:
    with JobFolder(path):
        ready.set()
        done.wait(60)


def test_a_second_process_on_the_same_folder_is_refused(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_lock_and_wait, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(60)
    try:
        with pytest.raises(ConversionError, match=rf"another process \(id {process.pid}\)"):
            JobFolder(tmp_path)
    finally:
        done.set()
        process.join(60)
    JobFolder(tmp_path).close()


def test_a_folder_with_a_job_is_not_started_anew(tmp_path):
    with JobFolder(tmp_path) as folder:
        folder.check_empty()
        folder.create({"format": 1}, torch.zeros(2, 3, dtype=torch.int32))
        with pytest.raises(ConversionError, match="holds a job already; continue it with --resume"):
            folder.check_empty()
        assert folder.token_rows((2, 3)).shape == (2, 3)


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with (
        JobFolder(tmp_path) as folder,
        pytest.raises(ConversionError, match=r"holds something else \(thesis.tex\)"),
    ):
        folder.check_empty()


def test_what_an_interrupted_creation_left_behind_is_no_obstacle(tmp_path):
    with JobFolder(tmp_path) as folder:
        folder.create({"format": 1}, torch.zeros(2, 3, dtype=torch.int32))
    (tmp_path / "job.json").rename(tmp_path / "job.json.partial")
    with JobFolder(tmp_path) as folder:
        folder.check_empty()


def test_a_missing_or_damaged_job_is_named(tmp_path):
    with JobFolder(tmp_path) as folder:
        with pytest.raises(ConversionError, match="no job to resume here"):
            folder.read_record()
        (tmp_path / "job.json").write_text("{")
        with pytest.raises(ConversionError, match=r"job.json: not valid JSON"):
            folder.read_record()


def test_checkpoints_are_dropped_when_no_module_needs_them(tmp_path):
    with JobFolder(tmp_path) as folder:
        folder.checkpoints.save(Checkpoint(1, rows(1), ()))
        folder.checkpoints.save(Checkpoint(2, rows(2), ()))
        folder.checkpoints.drop()
        assert folder.checkpoints.load(9, 3, print) is None
    shutil.rmtree(tmp_path)
