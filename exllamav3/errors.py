"""The exceptions of the library.

Every message names the subject, what was found, what was expected, where
(file, tensor key or JSON path), and what to do about it.

    Exl3Error
     |- FormatError(ValueError)                 bytes or metadata contradict docs/format.md
     |   `- TopologyError                       a plan or declaration is malformed or does not fit
     |- UnsupportedError(NotImplementedError)   valid, but this build or device cannot do it
     |- ExtensionError(ImportError)             native code is missing, stale or does not load
     `- ConversionError(RuntimeError)           a conversion job cannot start or continue

This module imports nothing, so the topology package works without torch.
"""

from __future__ import annotations


class Exl3Error(Exception):
    """Base of every error the library raises on purpose."""


class FormatError(Exl3Error, ValueError):
    """Bytes or metadata contradict the format, or an argument has the wrong shape or type."""


class TopologyError(FormatError):
    """A QKV topology plan or declaration is malformed or does not describe this model."""


class UnsupportedError(Exl3Error, NotImplementedError):
    """The request is valid, but this build, device or version cannot do it."""


class ExtensionError(Exl3Error, ImportError):
    """The compiled extension is missing, stale, or does not load."""


class ConversionError(Exl3Error, RuntimeError):
    """A conversion job cannot start or continue; the message says whether --resume is safe."""
