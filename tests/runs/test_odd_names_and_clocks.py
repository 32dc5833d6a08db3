"""Names that look the same stay apart, and a wall clock that jumps costs no trial of a local run."""

from __future__ import annotations

import time
import unicodedata
from pathlib import Path

import pytest

from fairtrial import ConfigurationError, Dataset, EvalConfig, EvalSuite, Sample, exact_match, open_store

IDS = {
    "two forms of a letter": ["\u00e9", unicodedata.normalize("NFD", "\u00e9")],
    "case": ["A", "a"],
    "a space": ["a", "a "],
    "no width": ["a", "a\u200b"],
    "200,000 characters": ["x" * 200_000, "y"],
    "a null character": ["a\0", "a", "a\\0"],
    "direction": ["\u202ea", "a"],
}


@pytest.mark.parametrize("name", IDS)
def test_ids_that_look_the_same_stay_apart(tmp_path: Path, name: str) -> None:
    suite = EvalSuite("names", Dataset([Sample(one, 1, 1) for one in IDS[name]], name="d"), lambda n: n, exact_match)
    report = suite.run_sync(store=str(tmp_path / "runs.db"))
    store = open_store(tmp_path / "runs.db")
    assert [store.sample(report.run_id, place).id for place in range(len(IDS[name]))] == IDS[name]
    store.close()


@pytest.mark.parametrize("name", ["../../x", "a\nb", "a@1", "a:b"])
def test_a_suite_is_not_called_like_a_path_a_run_or_several_lines(name: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid suite name"):
        EvalSuite(name, Dataset.of({1: 1}, name="d"), lambda n: n, exact_match)


@pytest.mark.parametrize(
    "jumps",
    [(0, -31_536_000), (0, 3.2e9), (0, -3e9), (0, -100, 100, -7200, 86_400)],
    ids=["back a year", "a century ahead", "before 1970", "to and fro"],
)
def test_a_clock_that_jumps_in_a_local_run_costs_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jumps: tuple[float, ...]
) -> None:
    real, state = time.time, [0, 0.0]
    monkeypatch.setattr(time, "time", lambda: real() + state[1])

    def task(number: int) -> int:
        state[0] += 1
        state[1] = jumps[int(state[0]) % len(jumps)]
        return number

    config = EvalConfig(max_concurrent=4, timeout_seconds=20)
    suite = EvalSuite("clock", Dataset.of({n: n for n in range(40)}, name="d"), task, exact_match, config=config)
    report = suite.run_sync(store=str(tmp_path / "runs.db"))
    assert (report.status, report.total) == ("finished", 40)
    assert min(result.latency_ms for result in report.results) >= 0
