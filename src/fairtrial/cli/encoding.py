"""Screens in encodings that lack some of our characters, or some of the user's."""

from __future__ import annotations

import io
from typing import IO

from fairtrial.render.safe_text import AS_WIDE


def make_printable(stream: IO[str]) -> None:
    """Let a stream print what it cannot encode as question marks as wide: no table breaks, and nothing fails."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=AS_WIDE)


def make_exact(stream: IO[str]) -> None:
    """Let a stream carry data as it is, in UTF-8: what goes into a file or another program must not lose anything."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
