"""Trials are filtered, sorted, paged and counted from columns as a plain loop over results would do it."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fairtrial import EvalReport, open_store
from fairtrial.analysis import trial_columns
from fairtrial.analysis.trial_columns import Condition, TrialColumns
from fairtrial.errors import ConfigurationError
from fairtrial.store import RunStore
from fairtrial.trials.result import EvalResult
from tests.analysis.test_column_files import SIDES, runs, sample_run, store_run

relaxed = settings(
    phases=[Phase.generate],
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    found = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    yield found
    found.close()


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    with mock.patch.object(trial_columns, "_BLOCK", 7):
        yield


CONDITIONS: dict[Condition, Any] = {
    Condition("outcome", any_of=("scored",)): lambda one: one.outcome == "scored",
    Condition("outcome", any_of=("timeout", "dead_letter")): lambda one: one.outcome in ("timeout", "dead_letter"),
    Condition("experiment", any_of=("terse",)): lambda one: one.key.experiment == "terse",
    Condition("passed", any_of=(False, None)): lambda one: one.score is None or not one.score.passed,
    Condition("score", low=0.1, high=0.5): lambda one: one.score is not None and 0.1 <= one.score.value <= 0.5,
    Condition("score", missing=True): lambda one: one.score is None,
    Condition("tokens", low=3): lambda one: one.usage.input_tokens + one.usage.output_tokens >= 3,
    Condition("repeat", any_of=(1,)): lambda one: one.key.repeat == 1,
    Condition("outcome", any_of=("no such",)): lambda _one: False,
}
SORTED: dict[str, Any] = {
    "ordinal": lambda one: one.ordinal,
    "score": lambda one: None if one.score is None else one.score.value,
    "tokens": lambda one: one.usage.input_tokens + one.usage.output_tokens,
    "attempt": lambda one: one.attempt,
}


def in_order(results: list[EvalResult], sort: str, *, descending: bool) -> list[int]:
    def key(one: EvalResult) -> tuple[float, int]:
        value = SORTED[sort](one)
        return (math.inf if value is None else -value if descending else value, one.ordinal)

    return [one.ordinal for one in sorted(results, key=key)]


class TestSelections:
    @pytest.mark.proves("R118")
    @relaxed
    @given(made=runs(), data=st.data())
    def test_filters_orders_pages_and_counts_are_those_of_a_plain_loop(
        self, made: Any, data: st.DataObject, store: RunStore
    ) -> None:
        run = store_run(store, *made, run_id=uuid4().hex)
        columns = TrialColumns.open(store, run)
        chosen = data.draw(st.lists(st.sampled_from(list(CONDITIONS)), max_size=2))
        results = [one for one in store.results(run.run_id) if all(CONDITIONS[condition](one) for condition in chosen)]
        found = columns.select(*chosen)
        assert found.ordinals().tolist() == [one.ordinal for one in results]
        scored = [one for one in results if one.score is not None]
        counts = found.counts()
        assert (counts.total, counts.scored) == (len(results), len(scored))
        assert counts.passed == sum(one.score.passed for one in scored if one.score is not None)
        assert counts.errors == len(results) - len(scored)
        assert dict(found.facet("outcome")) == Counter(one.outcome for one in results)
        assert dict(found.facet("experiment")) == Counter(one.key.experiment for one in results)
        sort, descending = data.draw(st.sampled_from(list(SORTED))), data.draw(st.booleans())
        expected = in_order(results, sort, descending=descending)
        forwards, after = [], None
        while True:
            page = found.page(sort=sort, descending=descending, after=after, limit=3)
            forwards += page.ordinals
            if not page.more:
                break
            after = (page.keys[-1], page.ordinals[-1])
        assert forwards == expected
        backwards: list[int] = []
        after = None
        while True:
            page = found.page(sort=sort, descending=descending, after=after, limit=3, backwards=True)
            backwards = page.ordinals + backwards
            if not page.more:
                break
            after = (page.keys[0], page.ordinals[0])
        assert backwards == expected
        for place, ordinal in enumerate(expected[:4]):
            assert found.neighbours(ordinal, sort=sort, descending=descending) == (
                expected[place - 1] if place else None,
                expected[place + 1] if place + 1 < len(expected) else None,
            )

    def test_metadata_is_filtered_and_counted_by_value(self, store: RunStore) -> None:
        run = store_run(store, *sample_run())
        columns = TrialColumns.open(store, run)
        counted = Counter(one.sample.metadata.get("topic") for one in store.results("r1"))
        assert dict(columns.select().facet("meta:topic")) == counted
        assert columns.select().facet("meta:topic", limit=1) == counted.most_common(1)
        for topic, count in counted.items():
            assert columns.select(Condition("meta:topic", any_of=(topic,))).total == count
        assert columns.select(Condition("meta:topic", missing=True)).total == counted[None]
        assert columns.select(Condition("meta:topic", any_of=("no such",))).total == 0
        assert columns.metadata_code("topic", None) == 0

    def test_rows_have_plain_values_and_ids(self, store: RunStore) -> None:
        run = store_run(store, *sample_run())
        columns = TrialColumns.open(store, run)
        results = list(store.results("r1"))[5:9]
        rows = columns.rows([one.ordinal for one in results])
        for row, one in zip(rows, results, strict=True):
            assert (row["sample_id"], row["experiment"], row["repeat"]) == (
                one.key.sample_id,
                one.key.experiment,
                one.key.repeat,
            )
            assert row["outcome"] == one.outcome
            assert row["passed"] == (None if one.score is None else one.score.passed)
            assert row["metric:a"] == (None if one.score is None else one.score.metrics[0].value)
            assert row["meta:topic"] == one.sample.metadata.get("topic")
            assert row["latency_ms"] == one.latency_ms
        assert columns.find_sample("s17") == 17
        assert columns.sample_id(17) == "s17"
        assert columns.find_sample("s") is None
        assert columns.sample_id(999) == ""

    def test_the_interval_of_what_is_filtered_is_that_of_the_report(self, store: RunStore) -> None:
        run = store_run(store, *sample_run())
        report = EvalReport(store, run)
        columns = TrialColumns.open(store, run)
        rates = columns.select().pass_rates()
        assert list(rates) == list(SIDES)
        for side in SIDES:
            whole = report[side].figures.get("pass_rate")
            assert rates[side] == whole
            assert columns.select(Condition("experiment", any_of=(side,))).pass_rate() == whole
        some = columns.select(Condition("experiment", any_of=("plain",)), Condition("passed", any_of=(True,)))
        found = some.pass_rate()
        assert found is not None
        assert (found.value, found.trials) == (1.0, some.total)
        assert columns.select(Condition("outcome", any_of=())).pass_rates() == {}

    @relaxed
    @given(made=runs(), data=st.data())
    def test_a_part_of_a_column_is_the_column_at_these_ordinals(self, made: Any, data: Any, store: RunStore) -> None:
        columns = TrialColumns.open(store, store_run(store, *made, run_id=uuid4().hex))
        start = data.draw(st.integers(0, columns.extent))
        end = data.draw(st.integers(start, columns.extent))
        for column in columns.columns:
            at = columns.at(column, np.arange(start, end))
            np.testing.assert_array_equal(columns.part(column, start, end), at, err_msg=column)

    def test_unknown_columns_and_stores_in_memory_are_refused(self, store: RunStore) -> None:
        columns = TrialColumns.open(store, store_run(store, *sample_run()))
        with pytest.raises(ConfigurationError, match=r"the column must be one of .*got 'no such'"):
            columns.select(Condition("no such", low=1))
        with pytest.raises(ConfigurationError, match="whole numbers"):
            columns.select().facet("score")
        memory = open_store("memory:")
        with pytest.raises(ConfigurationError, match="a store in memory"):
            TrialColumns.open(memory, store_run(memory, *sample_run()))

    def test_a_file_that_is_absent_is_built_on_demand_only(self, store: RunStore) -> None:
        run = store_run(store, *sample_run(missing=False))
        assert TrialColumns.open_existing(store, run) is None
        seen: list[tuple[int, int]] = []
        columns = TrialColumns.open(store, run, progress=lambda done, planned: seen.append((done, planned)))
        assert seen[-1] == (run.planned, run.planned)
        found = TrialColumns.open_existing(store, run)
        assert found is not None
        np.testing.assert_array_equal(found.values("score"), columns.values("score"))


def test_questions_load_no_scipy(child: Any) -> None:
    code = "import sys, fairtrial.analysis.trial_columns; print([m for m in ('scipy', 'numpy') if m in sys.modules])"
    assert child(code).strip() == "['numpy']"
    assert sys.modules["numpy"] is np
