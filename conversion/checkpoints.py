"""How far the calibration state has advanced, stored now and then.

    ckpt/             rows of the calibration state before module `next_module`
    ckpt_old/, ckpt_new/  partners in the rotation

A folder appears under its final name only when complete. Losing one costs time
only: the rows can be advanced again from the token rows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.util.json_text import parse_json

from .durable import Step, full_disk_explained, remove, sync_folder, write_json
from .tensor_file import PendingTensor, read_tensor_file, write_tensor_file

_CURRENT, _OLD, _NEW = "ckpt", "ckpt_old", "ckpt_new"
_ROWS, _PROGRESS = "state.safetensors", "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Calibration rows before module `next_module`; `bad_rows` are no longer advanced."""

    next_module: int
    rows: tuple[Tensor, ...]
    bad_rows: tuple[int, ...]


class Checkpoints:
    """The checkpoints of one work folder."""

    def __init__(self, path: Path, step: Step) -> None:
        self.path = path
        self.step = step

    def save(self, checkpoint: Checkpoint) -> None:
        """Rotate in a new checkpoint; at every moment the current or the old one is complete."""
        new, current, old = (self.path / name for name in (_NEW, _CURRENT, _OLD))
        shutil.rmtree(new, ignore_errors=True)
        with full_disk_explained(new):
            new.mkdir()
        pending = [PendingTensor.of(f"tensor.{i}", row) for i, row in enumerate(checkpoint.rows)]
        write_tensor_file(new / _ROWS, pending, None, self.step, "checkpoint tensor")
        progress = {
            "next_module": checkpoint.next_module,
            "bad_rows": list(checkpoint.bad_rows),
            "rows": len(checkpoint.rows),
        }
        write_json(new / _PROGRESS, progress)
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

    def load(self, finished: int, count: int, tell: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that helps, or None; those that do not are removed.

        Args:
            finished: modules from the front whose files are there. A checkpoint beyond them is
                of no use: the missing module needs the rows before it.
            count: number of calibration rows of the job.
            tell: receives a line about each checkpoint that is removed.
        """
        for name in (_CURRENT, _OLD):
            folder = self.path / name
            if not folder.exists():
                continue
            try:
                checkpoint = _read(folder, count)
            except (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                tell(f"{error}; this checkpoint is dropped, the rows are advanced again")
            else:
                if checkpoint.next_module <= finished:
                    return checkpoint
                tell(f"{folder}: beyond the module that is made again, dropped")
            remove(folder)
        return None

    def drop(self) -> None:
        """Free the space once no module needs the calibration state any more."""
        for name in (_NEW, _OLD, _CURRENT):
            shutil.rmtree(self.path / name, ignore_errors=True)


def _read(folder: Path, count: int) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        FormatError: it is damaged.
        FileNotFoundError: a part is missing.
    """
    path = folder / _PROGRESS
    try:
        progress = parse_json(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: damaged ({error})") from error
    if not isinstance(progress, dict):
        raise FormatError(f"{path}: damaged (not a JSON object)")
    next_module, bad_rows = progress.get("next_module"), progress.get("bad_rows")
    known = range(count)
    if not isinstance(bad_rows, list) or not all(n in known for n in bad_rows):
        raise FormatError(f"{path}: damaged (bad_rows is {bad_rows!r})")
    if not isinstance(next_module, int) or next_module < 0 or progress.get("rows") != count:
        raise FormatError(f"{path}: damaged (next_module or rows is not a count of this job)")
    tensors, _ = read_tensor_file(folder / _ROWS)
    names = [f"tensor.{number}" for number in known]
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    if tensors.keys() != set(names) or len(shapes) != 1:
        raise FormatError(f"{folder / _ROWS}: damaged (not {count} rows of one shape)")
    return Checkpoint(next_module, tuple(tensors[name] for name in names), tuple(bad_rows))
