"""Trials are filtered, sorted, paged and counted from columns as a plain loop over results would do it."""

from __future__ import annotations

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

from fairtrial import ConfigurationError, Dataset, EvalReport, EvalSuite, Metric, Sample, Score, exact_match, open_store
from fairtrial.reports.figures import trial_columns
from fairtrial.reports.figures.trial_columns import Condition, TrialColumns
from fairtrial.store import RunStore
from tests.reports.test_column_files import SIDES, runs, sample_run, store_run

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
    Condition("score", any_of=("no number",)): lambda _one: False,
}


class TestSelections:
    @pytest.mark.proves("R118")
    @relaxed
    @given(made=runs(), data=st.data())
    def test_the_selected_trials_are_those_of_a_plain_loop(
        self, made: Any, data: st.DataObject, store: RunStore
    ) -> None:
        run = store_run(store, *made, run_id=uuid4().hex)
        columns = TrialColumns.open(store, run)
        chosen = data.draw(st.lists(st.sampled_from(list(CONDITIONS)), max_size=2))
        results = [one for one in store.results(run.run_id) if all(CONDITIONS[condition](one) for condition in chosen)]
        found = columns.select(*chosen)
        assert found.ordinals().tolist() == [one.ordinal for one in results]
        assert found.total == len(results)

    def test_metadata_is_filtered_by_value(self, store: RunStore) -> None:
        run = store_run(store, *sample_run())
        columns = TrialColumns.open(store, run)
        counted = Counter(one.sample.metadata.get("topic") for one in store.results("r1"))
        for topic, count in counted.items():
            assert columns.select(Condition("meta:topic", any_of=(topic,))).total == count
        assert columns.select(Condition("meta:topic", missing=True)).total == counted[None]
        assert columns.select(Condition("meta:topic", any_of=("no such",))).total == 0
        assert columns.metadata_code("topic", None) == 0

    def test_values_that_are_lists_or_equal_numbers_of_other_types_are_found(self, store: RunStore) -> None:
        values: list[Any] = [["x", "y"], {"a": [1]}, 1, 1.0, True]
        data = Dataset([Sample(str(place), 1, 1, {"of": value}) for place, value in enumerate(values)])
        report = EvalSuite("s", data, lambda one: one, exact_match).run_sync(store=store)
        columns = TrialColumns.open(store, report.run)
        for place, value in enumerate(values):
            found = columns.select(Condition("meta:of", any_of=(value,))).ordinals().tolist()
            assert found == [place], value
        assert columns.select(Condition("meta:of", any_of=(["y", "x"],))).total == 0

    def test_a_metric_of_minus_one_is_not_found_by_a_text(self, store: RunStore) -> None:
        def minus_one(output: int, expected: int) -> Score:
            return Score(1.0, metrics=(Metric("m", -1.0),))

        report = EvalSuite("s", Dataset([Sample("1", 1, 1)]), lambda one: one, minus_one).run_sync(store=store)
        columns = TrialColumns.open(store, report.run)
        assert columns.select(Condition("metric:m", any_of=(-1,))).total == 1
        assert columns.select(Condition("metric:m", any_of=("abc",))).total == 0

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
            assert (row["latency_ms"], type(row["latency_ms"])) == (one.latency_ms, int)
            assert repr(row["score"]) == repr(None if one.score is None else one.score.value)
        assert columns.sample_id(17) == "s17"
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
            assert columns.select(Condition("experiment", any_of=(side,))).pass_rates() == {side: whole}
        some = columns.select(Condition("experiment", any_of=("plain",)), Condition("passed", any_of=(True,)))
        (found,) = some.pass_rates().values()
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
    code = "import sys, fairtrial.reports.figures.trial_columns as _\n"
    code += "print([m for m in ('scipy', 'numpy') if m in sys.modules])"
    assert child(code).strip() == "['numpy']"
    assert sys.modules["numpy"] is np
