"""Where errors become one line on stderr and an exit code.

0: done. 1: an error the library raises on purpose, or one of the operating system (a file that is
missing, a full disk). 2: wrong usage, from argparse. 130: interrupted. Anything else is a defect of
the library and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import TextIO

from exllamav3.errors import Exl3Error

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


def report_errors(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; warnings become lines on stderr too."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return command()
    except BrokenPipeError:
        # The reader of a pipe has gone (`exllamav3 inspect DIR | head`). Python would complain
        # again when it flushes stdout at exit, hence the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except (Exl3Error, OSError) as error:
        message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {message}", file=sys.stderr)
