"""`python -m exllamav3` is the command `exllamav3`."""

from exllamav3.cli.main import main

raise SystemExit(main())
