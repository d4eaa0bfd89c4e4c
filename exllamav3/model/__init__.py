"""Part of exllamav3; see docs/architecture.md."""
