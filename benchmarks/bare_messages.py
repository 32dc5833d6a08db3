"""The messages of bare loops: of the same size as those of a fleet."""

from __future__ import annotations

import json
import time
from typing import Any

BATCH = 100
WINDOW = 5_000


def make_request(number: int) -> dict[str, Any]:
    """A request for one trial."""
    return {
        "v": 1,
        "key": ["0123456789ab", "baseline", f"s{number}", 0],
        "ordinal": number,
        "sample_ordinal": number,
        "input": number,
        "expected": 2 * number,
        "suite": "fleet-test",
        "fingerprint": "0" * 32,
        "id": f"{number:024x}",
        "at": time.time(),
    }


def make_reply(request: dict[str, Any], worker: str) -> dict[str, Any]:
    """The result of a trial that doubles its input."""
    output = 2 * request["input"]
    return {
        **{name: request[name] for name in ("v", "key", "ordinal", "sample_ordinal", "id")},
        "outcome": "scored",
        "latency_ms": 0,
        "attempt": 1,
        "execution": 1,
        "started_at": time.time(),
        "score": [float(output == request["expected"]), output == request["expected"], "", [], "exact_match"],
        "output": json.dumps(output),
        "worker": worker,
    }


def row_of(reply: dict[str, Any]) -> tuple[Any, ...]:
    """The row of a result in SQLite."""
    return reply["ordinal"], reply["key"][2], reply["outcome"], reply["score"][0], reply["output"]
