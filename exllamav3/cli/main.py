"""The command `exllamav3`: picks a subcommand and hands it the rest of the line.

A subcommand's module is imported only when it runs, so that `exllamav3 --help` and wrong usage
answer at once and work without torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

import exllamav3
from exllamav3.cli.boundary import report_errors

COMMANDS = {
    "convert": "quantize a model to EXL3",
    "inspect": "list the tensors of a model: shape, bits, codebook, topology, size",
    "generate": "continue a prompt",
    "eval": "measure perplexity, and KL divergence from a reference model",
}
"""Name and summary; command X lives in `exllamav3.cli.X` and offers `main(argv) -> int`."""

MODULES = {"eval": "evaluate"}
"""Modules whose names differ, because the command's name is a Python builtin."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    lines = "\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="exllamav3",
        description="Quantize language models to EXL3 and run them.",
        epilog=f"commands:\n{lines}\n\n`exllamav3 COMMAND --help` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=exllamav3.__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command"
    )
    rest.required = False  # argparse would name it beside COMMAND when both are missing
    arguments = parser.parse_args(argv)

    def run() -> int:
        module = MODULES.get(arguments.command, arguments.command)
        exit_code: int = import_module(f"exllamav3.cli.{module}").main(arguments.arguments)
        return exit_code

    return report_errors(run)
