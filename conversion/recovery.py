"""Taking up a job whose work folder was damaged: what can be made again is made again.

A module whose file cannot be used is as good as one that was never finished (docs/adr/0012).
"""

from __future__ import annotations

from exllamav3.checkpoint.header import read_header
from exllamav3.errors import FormatError

from .job_folder import JobFolder
from .layout import JobLayout
from .reports import ModuleReport
from .targets import ModuleLayout


def discard_damaged(folder: JobFolder, layout: JobLayout) -> tuple[str, ...]:
    """Remove the files of finished modules that cannot be used; headers are enough to tell.

    Returns:
        A line about each.
    """
    notes = []
    for module in layout.all:
        problem = _problem(folder, module) if folder.has_module(module.key) else None
        if problem is not None:
            folder.discard_module(module.key)
            notes.append(f"{problem}; {module.key} is made again")
    return tuple(notes)


def _problem(folder: JobFolder, module: ModuleLayout) -> str | None:
    path = folder.module_file(module.key)
    try:
        stored = read_header(path).tensors
        ModuleReport.from_json(folder.module_report(module.key))
    except FormatError as error:
        return str(error)
    missing = sorted(module.needed - stored.keys())
    return f"{path}: {missing[0]} is missing" if missing else None
