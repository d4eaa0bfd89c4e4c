"""Sources, jobs and a stand-in for the quantizer, for tests of the converter.

Tests of how a job is organised do not need the trellis search, which takes
most of a job's time: `stand_in_quantize` makes a valid tensor that depends on
everything the real one depends on, in no time.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exllamav3.conversion import ConversionJob, ConversionOptions, pipeline
from exllamav3.conversion.reports import Silent
from safetensors.torch import save_file
from tiny_models import llama_config, random_tensors, write_folder

from exllamav3.codec.tensor import Exl3Tensor
from exllamav3.errors import ConversionError
from exllamav3.quant import QuantReport

CALIBRATION = "calibration.safetensors"


def stand_in_quantize(weight_KN, hessian, settings, bias_N=None, progress=None):
    """Random trellis, scales near the weight's, all derived from every argument."""
    digest = hashlib.sha256(weight_KN.float().numpy().tobytes())
    digest.update(repr(settings).encode())
    if hessian is not None:
        digest.update(hessian.matrix.numpy().tobytes() + hessian.signs_K.numpy().tobytes())
    random = torch.Generator().manual_seed(int.from_bytes(digest.digest()[:7], "little"))
    k, n = weight_KN.shape
    shape = (k // 16, n // 16, 16 * settings.bits)
    trellis = torch.randint(-(2**15), 2**15, shape, generator=random).to(torch.int16)
    signs = torch.randint(0, 2, (k + n,), generator=random) * 2 - 1
    svh = signs[k:].half()
    svh[(weight_KN == 0).all(0)] = 0
    suh = (signs[:k] * weight_KN.float().std()).half()
    if progress is not None:
        progress(0.5)
        progress(1.0)
    bias = None if bias_N is None else bias_N.half()
    error = None if hessian is None else 0.01
    report = QuantReport(error, 0.1, 0.8, settings.out_scales, hessian is None, False, 0.0)
    return Exl3Tensor(trellis, suh, svh, settings.codebook, bias), report


def write_source(folder: Path, config: dict | None = None, *, seed: int = 0, **layout) -> Path:
    """A random source model, with packed calibration rows beside it (12 rows of 24 tokens)."""
    config = llama_config(intermediate_size=128) if config is None else config
    write_folder(folder, config, random_tensors(config, seed=seed), **layout)
    vocab = (config.get("text_config") or config)["vocab_size"]
    ids = torch.randint(0, vocab, (12, 24), generator=torch.Generator().manual_seed(seed))
    save_file({"input_ids": ids}, folder.parent / CALIBRATION)
    return folder


def job_options(source: Path, root: Path, **changes) -> ConversionOptions:
    """Options of a small job with folders `work` and `out` in `root`."""
    values = {
        "in_dir": str(source),
        "work_dir": str(root / "work"),
        "out_dir": str(root / "out"),
        "bits": 3.0,
        "head_bits": 4,
        "cal_rows": 6,
        "cal_cols": 16,
        "cal_data": str(source.parent / CALIBRATION),
        "checkpoint_interval": 0,
    }
    return ConversionOptions(**{**values, **changes})


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Contents of every file, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def killer(name: str, occurrence: int = 1) -> Callable[[str], None]:
    """A step function that ends its process for good at the n-th step of a name."""
    seen = 0

    def step(reached: str) -> None:
        nonlocal seen
        seen += reached == name
        if seen == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def run_in_child(
    options: ConversionOptions, resume: bool, plan: str | None, kill_at: tuple[str, int] | None
) -> None:
    """Body of a child process: create or resume a job with the stand-in and run it."""
    torch.set_num_threads(1)
    pipeline.quantize_linear = stand_in_quantize
    step = killer(*kill_at) if kill_at is not None else lambda name: None
    if resume:
        job = ConversionJob.resume(options.work_dir, step=step)
    else:
        job = ConversionJob.create(options, plan, step=step)
    with job:
        job.run()


def stop_at(wanted: str, occurrence: int = 1, error: type[BaseException] = KeyboardInterrupt):
    """A step function that raises at the n-th step of a name."""
    seen = 0

    def step(name: str) -> None:
        nonlocal seen
        seen += name == wanted
        if name == wanted and seen == occurrence:
            raise error

    return step


def interrupt(options, wanted="module tensor", occurrence=3, **create) -> None:
    """Create a job and stop it at a step."""
    with (
        ConversionJob.create(options, step=stop_at(wanted, occurrence), **create) as job,
        pytest.raises(KeyboardInterrupt),
    ):
        job.run()


def refused(options, message: str, error=ConversionError) -> None:
    """A new job is refused, and neither a job nor a result is there."""
    with pytest.raises(error, match=message):
        ConversionJob.create(options)
    assert not (Path(options.out_dir) / "config.json").exists() or options.out_dir == options.in_dir
    assert not (Path(options.work_dir) / "job.json").exists()


class Recorder(Silent):
    """Keeps what a job says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.modules: list[tuple[str, bool, bool]] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    def module(self, report, fidelity, resumed) -> None:
        self.modules.append((report.key, fidelity is not None, resumed))

    def made(self) -> list[str]:
        """Modules that this run has quantized."""
        return [key for key, _, resumed in self.modules if not resumed]
