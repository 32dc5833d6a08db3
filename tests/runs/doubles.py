"""A task that doubles numbers, with its dataset and an observer."""

from __future__ import annotations

from fairtrial import Dataset, Sample


def doubles(count: int) -> Dataset[int, int]:
    return Dataset([Sample(f"s{i}", i, 2 * i, {"parity": i % 2}) for i in range(count)], name="doubles")


async def double(given: int) -> int:
    return 2 * given
