"""A large comparison takes little time and memory."""

import resource
import time

import numpy as np
import pytest

from fairtrial import stats


@pytest.mark.measured
@pytest.mark.parametrize("kind", ["pass/fail", "graded", "repeats", "many clusters", "1000 clusters"])
def test_a_hundred_thousand_samples_and_ten_metrics_are_compared_in_seconds(kind: str) -> None:
    rng = np.random.default_rng(1)
    n = 100_000
    count = {"many clusters": 20_000, "1000 clusters": 1_000}.get(kind)
    labels = None if count is None else np.sort(rng.integers(0, count, n))
    shape = (n, 3) if kind == "repeats" else (n,)
    whole = kind in ("pass/fail", "repeats")
    a = rng.integers(0, 2, shape) if whole else rng.random(shape)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    for _ in range(10):
        b = rng.integers(0, 2, shape) if whole else rng.random(shape)
        assert stats.paired_difference(a, b, clusters=labels).interval is not None
    assert time.perf_counter() - start < 15
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 400  # megabytes
