"""Details of columns and of what is computed from them, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairtrial import GateRules, Metric, Score, gate, open_store
from fairtrial.analysis.columns import Columns
from fairtrial.analysis.estimates import per_trial
from fairtrial.analysis.labels import CollectedLabels
from fairtrial.analysis.metrics import MISSING, SCORED
from fairtrial.analysis.pairing import pair
from fairtrial.store import RunStore
from tests.analysis.sides import one, two
from tests.analysis.test_column_files import assert_equal, both, sample_run, store_run
from tests.report.build import stored


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    found = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    yield found
    found.close()


def test_trials_that_were_not_run_have_no_verdict_of_a_metric(store: RunStore) -> None:
    samples, repeats, cells = sample_run()
    cells[40:] = [[(None, 0, 0, None, {})] * repeats for _ in cells[40:]]
    read, direct = both(store, store_run(store, samples, repeats, cells), costs=True)
    assert_equal(read, direct)
    assert set(np.unique(read.values["passed:a"][np.isfinite(read.values["passed:a"])])) == {0.0}


def test_a_key_with_too_many_values_is_read_from_the_store_alone(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairtrial.analysis.column_samples.MOST_VALUES", 2)
    read, direct = both(store, store_run(store, *sample_run()), keys=["topic"], cluster="")
    assert_equal(read, direct)
    assert set(read.groups["topic"]) == {None, "t0", "t1", "t2"}


def test_what_is_missing_of_a_plan_is_filled_in() -> None:
    columns = Columns.of({"passed": [1.0, 0.0, 1.0]}, clusters=["a", "a", "b"])
    columns = replace(columns, planned=5)
    assert columns.missing_values("passed") == 2
    filled = columns.completed("passed", 0.0)
    assert (filled.planned, len(filled.ids), filled.missing_values("passed")) == (5, 5, 0)
    assert filled.values["passed"].ravel().tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert filled.clusters is not None
    assert filled.clusters.tolist() == [0, 0, 1, 2, 3]  # Each of the missing is a cluster of its own.


def test_quantiles_are_of_costs_and_of_metrics_without_a_range() -> None:
    numbers = {"latency_ms": [10.0, 20.0, 40.0], "reward": [5.0, 7.0, 9.0], "turns": [1.0, 7.0, 3.0]}
    found = per_trial(Columns.of({"passed": [1.0, 0.0, 1.0], "value": [0.5, 0.0, 1.0], **numbers}))
    names = [each.name for each in found]
    assert names == ["latency_ms", "median:latency_ms", "p95:latency_ms", "median:turns", "p95:turns"]


def test_the_share_of_missing_pairs_is_of_the_plan() -> None:
    plain, terse = (Columns.of({"passed": values}) for values in ([1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]))
    terse = replace(terse, outcomes=np.array([[SCORED], [MISSING], [SCORED], [SCORED]], dtype=np.int8))
    assert pair(terse, plain).missing_share == 0.25
    assert replace(pair(terse, plain), planned=8).missing_share == 1 - 3 / 8


def test_pairs_without_errors_are_adjusted_for_the_number_of_tests_too() -> None:
    def sides(*, more: bool) -> tuple[list[Score | str], list[Score | str]]:
        def score(value: float, place: int) -> Score:
            return Score(value, metrics=[Metric("odd", place % 2)] if more else [])

        plain = [score(float(place >= 5), place) for place in range(45)]
        return [*plain, *["task_error"] * 3], [score(1.0, place) for place in range(48)]

    for more, verdict in ((False, "better"), (True, "no detectable difference")):
        (found, *_) = one(two(*sides(more=more)), metrics=["passed", *(["odd"] if more else [])]).candidates[0].metrics
        assert found.scored_only is not None
        assert (found.scored_only.n, found.scored_only.verdict) == (45, verdict)


def test_the_missing_are_counted_in_words() -> None:
    old = stored([1.0] * 100)
    for count, words in ((1, "the missing is"), (2, "the 2 missing are")):
        new = stored([*[1.0] * (100 - count), *["scorer_error"] * count])
        (reason,) = gate(new, GateRules(margin=0.1, max_missing=0.05), baseline=old).reasons
        assert reason.endswith(f"This assumes that {words} like the others.")


@pytest.mark.parametrize(
    ("scores", "votes", "graded"), [((0, 1), (0, 1), False), ((0, 1), (0.5, 1), True), ((0.5, 1), (0, 1), True)]
)
def test_labels_are_graded_unless_scores_and_labels_are_verdicts(
    scores: tuple[float, float], votes: tuple[float, float], graded: bool
) -> None:
    columns = Columns.of({"helpful": [*scores]})
    by_trial = {(place, 0): {"ann": float(vote)} for place, vote in enumerate(votes)}
    labels = CollectedLabels(by_trial=by_trial, weights=dict.fromkeys(by_trial, 1.0))
    column, found = labels.column(columns, "helpful", by_verdict=False)
    assert found is graded
    assert column.values.ravel().tolist() == [float(vote) for vote in votes]
