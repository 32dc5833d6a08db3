"""Daily runs for tests of the watch: pass rates by day, with what a run records."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import RunStore
from tests.reports.build import stored

FIRST = datetime(2026, 10, 1, 3, tzinfo=UTC).timestamp()
DAY = 86_400


def day(number: int) -> str:
    """Return the name of a day, the first being 0."""
    return datetime.fromtimestamp(FIRST + number * DAY, UTC).date().isoformat()


def nightly(
    rates: Sequence[float],
    *,
    n: int = 100,
    seed: int = 3,
    store: RunStore | None = None,
    by_day: Mapping[int, Mapping[str, Any]] | None = None,
    **common: Any,
) -> RunStore:
    """Store a run for each day. `by_day` has what changes from a day on."""
    rng, changes = random.Random(seed), dict(common)
    where = MemoryStore() if store is None else store
    for number, rate in enumerate(rates):
        changes |= (by_day or {}).get(number, {})
        trials = [float(rng.random() < rate) for _ in range(n)]
        stored(
            trials, run_id=f"{common.get('suite', '')}{number}", store=where, created_at=FIRST + number * DAY, **changes
        )
    return where
