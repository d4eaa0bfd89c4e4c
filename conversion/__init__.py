"""Conversion of Hugging Face checkpoints to EXL3."""
