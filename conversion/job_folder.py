"""The work folder of a job: options, finished modules, and where the result went.

    .lock                     held by the process that works on the job
    calibration.safetensors   the token rows, fixed when the job was created
    job.json                  options, plan and source; its presence means that a job exists
    qtensors/KEY.safetensors  every output tensor of a finished module, and its report
    ckpt*/                    the calibration state, see `checkpoints`
    finished.json             where the result was written

Every file and folder appears under its final name only when complete, so a
killed process costs at most the module it was working on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from exllamav3.checkpoint.header import read_header
from exllamav3.errors import ConversionError, FormatError
from exllamav3.util.json_text import parse_json

from .checkpoints import Checkpoints
from .durable import PARTIAL, Step, ignore_step, refuse_what_is_no_folder, remove, write_json
from .tensor_file import PendingTensor, read_tensor_file, write_tensor_file

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
RECORD_FORMAT = 2
"""Of job.json; a job of another format is not resumed."""
_RECORD: dict[str, Any] = {
    "id": str,
    "options": dict,
    "qkv_topology": (str, type(None)),
    "source": str,
}
_NEW_JOB = "start a new job in an empty folder"


class JobFolder:
    """A locked work folder. Use as a context manager: leaving releases the lock."""

    def __init__(self, path: Path, step: Step = ignore_step) -> None:
        """Take the lock; nothing but the lock file is written.

        Raises:
            ConversionError: another process works on this job.
        """
        self.path = path
        self.step = step
        self.checkpoints = Checkpoints(path, step)
        self._made_folders = [p for p in (path, *path.parents) if not p.exists()]
        self._made_lock = not (path / _LOCK).exists()
        self._made_job = False
        refuse_what_is_no_folder(path, "the work folder (-w)")
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
            ConversionError: there is no job here, its file is damaged or another version's.
        """
        if not self.has_job:
            raise ConversionError(
                f"{self.path}: there is no job to resume here ({_JOB} is missing); start one "
                f"without --resume"
            )
        record = _read_object(self.path / _JOB, _NEW_JOB)
        if record.get("format") != RECORD_FORMAT:
            raise ConversionError(
                f"{self.path / _JOB}: the job has format {record.get('format')!r}, this version "
                f"resumes format {RECORD_FORMAT}; {_NEW_JOB}"
            )
        for key, kinds in _RECORD.items():
            if key not in record or not isinstance(record[key], kinds):
                raise ConversionError(
                    f"{self.path / _JOB}: {key} is {record.get(key)!r}, not what a job stores; the "
                    f"file is damaged, {_NEW_JOB}"
                )
        return record

    def token_rows(self, shape: tuple[int, int]) -> Tensor:
        """int32 token rows of the given shape `(rows, cols)`.

        Raises:
            ConversionError: they are missing or damaged.
        """
        path = self.path / _ROWS
        try:
            rows = read_tensor_file(path)[0].get("input_ids")
        except (FormatError, FileNotFoundError) as error:
            raise ConversionError(
                f"{path}: the calibration rows of this job cannot be read ({error}). They decide "
                f"about the result and are not cut a second time; {_NEW_JOB}"
            ) from error
        if rows is None or tuple(rows.shape) != shape:
            found = "none" if rows is None else list(rows.shape)
            raise ConversionError(
                f"{path}: expected input_ids {list(shape)}, found {found}; the file is not this "
                f"job's, {_NEW_JOB}"
            )
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
        """Output tensors of a finished module, by name. FormatError when its file is damaged."""
        return read_tensor_file(self.module_file(key))[0]

    def module_report(self, key: str) -> dict[str, Any]:
        """What `save_module` stored. FormatError when the file is damaged."""
        path = self.module_file(key)
        metadata = read_header(path).metadata
        try:
            report = parse_json(metadata["report"].encode())
        except (KeyError, ValueError) as error:
            raise FormatError(f"{path}: the report of the module is damaged ({error})") from error
        if not isinstance(report, dict):
            raise FormatError(f"{path}: the report of the module is no JSON object")
        return report

    def discard_module(self, key: str) -> None:
        """Forget a finished module, so that it is made again."""
        remove(self.module_file(key))

    # -- the end

    def mark_finished(self, out_dir: Path) -> None:
        write_json(self.path / _FINISHED, {"out_dir": str(out_dir)})

    def finished_out_dir(self) -> str | None:
        """Where the finished result went, or None while the job runs.

        Raises:
            ConversionError: the file that says so is damaged.
        """
        file = self.path / _FINISHED
        if not file.exists():
            return None
        advice = (
            "the job was finished, and its result is complete where it has a config.json. To "
            "write it once more, remove this file and resume with an empty output folder (-o)"
        )
        out_dir = _read_object(file, advice).get("out_dir")
        if not isinstance(out_dir, str):
            raise ConversionError(f"{file}: out_dir is {out_dir!r}, expected a path; {advice}")
        return out_dir


def _read_object(path: Path, advice: str) -> dict[str, Any]:
    try:
        obj = parse_json(path.read_bytes())
    except ValueError as error:
        raise ConversionError(f"{path}: not valid JSON ({error}); {advice}") from error
    if not isinstance(obj, dict):
        raise ConversionError(f"{path}: expected a JSON object; {advice}")
    return obj


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one under its name: its last owner may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
