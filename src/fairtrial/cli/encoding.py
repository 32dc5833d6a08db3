"""Screens in encodings that lack some of our characters, or some of the user's."""

from __future__ import annotations

import codecs
import io
from typing import IO

_HANDLER = "fairtrial-printable"
_STAND_INS = {"…": "~"}  # What a cut cell ends in.


def make_printable(stream: IO[str]) -> None:
    """Let a stream print what it cannot encode as question marks as wide: no table breaks, and nothing fails."""
    if isinstance(stream, io.TextIOWrapper):
        codecs.register_error(_HANDLER, _replaced)
        stream.reconfigure(errors=_HANDLER)


def make_exact(stream: IO[str]) -> None:
    """Let a stream carry data as it is, in UTF-8: what goes into a file or another program must not lose anything."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    from rich.cells import cell_len

    text = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(one) or "?" * cell_len(one) for one in text), error.end
