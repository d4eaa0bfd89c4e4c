"""The work folder of a job: what is finished, and how far the calibration state has advanced.

    .lock                     held by the process that works on the job
    calibration.safetensors   the token rows, fixed when the job was created
    job.json                  options, plan and source; its presence means that a job exists
    qtensors/KEY.safetensors  every output tensor of a finished module, and its report
    ckpt/                     rows of the calibration state before module `next_module`
    ckpt_old/, ckpt_new/      partners in the rotation of checkpoints
    finished.json             where the result was written

Every file and folder appears under its final name only when complete, so a
killed process costs at most the module it was working on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from exllamav3.errors import ConversionError
from exllamav3.util.json_text import parse_json

from .durable import PARTIAL, Step, full_disk_explained, ignore_step, sync_folder, write_json
from .tensor_file import PendingTensor, write_tensor_file

STEPS = (
    "module tensor",
    "checkpoint tensor",
    "checkpoint complete",
    "checkpoint old removed",
    "checkpoint set aside",
    "checkpoint in place",
    "shard tensor",
    "shards in place",
    "side file",
    "before config.json",
    "before finished",
)
"""Names handed to the step function, in the order in which a job passes them."""

_JOB, _FINISHED, _LOCK, _ROWS = "job.json", "finished.json", ".lock", "calibration.safetensors"
_OURS = {_LOCK, _ROWS, _ROWS + PARTIAL, _JOB + PARTIAL}
"""What an interrupted creation can leave behind."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Calibration rows before module `next_module`; `bad_rows` are no longer advanced."""

    next_module: int
    rows: tuple[Tensor, ...]
    bad_rows: tuple[int, ...]


class JobFolder:
    """A locked work folder. Use as a context manager: leaving releases the lock."""

    def __init__(self, path: Path, step: Step = ignore_step) -> None:
        """Take the lock; nothing but the lock file is written.

        Raises:
            ConversionError: another process works on this job.
        """
        self.path = path
        self.step = step
        self._made_folders = [p for p in (path, *path.parents) if not p.exists()]
        self._made_lock = not (path / _LOCK).exists()
        self._made_job = False
        if path.exists() and not path.is_dir():
            raise ConversionError(f"{path}: the work folder (-w) is a file; choose another")
        path.mkdir(parents=True, exist_ok=True)
        self._lock = (path / _LOCK).open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise ConversionError(
                f"{path}: another process (id {owner}) is working on this job; wait for it or "
                f"stop it, or choose another work folder"
            ) from None
        if not _is_still(path / _LOCK, self._lock.fileno()):
            self._lock.close()
            raise ConversionError(f"{path}: another process has just given this folder up; retry")
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()

    def __enter__(self) -> JobFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def discard(self) -> None:
        """Remove what this object made, and nothing else: the job that was to be cannot start.

        A job that was in the folder before stays, and so does anything foreign.
        """
        names = sorted(_OURS - {_LOCK} | {_JOB}) if self._made_job else []
        for name in (*names, *([_LOCK] if self._made_lock else [])):
            (self.path / name).unlink(missing_ok=True)
        self.close()
        for folder in self._made_folders:
            with contextlib.suppress(OSError):  # another process may use it by now
                folder.rmdir()

    # -- the job itself

    @property
    def has_job(self) -> bool:
        return (self.path / _JOB).exists()

    def check_empty(self) -> None:
        """Refuse a folder that holds a job or anything that is not ours.

        Raises:
            ConversionError: says what is there.
        """
        if self.has_job:
            raise ConversionError(
                f"{self.path}: the work folder holds a job already; continue it with --resume, or "
                f"choose an empty folder"
            )
        foreign = sorted(entry.name for entry in self.path.iterdir() if entry.name not in _OURS)
        if foreign:
            raise ConversionError(
                f"{self.path}: the work folder holds something else ({', '.join(foreign[:5])}); "
                f"choose an empty folder"
            )

    def create(self, record: Mapping[str, Any], rows: Tensor) -> None:
        """Store a new job: int32 token rows `(rows, cols)` first, then the record."""
        self._made_job = True
        write_tensor_file(self.path / _ROWS, [PendingTensor.of("input_ids", rows)])
        self.write_record(record)

    def write_record(self, record: Mapping[str, Any]) -> None:
        write_json(self.path / _JOB, record)

    def read_record(self) -> dict[str, Any]:
        """The stored record.

        Raises:
            ConversionError: there is no job here, or its file is damaged.
        """
        if not self.has_job:
            raise ConversionError(
                f"{self.path}: there is no job to resume here ({_JOB} is missing); start one "
                f"without --resume"
            )
        try:
            record = parse_json((self.path / _JOB).read_bytes())
        except ValueError as error:
            raise ConversionError(
                f"{self.path / _JOB}: not valid JSON ({error}); start a new job in an empty folder"
            ) from error
        if not isinstance(record, dict):
            raise ConversionError(f"{self.path / _JOB}: expected a JSON object")
        return record

    def token_rows(self) -> Tensor:
        """int32 token rows `(rows, cols)`."""
        with safe_open(self.path / _ROWS, "pt") as file:
            rows: Tensor = file.get_tensor("input_ids")
        return rows

    # -- finished modules

    def module_file(self, key: str) -> Path:
        return self.path / "qtensors" / f"{key}.safetensors"

    def has_module(self, key: str) -> bool:
        return self.module_file(key).exists()

    def save_module(
        self, key: str, tensors: Mapping[str, Tensor], report: Mapping[str, Any]
    ) -> None:
        """Store the output tensors of a module together with its report."""
        folder = self.path / "qtensors"
        folder.mkdir(exist_ok=True)
        pending = [PendingTensor.of(name, tensor) for name, tensor in tensors.items()]
        metadata = {"report": json.dumps(report)}
        write_tensor_file(self.module_file(key), pending, metadata, self.step, "module tensor")

    def load_module(self, key: str) -> dict[str, Tensor]:
        """Output tensors of a finished module, by name."""
        with safe_open(self.module_file(key), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def module_report(self, key: str) -> dict[str, Any]:
        with safe_open(self.module_file(key), "pt") as file:
            report = json.loads(file.metadata()["report"])
        assert isinstance(report, dict)
        return report

    # -- the calibration state

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Rotate in a new checkpoint; at every moment `ckpt` or `ckpt_old` is complete."""
        new, current, old = (self.path / name for name in ("ckpt_new", "ckpt", "ckpt_old"))
        shutil.rmtree(new, ignore_errors=True)
        with full_disk_explained(new):
            new.mkdir()
        pending = [PendingTensor.of(f"tensor.{i}", row) for i, row in enumerate(checkpoint.rows)]
        write_tensor_file(new / "state.safetensors", pending, None, self.step, "checkpoint tensor")
        progress = {
            "next_module": checkpoint.next_module,
            "bad_rows": list(checkpoint.bad_rows),
            "rows": len(checkpoint.rows),
        }
        write_json(new / "state.json", progress)
        self.step("checkpoint complete")
        # After an interruption there may be no current one: the old one stays until there is.
        if current.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.step("checkpoint old removed")
            os.rename(current, old)
            self.step("checkpoint set aside")
        os.rename(new, current)
        sync_folder(self.path)
        self.step("checkpoint in place")

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint, or None when there is none yet."""
        for name in ("ckpt", "ckpt_old"):
            folder = self.path / name
            if folder.exists():
                progress = json.loads((folder / "state.json").read_bytes())
                with safe_open(folder / "state.safetensors", "pt") as file:
                    rows = [file.get_tensor(f"tensor.{i}") for i in range(progress["rows"])]
                return Checkpoint(progress["next_module"], tuple(rows), tuple(progress["bad_rows"]))
        return None

    def drop_checkpoints(self) -> None:
        """Free the space of the calibration state once no module needs it any more."""
        for name in ("ckpt_new", "ckpt_old", "ckpt"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    # -- the end

    def mark_finished(self, out_dir: Path) -> None:
        write_json(self.path / _FINISHED, {"out_dir": str(out_dir)})

    def finished_out_dir(self) -> str | None:
        """Where the finished result went, or None while the job runs."""
        file = self.path / _FINISHED
        return str(json.loads(file.read_bytes())["out_dir"]) if file.exists() else None


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one under its name: its last owner may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
