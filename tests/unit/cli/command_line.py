"""Running commands in tests, and the folders they run on."""

from pathlib import Path

from exllamav3.cli.main import main

ROOT = Path(__file__).parents[3]


TRAINED = str(ROOT / "examples/tiny-qwen35-lm")


QUANTIZED = str(ROOT / "tests/data/interop/quantized/tiny-qwen3-4bpw-mcg-always")


SOURCE = str(ROOT / "tests/data/interop/source/tiny-qwen3")


def run(capsys, *arguments):
    """Exit code, stdout and stderr of a command."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err
