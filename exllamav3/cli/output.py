"""Tables and progress: rich on a terminal, plain text in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table on stdout; the first `left` columns are aligned left, the others right.

    In a pipe: columns separated by two spaces, never cut or wrapped.
    """
    if sys.stdout is not None and sys.stdout.isatty():  # None: it was closed by the shell
        table = Table(box=None, pad_edge=False)
        for index, title in enumerate(header):
            table.add_column(title, justify="left" if index < left else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [
            text.ljust(width) if index < left else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr while the block runs; silent where stderr is not a terminal.

    Yields:
        A function that takes the number of finished steps.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)


def human_bytes(size_bytes: int) -> str:
    """`1.5 MiB` and the like."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size, units = float(size_bytes), ("KiB", "MiB", "GiB", "TiB")
    for unit in units:
        size /= 1024
        if size < 1024 or unit == units[-1]:
            break
    return f"{size:.1f} {unit}"
