"""Token rows to calibrate with: windows of a text, or rows somebody prepared.

The bundled text is `data/calibration.txt`, public-domain and permissively
licensed English prose, reference material and documentation; `data/README.md`
lists sources and terms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exllamav3.errors import ConversionError

BUNDLED_TEXT = Path(__file__).parent / "data" / "calibration.txt"


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> Tensor:
        """Token ids of a text, without special tokens around it."""
        ...


def text_rows(ids_T: Tensor, rows: int, cols: int, where: str) -> Tensor:
    """Cut `rows` windows of `cols` tokens, spread evenly over the tokens of a text.

    Spreading lets few rows see every kind of text in the file instead of its beginning.

    Returns:
        int32 `(rows, cols)`; windows do not overlap.

    Raises:
        ConversionError: the text is too short; says how many rows fit.
    """
    fitting = ids_T.numel() // cols
    if fitting < rows:
        raise ConversionError(
            f"{where}: {ids_T.numel()} tokens hold {fitting} rows of {cols} tokens, asked for "
            f"{rows}. Use -cr {fitting} or fewer, a smaller -cc, or a longer text (-cd)"
            if fitting
            else f"{where}: {ids_T.numel()} tokens do not fill one row of {cols} tokens. Use a "
            f"smaller -cc or a longer text (-cd)"
        )
    starts = [number * fitting // rows * cols for number in range(rows)]
    return torch.stack([ids_T[start : start + cols] for start in starts]).to(torch.int32)


def packed_rows(path: Path, rows: int, cols: int) -> Tensor:
    """The first `rows` rows of `input_ids` in a safetensors file.

    Returns:
        int32 `(rows, cols)`.

    Raises:
        ConversionError: the file is not what it should be, or holds fewer rows or shorter ones.
    """
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            if "input_ids" not in names:
                raise ConversionError(
                    f"{path}: no tensor input_ids (found {', '.join(names) or 'nothing'}); "
                    f"calibration rows are an integer tensor input_ids of shape (rows, cols)"
                )
            ids: Tensor = file.get_tensor("input_ids")
    except SafetensorError as error:
        raise ConversionError(f"{path}: not a safetensors file ({error})") from error
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64, torch.int16, torch.uint8):
        raise ConversionError(
            f"{path}: input_ids is {ids.dtype} {list(ids.shape)}, expected an integer tensor of "
            f"shape (rows, cols)"
        )
    found_rows, found_cols = ids.shape
    if found_cols < cols:
        raise ConversionError(
            f"{path}: rows have {found_cols} tokens, asked for {cols}; use -cc {found_cols}"
        )
    if found_rows < rows:
        raise ConversionError(
            f"{path}: input_ids holds {found_rows} rows, asked for {rows}; "
            + (f"use -cr {found_rows} or fewer" if found_rows else "the file is empty")
        )
    ids = ids[:rows, :cols].to(torch.int64)
    # Ids past 32 bits would wrap around into the vocabulary; any id out there is refused later.
    return ids.clamp(-1, 2**31 - 1).to(torch.int32).contiguous()


def calibration_rows(
    load_encoder: Callable[[], Encoder], vocab_size: int, rows: int, cols: int, cal_data: str | None
) -> Tensor:
    """The token rows of a job.

    Args:
        load_encoder: makes the model's tokenizer; not called for packed rows.
        vocab_size: ids must be below it.
        cal_data: a `.safetensors` file with `input_ids`, any other file is read as UTF-8
            text, None is the bundled text.

    Returns:
        int32 `(rows, cols)`.

    Raises:
        ConversionError: file missing or malformed, too little of it, or ids outside the
            vocabulary.
    """
    path = BUNDLED_TEXT if cal_data is None else Path(cal_data)
    if not path.is_file():
        raise ConversionError(f"{path}: calibration file does not exist (-cd)")
    if path.suffix == ".safetensors":
        ids = packed_rows(path, rows, cols)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConversionError(
                f"{path}: not UTF-8 text ({error}); -cd takes a text file or a .safetensors file "
                f"with input_ids"
            ) from error
        ids = text_rows(load_encoder().encode(text).flatten(), rows, cols, str(path))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        odd = ids[(ids < 0) | (ids >= vocab_size)]
        raise ConversionError(
            f"{path}: token id {int(odd[0])} is outside the model's vocabulary of {vocab_size}; "
            f"the rows were made with another tokenizer"
        )
    return ids
