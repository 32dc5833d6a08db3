"""What the programs of trainers have tried, as one line of JSON that `python scripts/peers trainers` reads."""

from __future__ import annotations

import json
from typing import Any


class Checks:
    """The results of one program."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, what: str, passed: bool, result: object = "") -> None:
        """Note what was tried, whether it is right, and a figure that shows it."""
        self._rows.append({"what": what, "result": str(result), "passed": bool(passed)})

    def finish(self) -> int:
        """Print the results; returns the exit status."""
        print(json.dumps(self._rows))
        return 0
