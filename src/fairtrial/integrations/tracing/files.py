"""Writes exported files so that they appear only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO


def write_whole(target: Path | TextIO, write: Callable[[TextIO], int]) -> int:
    """Call `write` with an open file and return its result; a path gets its file when that is complete."""
    if not isinstance(target, Path):
        return write(target)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            count = write(file)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    return count
