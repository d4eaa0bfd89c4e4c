"""Conversion of Hugging Face checkpoints to EXL3.

    options          what a user can say, and what a resumed job may change
    layout, targets  what every module becomes; allocation hands out the bits
    calibration      token rows
    job              ConversionJob: create, resume, run
    pipeline         capture, quantize, advance, one module at a time
    job_folder       crash-safe state: options and finished modules; checkpoints: the rows
    recovery         what of a damaged job folder is made again
    output           writes the result

See docs/conversion.md.
"""

from __future__ import annotations

from exllamav3.conversion.job import ConversionJob, ConversionResult, convert
from exllamav3.conversion.options import ConversionOptions

__all__ = ["ConversionJob", "ConversionOptions", "ConversionResult", "convert"]
