"""Rows of token ids cut from a text, one after the other, without overlap."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from exllamav3.errors import FormatError


class HasEncode(Protocol):
    """What is needed of a tokenizer."""

    bos_token_id: int | None

    def encode_ids(self, text: str) -> list[int]: ...


def token_rows(
    tokenizer: HasEncode, text: str, rows: int, cols: int, add_bos: bool = False
) -> Tensor:
    """Tokenize a text once and cut it into rows.

    Args:
        tokenizer: of the model to be measured.
        text: at least `rows * cols` tokens long.
        rows, cols: how many rows of how many tokens.
        add_bos: begin every row with BOS, which takes one of its `cols` places.

    Returns:
        int64 `(rows, cols)`.

    Raises:
        FormatError: a size is too small, the text too short (the message says how many rows fit),
            or BOS is asked for and there is none.
    """
    if rows < 1 or cols < 2:
        raise FormatError(
            f"evaluation: {rows} rows of {cols} tokens asked for, expected at least 1 row of 2 "
            f"tokens (the first token of a row is not predicted)"
        )
    bos_id = tokenizer.bos_token_id
    if add_bos and bos_id is None:
        raise FormatError("evaluation: rows with BOS asked for, but the model has no BOS token")
    per_row = cols - 1 if add_bos else cols
    ids = torch.tensor(tokenizer.encode_ids(text), dtype=torch.long)
    if len(ids) < rows * per_row:
        raise FormatError(
            f"evaluation: {rows} rows of {cols} tokens asked for, the text has {len(ids)} tokens; "
            f"{len(ids) // per_row} such rows fit: lower --rows or --cols, or give a longer text"
        )
    table = ids[: rows * per_row].view(rows, per_row)
    if add_bos and bos_id is not None:
        table = torch.cat([torch.full((rows, 1), bos_id), table], dim=1)
    return table
