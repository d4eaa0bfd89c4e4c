"""`exllamav3 convert`: quantize a Hugging Face checkpoint to EXL3, or resume a job."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch

from exllamav3.cli.arguments import device_list
from exllamav3.cli.boundary import EXIT_INTERRUPTED
from exllamav3.conversion import ConversionJob, ConversionOptions
from exllamav3.conversion.console import ConsoleListener
from exllamav3.conversion.options import CODEBOOKS
from exllamav3.errors import ConversionError
from exllamav3.topology import SCALES

_REQUIRED = {"in_dir": "-i", "out_dir": "-o", "bits": "-b"}
"""Options that a new job must state."""


def build_parser() -> argparse.ArgumentParser:
    """The command line. Absent options stay absent, so that a resume knows what was stated."""
    parser = argparse.ArgumentParser(
        prog="exllamav3 convert",
        description="Quantize a Hugging Face checkpoint to EXL3. With --resume, options that are "
        "not given keep the values the job was started with.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )

    def add(short: str | None, name: str, **settings: Any) -> None:
        spellings = {f"--{name}": None, f"--{name.replace('_', '-')}": None}
        parser.add_argument(*([short] if short else []), *spellings, dest=name, **settings)

    add("-i", "in_dir", metavar="DIR", help="source: config.json, tokenizer.json, *.safetensors")
    add("-w", "work_dir", metavar="DIR", required=True, help="state of the job; empty at first")
    add("-o", "out_dir", metavar="DIR", help="result; empty at first")
    add("-ss", "shard_size", type=int, metavar="MB", help="largest output shard (default 8192)")
    add("-b", "bits", type=float, metavar="BITS", help="mean bits per weight, 1 to 8")
    add("-hb", "head_bits", type=int, metavar="N", help="lm_head: 1 to 8, or 16 (default 6)")
    add("-mb", "mtp_bits", type=int, metavar="N", help="MTP head: 1 to 8, or 16 (default 4)")
    add("-vb", "vision_bits", type=int, metavar="N", help="vision tower: 16, the only value yet")
    add("-r", "resume", action="store_true", help="continue the job in the work folder")
    add("-cd", "cal_data", metavar="FILE", help="text, or safetensors with input_ids (rows, cols)")
    add("-cr", "cal_rows", type=int, metavar="N", help="calibration rows (default 128)")
    add("-cc", "cal_cols", type=int, metavar="N", help="tokens per calibration row (default 1024)")
    add(
        "-cpi",
        "checkpoint_interval",
        type=float,
        metavar="SECONDS",
        help="least time between checkpoints (default 120)",
    )
    add(
        "-d",
        "devices",
        type=device_list,
        metavar="LIST",
        help="cpu, or GPU numbers such as 0,1 (default: GPU 0 if there is one)",
    )
    add("-cb", "codebook", choices=CODEBOOKS, help="trellis codebook (default mul1)")
    add(
        None,
        "out_scales",
        choices=SCALES,
        help="output channel scales (default always)",
    )
    add(None, "seed", type=int, metavar="N", help="of the random signs (default 0)")
    parser.add_argument(
        "--qkv-topology",
        "--qkv_topology",
        "--qkv-topology-plan",
        "--qkv_topology_plan",
        dest="qkv_topology",
        metavar="PLAN.json",
        help="how each full-attention block stores q, k and v",
    )
    add("-v", "verbose", action="store_true", help="say more")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Errors are for `report_errors` to print."""
    given = vars(build_parser().parse_args(argv))
    resume = given.pop("resume", False)
    plan = given.pop("qkv_topology", None)
    listener = ConsoleListener(given.get("verbose", False))
    try:
        if resume:
            job = ConversionJob.resume(given["work_dir"], given, plan, listener)
        else:
            job = ConversionJob.create(_new_options(given), plan, listener)
    except KeyboardInterrupt:
        print("\ninterrupted before the job was stored", file=sys.stderr)
        return EXIT_INTERRUPTED
    try:
        with job:
            result = job.run()
    except KeyboardInterrupt:
        command = shlex.join(["exllamav3", "convert", "--resume", "-w", given["work_dir"]])
        print(
            f"\ninterrupted; finished modules are kept. Continue with: {command}", file=sys.stderr
        )
        return EXIT_INTERRUPTED
    listener.message(f"done        {result.out_dir}  (bits per weight: {result.rate})")
    return 0


def _new_options(given: dict[str, Any]) -> ConversionOptions:
    for name, flag in _REQUIRED.items():
        if name not in given:
            raise ConversionError(
                f"{flag} ({name}) is missing: a new job needs -i, -w, -o and -b; add --resume to "
                f"continue the job in {given['work_dir']}"
            )
    default = ("cuda:0",) if torch.cuda.is_available() else ("cpu",)
    return ConversionOptions(**{"devices": default, **given})
