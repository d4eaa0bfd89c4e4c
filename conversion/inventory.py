"""What becomes of every tensor of the source: quantized, kept, copied, or dropped with a reason.

The account is made before any weight is read and fails closed: a tensor that
nothing claims stops the job, because a model that ignores some of its weights
is not the model somebody trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from exllamav3.errors import ConversionError
from exllamav3.model.leftovers import NOT_WEIGHTS
from exllamav3.modules.module import Module


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """Where the source tensors go.

    claimed: read by a module of the decoder or of a side model
    copied: tensors of parts that are neither run nor quantized, byte for byte
    dropped: (name, reason)
    """

    claimed: tuple[str, ...]
    copied: tuple[str, ...]
    dropped: tuple[tuple[str, str], ...]


def account_for(
    names: Collection[str],
    modules: Iterable[Module],
    copied_prefixes: Sequence[str],
    where: str,
) -> SourceAccount:
    """Assign every source tensor.

    Args:
        names: tensors of the source.
        modules: top-level modules of the decoder and of its MTP head.
        copied_prefixes: of parts that come along untouched.

    Raises:
        ConversionError: a tensor is needed and missing, or there and unknown; lists them.
    """
    wanted = {name for module in modules for part in module for name in part.own_names(names)}
    missing = sorted(wanted - set(names))
    if missing:
        raise ConversionError(
            f"{where}: {len(missing)} tensors are missing that config.json asks for: "
            f"{_some(missing)}; check that all shards are there"
        )
    copied, dropped, unknown = [], [], []
    for name in sorted(set(names) - wanted):
        reason = next((text for suffix, text in NOT_WEIGHTS if name.endswith(suffix)), None)
        if name.startswith(tuple(copied_prefixes)):
            copied.append(name)
        elif reason is not None:
            dropped.append((name, reason))
        else:
            unknown.append(name)
    if unknown:
        raise ConversionError(
            f"{where}: {len(unknown)} tensors belong to no part of this architecture: "
            f"{_some(unknown)}; converting would lose them. Check that config.json belongs to "
            f"these weights, or remove the tensors from the source"
        )
    return SourceAccount(tuple(sorted(wanted)), tuple(copied), tuple(dropped))


def _some(names: Sequence[str], limit: int = 6) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
