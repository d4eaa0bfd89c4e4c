"""The output folder: whose it is, which other files come along, and in which order all appear.

A hidden claim file says which job writes here. `config.json` appears last: a
folder without it is not a model yet.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from exllamav3.checkpoint.index import INDEX_NAME
from exllamav3.errors import ConversionError

from .durable import PARTIAL, refuse_what_is_no_folder, write_json
from .shards import SHARD_NAME

CLAIM = ".exllamav3-conversion.json"
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".ckpt", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx",
)  # fmt: skip
"""Files that hold weights, in this or another format; they are not copied."""
_REWRITTEN = ("config.json", "quantization_config.json", INDEX_NAME, CLAIM)


class OutputFolder:
    """The result folder of one job."""

    def __init__(self, path: Path, job_id: str) -> None:
        self.path = path
        self.job_id = job_id

    def claim(self) -> None:
        """Make the folder this job's own. Raises as `check_free`."""
        self.check_free()
        if not self.is_ours():
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / CLAIM, {"job": self.job_id})

    def check_free(self) -> None:
        """Refuse a folder that holds something this job did not write.

        Raises:
            ConversionError: it holds something that this job did not write.
        """
        refuse_what_is_no_folder(self.path, "the output folder (-o)")
        if self.is_ours():
            return
        if self.path.exists():
            held = sorted(entry.name for entry in self.path.iterdir())
            if held == [CLAIM]:
                raise ConversionError(
                    f"{self.path}: another job has reserved this output folder ({CLAIM} inside "
                    f"says which); resume that job, or choose another folder (-o)"
                )
            if held:
                raise ConversionError(
                    f"{self.path}: the output folder (-o) is not empty (it holds "
                    f"{', '.join(held[:5])}{', ...' if len(held) > 5 else ''}); choose an empty one"
                )

    def is_ours(self) -> bool:
        """Whether this job has claimed the folder and not finished it."""
        file = self.path / CLAIM
        if not file.is_file():
            return False
        try:
            claim = json.loads(file.read_bytes())
        except ValueError:
            return False
        return isinstance(claim, dict) and claim.get("job") == self.job_id

    def clear(self, side: Collection[str]) -> None:
        """Remove what an interrupted run of this job wrote.

        The claim stays, and so does what somebody else has put here meanwhile.

        Args:
            side: names of the files that are copied from the source.
        """
        assert self.is_ours()
        written = {*side, *_REWRITTEN} - {CLAIM}
        for entry in sorted(self.path.iterdir()):
            name = entry.name.removesuffix(PARTIAL)
            if entry.is_file() and (name in written or SHARD_NAME.fullmatch(name)):
                entry.unlink()

    def release(self) -> None:
        """The folder is complete: drop the claim."""
        (self.path / CLAIM).unlink(missing_ok=True)


def side_files(in_dir: Path) -> tuple[list[str], list[str]]:
    """Plain files of the source that come along unchanged, and those that do not.

    Returns:
        Names to copy, and names of ignored weight files (safetensors shards not among them).
    """
    copied, ignored = [], []
    for entry in sorted(in_dir.iterdir()):
        if not entry.is_file() or entry.name in _REWRITTEN or entry.name.endswith(PARTIAL):
            continue
        if entry.suffix == ".safetensors":
            continue
        if entry.suffix in WEIGHT_SUFFIXES or entry.name.endswith(".index.json"):
            ignored.append(entry.name)
        else:
            copied.append(entry.name)
    return copied, ignored
