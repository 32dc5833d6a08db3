"""The behaviour that all stores share: what a commit takes and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from fairtrial import EvalResult, Outcome, Sample, Score, TokenUsage, TrialKey
from fairtrial.errors import StoreError
from fairtrial.store import RunRecord, RunStore
from tests.store.build import result, run_record, sample, samples

pytestmark = pytest.mark.proves("R100")


def _free_of_checks(**values: Any) -> TokenUsage:
    usage = TokenUsage()
    for name, value in values.items():
        object.__setattr__(usage, name, value)
    return usage


def _spoiled(good: EvalResult, **changes: Any) -> EvalResult:
    """Copy a result with values that its constructor refuses."""
    spoiled = copy(good)
    for name, value in changes.items():
        object.__setattr__(spoiled, name, value)
    return spoiled


class TestCommit:
    @pytest.mark.proves("R108")
    def test_committing_again_changes_nothing_and_counts_duplicates(self, store: RunStore, run: RunRecord) -> None:
        batch = [result(run, ordinal) for ordinal in range(4)]
        assert store.commit("r1", batch, samples([0])) == (4, 0, (), ())
        other = [replace(found, score=Score(0.0), execution=99, output="other") for found in batch]
        assert store.commit("r1", other, samples([0])) == (0, 4, (), ())
        assert list(store.results("r1")) == batch

    def test_a_batch_of_old_and_new_results_is_counted_exactly(self, store: RunStore, run: RunRecord) -> None:
        store.commit("r1", [result(run, ordinal) for ordinal in (1, 3)], samples([0]))
        batch = [result(run, ordinal, execution=50 + ordinal) for ordinal in range(6)]
        assert store.commit("r1", batch, samples([0, 1])) == (4, 2, (), ())
        assert [found.execution for found in store.results("r1")] == [50, 2, 52, 4, 54, 55]

    def test_several_results_of_one_trial_in_one_batch_follow_each_other(self, store: RunStore, run: RunRecord) -> None:
        batch = [
            result(run, 0, "task_error", execution=1, error="first"),
            result(run, 1, execution=2),
            result(run, 0, "timeout", execution=3),
            result(run, 0, execution=4, output="final"),
            result(run, 0, execution=5, output="late"),
            result(run, 1, execution=6, output="late"),
        ]
        assert store.commit("r1", batch, samples([0])) == (3, 3, (), ())
        assert [(found.execution, found.output) for found in store.results("r1")] == [
            (4, "final"),
            (2, {"answer": "a0"}),
        ]

    @pytest.mark.parametrize(
        ("old", "new", "taken"),
        [
            (("scored", 1), ("scored", 2), False),
            (("scored", 1), ("task_error", 2), False),
            (("scorer_error", 1), ("scored", 1), True),
            (("task_error", 2), ("scored", 1), True),
            (("task_error", 1), ("task_error", 1), False),
            (("task_error", 1), ("timeout", 2), True),
            (("timeout", 2), ("task_error", 1), False),
            (("not_run", 1), ("dead_letter", 1), False),
            (("not_run", 0), ("dead_letter", 1), True),
        ],
    )
    def test_a_result_replaces_only_what_it_may(
        self, store: RunStore, old: tuple[Outcome, int], new: tuple[Outcome, int], taken: bool, run: RunRecord
    ) -> None:
        first = result(run, 0, old[0], attempt=old[1], execution=10, metadata={"which": "first"})
        second = result(run, 0, new[0], attempt=new[1], execution=20, metadata={"which": "second"})
        store.commit("r1", [first], samples([0]))
        assert store.commit("r1", [second]) == ((1, 0, (), ()) if taken else (0, 1, (), ()))
        assert list(store.results("r1")) == [second if taken else first]

    def test_an_execution_scored_again_brings_its_new_details(self, store: RunStore, run: RunRecord) -> None:
        failed = result(run, 0, "scorer_error", execution=7, output="answer", error="KeyError: x", stage="score")
        scored = result(run, 0, execution=7, output="answer", score=Score(1.0, reason="fine now"))
        store.commit("r1", [failed], samples([0]))
        assert store.commit("r1", [scored]) == (1, 0, (), ())
        assert store.commit("r1", [failed]) == (0, 1, (), ())
        assert list(store.results("r1")) == [scored]

    def test_a_sample_need_be_given_only_once(self, store: RunStore, run: RunRecord) -> None:
        store.commit("r1", [result(run, 0)], samples([0]))
        store.commit("r1", [result(run, 1)])
        assert [found.sample for found in store.results("r1")] == [sample(0, topic="even")] * 2

    def test_a_sample_may_come_after_its_results(self, store: RunStore, run: RunRecord) -> None:
        assert store.commit("r1", [result(run, 0), result(run, 4)]) == (2, 0, (), ())
        assert [found.sample_id for found in store.results("r1")] == ["s0", "s1"]
        assert list(store.samples("r1")) == []
        with pytest.raises(StoreError, match="sample 's0' was never stored"):
            store.sample("r1", 0)
        assert store.commit("r1", [], samples([0, 1, 2])) == (0, 0, (), ())
        assert [place for place, _ in store.samples("r1")] == [0, 1, 2]
        assert [place for place, _ in store.samples("r1", after=0)] == [1, 2]
        assert store.sample("r1", 1) == sample(1, topic="odd")

    def test_a_run_is_revised_when_what_it_has_changes_not_when_it_gets_more(
        self, store: RunStore, url: str, opened: Callable[[str], RunStore]
    ) -> None:
        run = store.create_run(run_record(experiments=("baseline",), repeats=1))
        fresh = store if url == "memory:" else opened(url)  # It does not know which samples are stored.

        def revised(*given: EvalResult, of: RunStore = store, known: Sequence[int] = ()) -> bool:
            before = store.get_run("r1").revision
            of.commit("r1", given, samples(known))
            return store.get_run("r1").revision != before

        assert not revised(result(run, 0), result(run, 1, "timeout"), known=[0, 1])
        assert not revised(result(run, 0), result(run, 2), known=[0])  # Of sample 2, only the id.
        assert not revised(result(run, 0), result(run, 2), of=fresh, known=[0, 1])
        assert revised(result(run, 1))
        assert revised(known=[2])
        assert not revised(known=[2])
        before = store.get_run("r1").revision
        store.update_run("r1", status="finished", finished_at=5.0)
        assert store.get_run("r1").revision == before
        assert not revised(result(run, 0))
        assert revised(result(run, 3), known=[3])
        before = store.get_run("r1").revision
        store.update_run("r1", status="running")
        assert store.get_run("r1").revision != before

    def test_a_sample_comes_back_as_plain_json(self, store: RunStore) -> None:
        store.create_run(run_record())
        given: Sample[Any, Any] = Sample(
            "s0", ("a", {"b": b"bytes", "é": 1}), 10**30, {"k\0": [1, {"x": None}], "é": "ü"}
        )
        store.commit("r1", [], {0: given, 3: Sample("s3", None), 77: Sample("outside", 1)})
        found = store.sample("r1", 0)
        assert found == Sample("s0", ["a", {"b": b"bytes", "é": 1}], 10**30, {"k\0": [1, {"x": None}], "é": "ü"})
        assert store.sample("r1", 3) == Sample("s3", None)
        with pytest.raises(StoreError, match="no stored sample 77"):
            store.sample("r1", 77)

    def test_two_runs_over_the_same_samples_in_another_order_keep_their_own(self, store: RunStore) -> None:
        first, second = store.create_run(run_record("r1")), store.create_run(run_record("r2"))

        def reordered(ordinal: int) -> Any:
            made = result(second, ordinal)
            place = 9 - second.split(ordinal)[0]
            return replace(made, key=made.key._replace(sample_id=f"s{place}"))

        backwards = {place: sample(9 - place, topic="back") for place in range(10)}
        # The middle is shared ground that agrees with neither; the second run forks when it meets the first's.
        assert store.commit("r1", [result(first, n) for n in range(8)], samples([0, 1])) == (8, 0, (), ())
        assert store.commit("r2", [reordered(n) for n in range(32, 40)], {8: backwards[8], 9: backwards[9]}).new == 8
        assert store.commit("r2", [reordered(n) for n in range(8)], {0: backwards[0], 1: backwards[1]}).new == 8
        assert store.commit("r1", [result(first, n) for n in range(32, 40)], samples([8, 9])).new == 8
        assert store.commit("r2", [reordered(n) for n in range(8, 12)], {2: backwards[2]}).new == 4
        assert [found.sample_id for found in store.results("r1")] == [f"s{n}" for n in (0, 1, 8, 9) for _ in range(4)]
        assert [found.sample_id for found in store.results("r2")] == [
            f"s{n}" for n in (9, 8, 7, 1, 0) for _ in range(4)
        ]
        assert all(found.sample.id == found.sample_id for run in ("r1", "r2") for found in store.results(run))

    def test_a_run_whose_own_samples_change_their_order_is_told_so(self, store: RunStore, run: RunRecord) -> None:
        store.commit("r1", [result(run, 0)], samples([0]))
        odd = replace(result(run, 1), key=TrialKey("r1", "baseline", "s7", 1))
        committed = store.commit("r1", [odd], {0: sample(7)})
        assert committed[:2] == (0, 0)
        [(key, why)] = committed.refused
        assert key == odd.key
        assert "was 's0' before" in why
        assert store.commit("r1", [result(run, 2)]) == (1, 0, (), ())
        assert [found.sample_id for found in store.results("r1")] == ["s0", "s0"]


_NOT_PLANNED = ("ordinal", "negative ordinal", "experiment", "repeat", "run", "ordinal type")


class TestRefusal:
    def bad(self, run: Any, ordinal: int) -> dict[str, Any]:
        good = result(run, ordinal)
        return {
            "NUL": replace(good, output_json='"a\0b"'),
            "surrogate": replace(good, output_json='"\ud800"'),
            "snapshot": _spoiled(good, snapshot="text"),
            "latency": replace(good, latency_ms=2**31),
            "negative": replace(good, latency_ms=-1),
            "tokens": replace(good, usage=TokenUsage(2**70)),
            "execution": replace(good, execution=2**63),
            "judge cost": replace(good, judge_cost_usd=float("nan")),
            "cost": replace(good, usage=_free_of_checks(cost_usd=float("nan"))),
            "time": replace(good, started_at=float("inf")),
            "output": replace(good, output=object()),
            "no score": replace(good, score=None),
            "error with score": replace(good, outcome="timeout"),
            "outcome": _spoiled(good, outcome="whatever"),
            "ordinal": replace(good, ordinal=40),
            "negative ordinal": replace(good, ordinal=-1),
            "experiment": replace(good, key=good.key._replace(experiment="terse")),
            "repeat": replace(good, key=good.key._replace(repeat=5)),
            "run": replace(good, key=good.key._replace(run_id="r2")),
            "ordinal type": _spoiled(good, ordinal="5"),
        }

    def test_one_bad_row_never_sinks_its_batch(self, store: RunStore, run: RunRecord) -> None:
        bad = self.bad(run, 5)
        good = [result(run, ordinal) for ordinal in range(40) if ordinal != 5]
        for name, found in bad.items():
            fresh = store.create_run(run_record(f"run-{name}"))
            batch = [replace(each, key=each.key._replace(run_id=fresh.run_id)) for each in good]
            spoiled = _spoiled(found, key=found.key._replace(run_id="r2" if name == "run" else fresh.run_id))
            batch.insert(7, spoiled)
            committed = store.commit(fresh.run_id, batch, samples(range(10)))
            if name in _NOT_PLANNED:
                assert committed[:2] == (39, 0), name
                assert [key for key, _why in committed.refused] == [spoiled.key], name
                assert [each.ordinal for each in store.results(fresh.run_id)] == [n for n in range(40) if n != 5], name
                continue
            assert committed[:3] == (40, 0, ()), name
            ((key, why),) = committed.unstorable
            kept = list(store.results(fresh.run_id))
            assert [each.ordinal for each in kept] == list(range(40)), name
            assert [each.ordinal for each in kept if not each.success] == [5], name
            error = kept[5]
            assert (key, error.error) == (spoiled.key, f"the result could not be stored: {why}"), name
            assert (error.outcome, error.stage, error.output, error.score) == ("task_error", "store", None, None), name
            assert store.snapshot(fresh.run_id, 5) is None

    def test_several_bad_rows_among_duplicates_are_all_found(self, store: RunStore, run: RunRecord) -> None:
        store.commit("r1", [result(run, ordinal) for ordinal in range(10)], samples(range(3)))
        batch = [result(run, ordinal, execution=7) for ordinal in range(5, 25)]
        for place in (0, 9, 10, 19):
            batch[place] = replace(batch[place], output_json='"\udc00"')
        committed = store.commit("r1", batch, samples(range(7)))
        # The first is a duplicate before it is anything else.
        assert committed[:3] == (15, 5, ())
        assert {key for key, _ in committed.unstorable} >= {batch[place].key for place in (9, 10, 19)}
        assert list(store.ordinals("r1", ("task_error",))) == [14, 15, 24]

    def test_text_the_database_would_refuse_is_kept_where_people_read_it(self, store: RunStore, run: RunRecord) -> None:
        given = result(run, 0, "task_error", error="bad \0 and \ud800")
        assert store.commit("r1", [given], samples([0])) == (1, 0, (), ())
        [found] = store.results("r1")
        assert found.error == "bad \0 and \ud800"

    def test_a_sample_that_cannot_be_stored_takes_only_its_own_results_along(self, store: RunStore) -> None:
        run = store.create_run(run_record())
        given = {**samples([0, 2]), 1: Sample("s1", object())}
        committed = store.commit("r1", [result(run, ordinal) for ordinal in range(12)], given)
        assert committed[:3] == (12, 0, ())
        assert {key.sample_id for key, _ in committed.unstorable} == {"s1"}
        assert all("sample cannot be stored" in why for _, why in committed.unstorable)
        assert list(store.ordinals("r1", ("task_error",))) == [4, 5, 6, 7]

    def test_a_result_that_names_another_sample_than_its_batch_is_refused(self, store: RunStore) -> None:
        run = store.create_run(run_record())
        wrong = replace(result(run, 4), key=TrialKey("r1", "baseline", "s9", 0))
        committed = store.commit("r1", [wrong, result(run, 5)], samples([1]))
        assert committed[:2] == (1, 0)
        assert [key for key, _ in committed.refused] == [wrong.key]
