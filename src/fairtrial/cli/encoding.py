"""Output in encodings that cannot represent every character."""

from __future__ import annotations

import io
from typing import IO

from fairtrial.reports.render.safe_text import AS_WIDE


def make_printable(stream: IO[str]) -> None:
    """Print characters that a stream cannot encode as question marks of the same width, so that tables stay aligned."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=AS_WIDE)


def make_exact(stream: IO[str]) -> None:
    """Switch a stream to UTF-8, so that data for files and other programs loses nothing."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
