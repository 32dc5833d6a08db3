"""Two large runs are compared quickly and in little memory, from the store to the verdicts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fairtrial import open_store
from tests.figures import Figure

path = Path(__file__).parents[2] / "benchmarks" / "compare.py"
spec = importlib.util.spec_from_file_location("compare_benchmark", path)
assert spec is not None
assert spec.loader is not None
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


@pytest.mark.measured
def test_a_hundred_thousand_samples_and_ten_metrics_are_compared_in_seconds(
    tmp_path: Path, child: Any, figure: Figure
) -> None:
    where = str(tmp_path / "runs.db")
    store = open_store(where)
    for run_id, lift in (("one", 0.0), ("other", 0.01)):
        benchmark.fill(store, run_id, samples=100_000, metrics=10, repeats=1, lift=lift)
    store.close()
    found = json.loads(child(benchmark.MEASURE, where, "[]"))
    assert (found["matched"], found["metrics"]) == (100_000, 12)
    assert "better" in found["verdicts"]
    figure("compare 100,000 samples, 10 metrics: seconds", found["seconds"], at_most=15)
    figure("compare 100,000 samples, 10 metrics: MB of memory", found["grown_mb"], at_most=400)
