"""Argument types and options that several commands share, and loading with progress."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from exllamav3.cli.output import progress_bar
from exllamav3.errors import UnsupportedError
from exllamav3.model.config import Config
from exllamav3.model.model import Model

MAX_THREADS = 1024
MAX_GIB = 1e6


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def thread_count(text: str) -> int:
    """A number of threads that the OpenMP runtime starts; far beyond it the process crashes."""
    value = positive_int(text)
    if value > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_THREADS}")
    return value


def count(text: str) -> int:
    """An integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


def number(low: float, high: float, above_low: bool = False) -> Callable[[str], float]:
    """Type of a number from `low` to `high`, without `low` itself if `above_low`; no NaN."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high or (above_low and value == low):
            start = f"above {low:g} and at most" if above_low else f"from {low:g} to"
            raise argparse.ArgumentTypeError(f"{text} is not a number {start} {high:g}")
        return value

    return parse


def device_list(text: str) -> tuple[str, ...]:
    """`cpu`, or GPU numbers such as `0,1`, as names of devices."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r}: expected cpu, or numbers such as 0,1")
    return tuple(f"cuda:{name}" if name.isdigit() else name for name in names)


def size_list(text: str) -> tuple[float, ...]:
    """Sizes in GiB such as `20,23.5`."""
    size = number(0, MAX_GIB)
    return tuple(size(part) for part in text.split(","))


def add_runtime_options(parser: argparse.ArgumentParser) -> None:
    """Where and with how many threads a model runs."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--device", help='"cpu" or "cuda:N"; default: the GPU if there is one')
    place.add_argument(
        "-d",
        "--devices",
        type=device_list,
        metavar="LIST",
        help="cpu, or GPU numbers such as 0,1: the layers are split over several",
    )
    parser.add_argument(
        "--use-per-device",
        type=size_list,
        metavar="LIST",
        help="GiB of weights for each of --devices, such as 20,23.5; default: by free memory",
    )
    parser.add_argument("--threads", type=thread_count, help="CPU threads; default: torch's own")


def build_model(directory: str) -> Model:
    """Build the model of a folder; no weight is read yet.

    Raises:
        FormatError, UnsupportedError: as `Config.from_directory` and `Model.from_config`.
    """
    return Model.from_config(Config.from_directory(directory))


def load_model(model: Model, arguments: argparse.Namespace) -> None:
    """Read the weights as the runtime options say, with a progress bar on a terminal.

    Raises:
        FormatError, UnsupportedError: as `Model.load`.
    """
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device, devices = arguments.device, arguments.devices
    if devices is not None and len(devices) == 1 and arguments.use_per_device is None:
        device, devices = devices[0], None
    if device == "meta":
        raise UnsupportedError("device meta: it computes nothing; use cpu or cuda:N")
    name = model.config.directory.name if model.config.directory else "model"
    with progress_bar(f"loading {name}", len(model.modules)) as update:
        model.load(
            device=device,
            progress=lambda done, _: update(done),
            devices=devices,
            use_per_device=arguments.use_per_device,
        )
