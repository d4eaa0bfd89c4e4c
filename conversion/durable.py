"""Files that are either there completely or not at all, also after a crash.

Everything is written under a temporary name in the same folder, flushed to
the disk, and renamed. A reader never sees half a file under its final name.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from exllamav3.errors import ConversionError

PARTIAL = ".partial"
"""Suffix of files that are still being written."""

Step = Callable[[str], None]
"""Called with the name of each durable step just before it happens.

Tests pass one that kills the process; see `STEPS` in `conversion/job_folder.py`.
"""


def refuse_what_is_no_folder(path: Path, name: str) -> None:
    """Refuse a path where a folder is or will be made, if something else is there.

    Raises:
        ConversionError: says what is there.
    """
    if path.is_dir():
        return
    if path.exists():
        raise ConversionError(f"{path}: {name} is a file; choose another")
    if path.is_symlink():
        raise ConversionError(f"{path}: {name} is a link to nowhere; remove it or choose another")


def ignore_step(name: str) -> None:
    """The step function of ordinary runs."""


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends without an error.

    Raises:
        ConversionError: the disk is full; whatever was at `path` is still there.
    """
    partial = path.with_name(path.name + PARTIAL)
    with full_disk_explained(path):
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)


@contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    """Turn a full disk or quota into a ConversionError that says the job can go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ConversionError(
            f"{path}: no space left to write it ({error.strerror}). Finished modules are kept: "
            f"free some space and continue with --resume"
        ) from error


def write_json(path: Path, value: object, indent: int | None = 4) -> None:
    """Write a JSON file durably, keys in the order given."""
    with replacing(path) as file:
        text = json.dumps(value, indent=indent, ensure_ascii=False)
        # A lone surrogate (an undecodable file name, an escape in config.json) has no UTF-8 form;
        # what Python replaces it with happens to be its JSON escape.
        file.write(text.encode("utf-8", "backslashreplace") + b"\n")


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def copy_file(source: Path, target: Path) -> None:
    """Copy bytes durably; time stamps and permissions stay behind."""
    with source.open("rb") as reader, replacing(target) as writer:
        shutil.copyfileobj(reader, writer)
