#!/usr/bin/env python3
"""`python convert.py ...` is `exllamav3 convert ...`."""

from exllamav3.cli.main import main

if __name__ == "__main__":
    import sys

    raise SystemExit(main(["convert", *sys.argv[1:]]))
