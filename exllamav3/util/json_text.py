"""JSON from files that anybody may have written: one exception for everything that is not JSON.

`json.loads` raises RecursionError for a document nested too deeply; as a ValueError it reaches the
code that names the file and says what to do.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any


def parse_json(
    raw: bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Parse a UTF-8 JSON document.

    Args:
        raw: the document.
        object_pairs_hook: as for `json.loads`; what it raises passes through.

    Raises:
        ValueError: not UTF-8 or with a byte order mark, not JSON, nested too deeply, or a number of
            absurd length.
    """
    if raw.startswith(codecs.BOM_UTF8):
        raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=object_pairs_hook)
    except RecursionError as error:
        raise ValueError("the document is nested too deeply") from error
