"""Registration of an operator's torch reference and of its shapes.

The reference has the lowest priority: a native CPU or CUDA kernel, registered when the
compiled module was loaded, is chosen before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import exllamav3.ops.status  # noqa: F401  (turns a failed load of exllamav3_ext into ExtensionError)
from exllamav3_ext.schema import library


def register(op: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Give `torch.ops.exllamav3.<op>` its reference and its fake.

    Args:
        op: name of the operator in `exllamav3_ext.schema`.
        reference: obvious, slow implementation for any device.
        fake: output shapes, dtypes and (contiguous) strides, without data.
    """
    library.impl(op, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"exllamav3::{op}", fake, lib=library)
