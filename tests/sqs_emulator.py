"""Runs ministack, an emulator of SQS and S3, with a clock that tests can set. Executed in the emulator's environment.

    python tests/sqs_emulator.py CLOCK_FILE

The file has two numbers: seconds by which the clock is ahead, and a time at which it stands still, or 0.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from typing import Any


class ShiftedTime:
    """The module `time` with the clock of a file."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._clock = mmap.mmap(file.fileno(), 16)

    def time(self) -> float:
        ahead, frozen = map(float, struct.unpack("<dd", self._clock[:16]))
        return (frozen or time.time()) + ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def main() -> None:
    from ministack import app
    from ministack.services import sqs

    sqs.time = ShiftedTime(sys.argv.pop(1))
    app.main()


if __name__ == "__main__":
    main()
