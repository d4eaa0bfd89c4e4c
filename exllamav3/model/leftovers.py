"""Tensor names that do not fit the model: which are harmless, suspicious or contradictory."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence

from exllamav3.architecture.decoder import MTP_PREFIX
from exllamav3.checkpoint.tensor_files import CheckpointWarning
from exllamav3.codec.params import Codebook
from exllamav3.codec.tensor import is_exl3
from exllamav3.errors import FormatError
from exllamav3.modules.attention import Attention
from exllamav3.modules.linear import Linear
from exllamav3.modules.module import Module
from exllamav3.topology import COMPONENTS, FUSED_NAME

NOT_WEIGHTS = ((".rotary_emb.inv_freq", "rotary frequencies are computed from config.json"),)
"""Suffixes of tensors that carry no weights, and why nothing is lost without them."""
SIDE_PREFIXES = (MTP_PREFIX,)
"""Parts that are stored and never run, so an unknown tensor there changes no result."""


def check_leftovers(unclaimed: Iterable[str], modules: Sequence[Module], where: str) -> None:
    """Judge the tensors that nothing reads; names are enough.

    Args:
        unclaimed: names that no module reads and that belong to no copied part.
        modules: top-level modules that run.
        where: the checkpoint, for messages.

    Raises:
        FormatError: a tensor belongs to a module that runs, such as the bias of a linear that has
            none, or is a second form of one; the results would silently be other than meant.

    Warns:
        CheckpointWarning: other tensors are ignored.
    """
    suffixes = tuple(suffix for suffix, _ in NOT_WEIGHTS)
    unknown = [n for n in unclaimed if not n.endswith(suffixes) and not n.startswith(SIDE_PREFIXES)]
    taken, absent = _places(modules, unknown)
    contradictory = [
        name for name in unknown if name.rpartition(".")[0] in taken or name.startswith(absent)
    ]
    if contradictory:
        raise FormatError(
            f"{where}: {_some(contradictory)} would be ignored in layers that are run, and the "
            f"results would not be those of the model; config.json and the tensors belong to "
            f"different models, or these tensors are stale and have to be removed"
        )
    if unknown:
        warnings.warn(
            f"{where}: {_some(unknown)} ignored, because no part of this architecture reads such "
            f"names; check that config.json belongs to these tensors",
            CheckpointWarning,
            stacklevel=4,
        )


def check_markers(
    modules: Sequence[Module], names: Collection[str], stated: Codebook | None, where: str
) -> None:
    """Doubt quantized linears that have no marker where the configuration states a codebook.

    Without a marker a trellis counts as 3inst. A conversion that was resumed with another codebook
    may mix them; a marker that was lost gives noise.

    Warns:
        CheckpointWarning: names the linears.
    """
    markers = [codebook.marker for codebook in Codebook if codebook.marker is not None]
    if stated is None or stated.marker is None:
        return
    bare = [
        part.key
        for top in modules
        for part in top
        if isinstance(part, Linear)
        and is_exl3(part.key, names)
        and not any(f"{part.key}.{marker}" in names for marker in markers)
    ]
    if bare:
        warnings.warn(
            f"{where}: no marker tensor is stored for {_some(bare, noun='linear')}: read as 3inst, "
            f"where config.json states {stated.value}. Unless the conversion mixed codebooks, the "
            f"files are damaged",
            CheckpointWarning,
            stacklevel=4,
        )


def _places(modules: Sequence[Module], names: Collection[str]) -> tuple[set[str], tuple[str, ...]]:
    """Paths whose tensors are read, and prefixes of the form that an attention block has not."""
    taken: set[str] = set()
    absent: list[str] = []
    for module in (part for top in modules for part in top):
        own = module.own_names(names)
        if own:
            taken.update((module.key, *(name.rpartition(".")[0] for name in own)))
        if isinstance(module, Attention):
            others = COMPONENTS if module.is_fused else (FUSED_NAME,)
            absent += [f"{module.key}.{name}." for name in others]
    return taken, tuple(absent)


def _some(names: Sequence[str], limit: int = 6, noun: str = "tensor") -> str:
    """`2 tensors (a, b)`, the first few of many."""
    shown = ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
    return f"{len(names)} {noun}{'s' if len(names) > 1 else ''} ({shown})"
