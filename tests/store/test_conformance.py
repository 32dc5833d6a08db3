"""The behaviour that all stores share."""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from fairtrial import Metric, Sample, Score, TokenUsage
from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.errors import RunBusyError, SessionError, StoreError, UnknownRunError
from fairtrial.store import Label, RunRecord, RunStore
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import ScoreRow
from fairtrial.store.records import preview_text
from fairtrial.store.sql import SqlStore
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult, Outcome
from tests.store.build import result, rich_result, run_record, sample, samples

pytestmark = pytest.mark.proves("R100")


def full_run(store: RunStore, *, size: int = 6) -> Any:
    run = store.create_run(run_record(size=size))
    store.commit(run.run_id, [result(run, ordinal) for ordinal in range(run.planned)], samples(range(size)))
    return run


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


class TestRuns:
    def test_a_run_comes_back_as_it_was_created(self, store: RunStore) -> None:
        run = run_record(
            params={"terse": {"style": "short", "n": [1, 2.5, None]}},
            config={"max_concurrent": 10, "odd \0 key": float("inf")},
            tags={"git": "abc"},
            evaluator="exact_match",
            code_hash="c0de",
            parent_run="r0",
            finished_at=1001.5,
            status="stopped",
            notes={"stopped": "enough evidence"},
            suite="a \0 suite",
        )
        kept = store.create_run(run)
        assert kept == replace(run, number=1)
        assert store.get_run("r1") == kept

    def test_runs_of_a_suite_are_numbered_from_one(self, store: RunStore) -> None:
        assert [store.create_run(run_record(f"r{n}")).number for n in (1, 2, 3)] == [1, 2, 3]
        assert store.create_run(run_record("other", suite="another")).number == 1
        assert store.create_run(run_record("copied", number=9)).number == 9
        assert store.create_run(run_record("next", number=2)).number == 10

    def test_a_run_is_refused_when_the_latest_of_its_suite_is_another_than_expected(self, store: RunStore) -> None:
        assert store.create_run(run_record(run_id="a"), latest=0).number == 1
        with pytest.raises(RunBusyError, match="was started at the same time"):
            store.create_run(run_record(run_id="b"), latest=0)
        assert store.create_run(run_record(run_id="b"), latest=1).number == 2

    def test_a_run_without_a_time_gets_the_present_one(self, store: RunStore) -> None:
        assert store.create_run(run_record(created_at=0.0)).created_at > 1_700_000_000

    def test_a_second_run_of_the_same_id_is_refused(self, store: RunStore) -> None:
        store.create_run(run_record())
        with pytest.raises(StoreError, match="already has a run r1"):
            store.create_run(run_record())

    @pytest.mark.parametrize(
        "changes",
        [{"run_id": ""}, {"experiments": ()}, {"experiments": ("a", "a")}, {"repeats": 0}, {"dataset_size": 2**32}],
    )
    def test_a_plan_that_cannot_be_stored_is_refused(self, store: RunStore, changes: dict[str, Any]) -> None:
        with pytest.raises(StoreError):
            store.create_run(run_record(**changes))
        assert store.runs() == []

    def test_runs_are_listed_newest_first_and_filtered(self, store: RunStore) -> None:
        store.create_run(run_record("r1"))
        store.create_run(run_record("r2", suite="other"))
        store.create_run(run_record("r3"))
        store.update_run("r1", status="finished")
        assert [run.run_id for run in store.runs()] == ["r3", "r2", "r1"]
        assert [run.run_id for run in store.runs(suite="support")] == ["r3", "r1"]
        assert [run.run_id for run in store.runs(status="finished")] == ["r1"]
        assert [run.run_id for run in store.runs(limit=1)] == ["r3"]

    def test_updating_a_run_merges_notes_and_keeps_the_rest(self, store: RunStore) -> None:
        store.create_run(run_record(notes={"a": 1, "b": "\0"}))
        store.update_run("r1", status="interrupted", finished_at=5.0, notes={"b": 2})
        store.update_run("r1", notes={"c": 3})
        store.update_run("r1")
        run = store.get_run("r1")
        assert (run.status, run.finished_at, run.notes) == ("interrupted", 5.0, {"a": 1, "b": 2, "c": 3})

    def test_a_run_that_goes_on_has_no_end(self, store: RunStore) -> None:
        store.create_run(run_record())
        store.update_run("r1", status="interrupted", finished_at=5.0)
        store.update_run("r1", status="running")
        assert store.get_run("r1").finished_at is None

    def test_an_unknown_run_is_an_error_everywhere(self, store: RunStore) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.get_run("nope"),
            lambda: store.update_run("nope", status="finished"),
            lambda: store.delete_run("nope"),
            lambda: store.commit("nope", []),
            lambda: store.done("nope"),
            lambda: store.ordinals("nope", ["scored"]),
            lambda: store.results("nope"),
            lambda: store.totals("nope"),
            lambda: store.metric_totals("nope"),
            lambda: store.group_totals("nope", "topic"),
            lambda: store.sample("nope", 0),
            lambda: store.samples("nope"),
            lambda: store.session("nope", 0),
            lambda: store.label(Label(TrialKey("nope", "baseline", "s0"), "good", True)),
            lambda: store.labels("nope"),
        ]
        for call in calls:
            with pytest.raises(UnknownRunError, match="nope"):
                call()

    def test_deleting_a_run_leaves_others_and_shared_samples_alone(self, store: RunStore) -> None:
        first, second = store.create_run(run_record("r1")), store.create_run(run_record("r2"))
        for run in (first, second):
            store.commit(run.run_id, [result(run, 0)], samples([0]))
            store.label(Label(result(run, 0).key, "good", True))
        store.delete_run("r1")
        assert [run.run_id for run in store.runs()] == ["r2"]
        assert [found.ordinal for found in store.results("r2")] == [0]
        assert store.sample("r2", 0).id == "s0"
        assert len(list(store.labels("r2"))) == 1
        with pytest.raises(UnknownRunError):
            store.commit("r1", [result(first, 0)])

    def test_a_run_made_again_after_deletion_starts_empty(self, store: RunStore) -> None:
        run = full_run(store)
        store.delete_run("r1")
        store.create_run(run_record(size=6))
        assert list(store.results("r1")) == []
        assert list(store.samples("r1")) == []
        assert store.commit("r1", [result(run, 0)], samples([0])) == (1, 0, (), ())
        assert store.sample("r1", 0).id == "s0"

    def test_a_closed_store_says_so(self, store: RunStore) -> None:
        full_run(store)
        store.close()
        for call in (store.runs, lambda: store.get_run("r1"), lambda: store.put_blob(b"x"), lambda: store.totals("r1")):
            with pytest.raises(StoreError, match="closed"):
                call()
        with pytest.raises(StoreError, match="closed"):
            store.create_run(run_record("r9"))


class TestResults:
    def test_a_result_comes_back_with_everything(self, store: RunStore, run: RunRecord) -> None:
        given = rich_result(run, 5)
        assert store.commit("r1", [given], samples([1])) == (1, 0, (), ())
        [found] = store.results("r1")
        assert found == given
        assert found.score is not None
        assert found.score.reward == given.score.reward  # type: ignore[union-attr]  # a rich result has a score
        assert [metric.weight for metric in found.score.metrics] == [2.0, 0.0, 0.5, 0.0]
        assert [metric.passed for metric in found.score.metrics] == [None, False, True, None]
        assert found.sample == samples([1])[1]
        assert found.session[TokenUsage].all() == (TokenUsage(3, 2),)
        assert found.session.tags == {"run": "r1"}
        assert found.trajectory.messages == ()

    @pytest.mark.parametrize("outcome", ["scored", "task_error", "scorer_error", "timeout", "dead_letter", "not_run"])
    def test_every_outcome_comes_back(self, store: RunStore, outcome: Outcome, run: RunRecord) -> None:
        given = result(run, 3, outcome)
        store.commit("r1", [given], samples([0]))
        assert list(store.results("r1")) == [given]

    def test_a_result_with_nothing_to_tell_comes_back(self, store: RunStore, run: RunRecord) -> None:
        given = result(run, 0, "not_run", error=None, stage=None, usage=TokenUsage())
        store.commit("r1", [given], samples([0]))
        [found] = store.results("r1", snapshots=True)
        assert found == given
        assert found.snapshot is None
        assert store.snapshot("r1", 0) is None
        assert store.session("r1", 0)[TokenUsage].all() == ()

    def test_a_result_keeps_what_was_redacted_in_it_before(self, store: RunStore, run: RunRecord) -> None:
        store.commit("r1", [result(run, 0, redacted_parts=("transcript", "metadata"))], samples([0]))
        store.commit("r1", [result(run, 1)])
        assert [found.redacted_parts for found in store.results("r1")] == [("transcript", "metadata"), ()]

    def test_an_encoded_output_is_what_is_stored(self, store: RunStore, run: RunRecord) -> None:
        store.commit("r1", [result(run, 0, output=object(), output_json='{"n":[1,2]}')], samples([0]))
        [found] = store.results("r1")
        assert found.output == {"n": [1, 2]}
        assert found.output_json == '{"n":[1,2]}'

    def test_results_come_in_plan_order_whatever_order_they_were_committed_in(self, store: RunStore) -> None:
        run = store.create_run(run_record())
        for ordinals in ([30, 2, 17], [39, 0], [1]):
            store.commit("r1", [result(run, ordinal) for ordinal in ordinals], samples(range(10)))
        assert [found.ordinal for found in store.results("r1")] == [0, 1, 2, 17, 30, 39]

    def test_results_can_be_filtered_and_paged(self, store: RunStore) -> None:
        run = store.create_run(run_record(size=6))
        given = [
            result(run, ordinal, "timeout" if ordinal % 5 == 0 else "scored", score=None)
            if ordinal % 5 == 0
            else result(run, ordinal, score=Score(ordinal / 24))
            for ordinal in range(24)
        ]
        store.commit("r1", given, samples(range(6)))

        def ordinals(**filters: Any) -> list[int]:
            return [found.ordinal for found in store.results("r1", **filters)]

        assert ordinals(experiment="terse") == [n for n in range(24) if n % 4 in (2, 3)]
        assert ordinals(outcomes=["timeout"]) == [0, 5, 10, 15, 20]
        assert ordinals(outcomes=["timeout", "scored"]) == list(range(24))
        assert ordinals(outcomes=[]) == []
        assert ordinals(passed=True) == [n for n in range(12, 24) if n % 5]
        assert ordinals(passed=False) == [n for n in range(12) if n % 5]
        assert ordinals(sample_ids=["s5", "s1", "unknown"]) == [4, 5, 6, 7, 20, 21, 22, 23]
        assert ordinals(sample_ids=["s5", "s1"], experiment="baseline", after=4, limit=2) == [5, 20]
        assert ordinals(sample_ids=[]) == []
        assert ordinals(ordinals=[7, 3, 20, 99]) == [3, 7, 20]
        assert ordinals(ordinals=[7, 3, 20], outcomes=["scored"], after=3) == [7]
        assert ordinals(ordinals=[]) == []
        assert ordinals(after=20) == [21, 22, 23]
        assert ordinals(after=3, limit=4) == [4, 5, 6, 7]
        assert ordinals(limit=0) == []
        assert ordinals(experiment="terse", outcomes=["scored"], passed=True, after=14, limit=1) == [18]
        with pytest.raises(StoreError, match="no experiment 'nope'; it has baseline, terse"):
            store.results("r1", experiment="nope")

    def test_many_results_are_streamed_across_pages(self, store: RunStore) -> None:
        run = store.create_run(run_record(size=200))
        store.commit("r1", [result(run, ordinal) for ordinal in range(800)], samples(range(200)))
        assert [found.ordinal for found in store.results("r1")] == list(range(800))
        assert [found.ordinal for found in store.results("r1", limit=512)] == list(range(512))
        ids = [f"s{place}" for place in range(0, 200, 2)]
        assert len(list(store.results("r1", sample_ids=ids))) == 400
        assert len(list(store.results("r1", sample_ids=ids, limit=300))) == 300

    def test_outputs_and_snapshots_are_brought_only_if_asked_for(self, store: RunStore, run: RunRecord) -> None:
        given = rich_result(run, 0)
        store.commit("r1", [given], samples([0]))
        [plain] = store.results("r1")
        assert (plain.output, plain.snapshot) == (given.output, None)
        [bare] = store.results("r1", outputs=False)
        assert (bare.output, bare.output_json, bare.score) == (None, None, given.score)
        [whole] = store.results("r1", snapshots=True)
        assert (whole.output, whole.snapshot) == (given.output, given.snapshot)
        [session_only] = store.results("r1", outputs=False, snapshots=True)
        assert (session_only.output, session_only.snapshot) == (None, given.snapshot)

    def test_previews_have_numbers_and_cut_texts_in_the_order_that_was_asked_for(self, store: RunStore) -> None:
        run = store.create_run(run_record())
        long = 'say "é"\n' * 100
        given = [
            result(run, 0, output=long, score=Score(0.5, reason="r" * 400)),
            result(run, 1, "task_error", attempt=3),
            result(run, 2, output={"text": "é" * 400}),
        ]
        store.commit("r1", given, {0: Sample("s0", "in \0 \ud800", {"a": 1}, {"topic": "even", "level": 3})})
        third, error, first = store.previews("r1", [2, 1, 0, 99], size=50)
        assert (first.ordinal, first.sample_id, first.outcome, first.passed) == (0, "s0", "scored", True)
        assert (first.value, first.latency_ms, first.tokens, first.cost_usd) == (0.5, 100, 15, 0.25)
        assert (first.output, first.note) == (long[:50], "r" * 50)
        assert first.input == "in \0 \ud800"
        assert (first.expected, first.metadata) == ('{"a":1}', {"topic": "even", "level": 3})
        assert (error.outcome, error.attempt, error.output, error.note) == ("task_error", 3, "", "ValueError: no")
        assert (error.passed, error.value) == (None, None)
        assert third.output == '{"text":"' + "é" * 41

    def test_long_metadata_is_left_out_of_previews(self, store: RunStore, run: RunRecord) -> None:
        long: Sample[int, None] = Sample("s0", 1, None, {"x": "y" * 5000})
        store.commit("r1", [result(run, 0), result(run, 4)], {0: long, 1: sample(1)})
        assert [preview.metadata for preview in store.previews("r1", [0, 4])] == [None, {}]

    def test_a_text_that_is_cut_within_an_escape_is_still_read(self) -> None:
        whole = json.dumps("ab\n\U0001f600" * 3)
        for end in range(2, len(whole)):
            assert "ab\n\U0001f600".startswith(preview_text(whole[:end], 4)), end
        assert preview_text(whole, 4) == "ab\n\U0001f600"

    def test_a_text_that_is_no_json_is_shown_as_it_is(self) -> None:
        assert preview_text('"a\\q and more of the text', 9) == "a\\q and m"

    def test_a_result_that_is_not_there_is_an_error(self, store: RunStore) -> None:
        store.create_run(run_record())
        with pytest.raises(StoreError, match="no stored result 7"):
            store.snapshot("r1", 7)

    def test_a_damaged_snapshot_is_an_error_only_when_it_is_read(self, store: RunStore, run: RunRecord) -> None:
        store.commit("r1", [result(run, 0, snapshot=b"\x28\xb5\x2f\xfd not a frame"), result(run, 1)], samples([0]))
        assert store.snapshot("r1", 0) == b"\x28\xb5\x2f\xfd not a frame"
        with pytest.raises(SessionError):
            store.session("r1", 0)

    def test_weird_sample_ids_come_back_and_can_be_asked_for(self, store: RunStore, run: RunRecord) -> None:
        odd = "id \0 \ud800 '\" é"
        given = replace(result(run, 0), key=TrialKey("r1", "baseline", odd, 0))
        assert store.commit("r1", [given], {0: Sample(odd, 1)}) == (1, 0, (), ())
        [found] = store.results("r1", sample_ids=[odd])
        assert found.sample_id == odd
        assert found.sample.id == odd
        assert store.totals("r1")[0].slowest == odd

    def test_results_name_the_samples_of_their_own_dataset_at_their_own_place(self, store: RunStore) -> None:
        for run_id, prefix in (("r1", "s"), ("r2", "other")):
            run = store.create_run(run_record(run_id, dataset_name=run_id, dataset_fingerprint=run_id * 16))
            ids = [f"{prefix}{place}" for place in range(3)]
            given = [
                replace(result(run, 4 * place), key=TrialKey(run_id, "baseline", name, 0))
                for place, name in enumerate(ids)
            ]
            store.commit(run_id, given, {place: Sample(name, place) for place, name in enumerate(ids)})
        for run_id, prefix in (("r1", "s"), ("r2", "other")):
            found = list(store.results(run_id))
            assert [one.sample_id for one in found] == [f"{prefix}{place}" for place in range(3)]
            assert [one.sample_id for one in store.previews(run_id, [0, 4, 8])] == [one.sample_id for one in found]
            assert [one.sample.input for one in found] == [0, 1, 2]


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


class TestProgress:
    @pytest.mark.proves("R108")
    def test_done_is_a_bitmap_of_what_need_not_run_again(self, store: RunStore, run: RunRecord) -> None:
        outcomes: dict[int, Outcome] = {0: "scored", 7: "task_error", 8: "not_run", 39: "timeout"}
        store.commit("r1", [result(run, n, outcome) for n, outcome in outcomes.items()], samples(range(10)))
        bits = store.done("r1")
        assert len(bits) == 5
        assert [n for n in range(40) if bits[n // 8] >> (n % 8) & 1] == [0, 7, 39]

    @pytest.mark.parametrize(("size", "bits"), [(4, b"\xff\xff"), (9, b"\xff\xff\xff\xff\x0f")])
    def test_done_of_a_complete_run_is_full(self, store: RunStore, size: int, bits: bytes) -> None:
        full_run(store, size=size)
        assert store.done("r1") == bytearray(bits)

    def test_done_of_an_empty_plan_is_empty(self, store: RunStore) -> None:
        store.create_run(run_record(size=0))
        assert store.done("r1") == bytearray()

    def test_code_versions_are_those_of_executed_trials(self, store: RunStore, run: RunRecord) -> None:
        assert list(store.codes("r1")) == []
        batch = [result(run, 0, code=3), result(run, 1, "timeout"), result(run, 2, "not_run", code=5)]
        store.commit("r1", [*batch, result(run, 3, code=3)], samples([0]))
        assert list(store.codes("r1")) == [0, 3]

    def test_inputs_that_occur_more_than_once_are_found(self, store: RunStore) -> None:
        store.create_run(run_record())
        inputs = ["a", "b", "a", "c", "", "", "d", "b", "a"]
        store.commit("r1", (), {place: Sample(f"s{place}", given) for place, given in enumerate(inputs[:2])})
        assert list(store.repeated_inputs("r1")) == []
        store.commit("r1", (), {place: Sample(f"s{place}", given) for place, given in enumerate(inputs)})
        found = dict(store.repeated_inputs("r1"))
        assert list(found) == [0, 1, 2, 7, 8]  # An input without content is like no other.
        assert found[0] == found[2] == found[8] != found[1] == found[7]

    def test_ordinals_by_outcome_ascend(self, store: RunStore, run: RunRecord) -> None:
        given: list[tuple[int, Outcome]] = [(9, "timeout"), (1, "scorer_error"), (4, "scored"), (0, "timeout")]
        store.commit("r1", [result(run, n, outcome) for n, outcome in given], samples(range(10)))
        assert list(store.ordinals("r1", ["timeout", "scorer_error"])) == [0, 1, 9]
        assert list(store.ordinals("r1", [])) == []


class TestTotals:
    def test_totals_are_sums_per_experiment(self, store: RunStore) -> None:
        run = store.create_run(run_record(size=3))
        batch = [
            result(run, 0, score=Score(0.25), latency_ms=10, usage=TokenUsage(1, 2, 1, 0.5, 2, 1), judge_cost_usd=0.5),
            result(run, 1, score=Score(1.0), latency_ms=90, usage=TokenUsage(1, 2, 0, None, 1), unpriced_calls=2),
            result(run, 4, "timeout", latency_ms=300, usage=TokenUsage(7, 0, 0, None)),
            result(run, 5, score=Score(0.5), latency_ms=999, metadata={"warmup": True}),
            result(run, 8, "not_run", latency_ms=5000, usage=TokenUsage()),
            result(
                run,
                9,
                score=Score(0.5),
                latency_ms=300,
                usage=TokenUsage(),
                cache_hits=3,
                unpriced_judge_calls=1,
                cut_off_calls=4,
            ),
        ]
        store.commit("r1", batch, samples(range(3)))
        baseline, terse = store.totals("r1")
        assert (terse.experiment, terse.outcomes, terse.slowest, terse.cost_usd) == ("terse", {}, None, None)
        assert (terse.value_min, terse.latency_max, terse.timed) == (None, 0, 0)
        assert baseline.outcomes == {"scored": 4, "timeout": 1, "not_run": 1}
        assert (baseline.passed, baseline.value_sum, baseline.value_squares) == (3, 2.25, 1.5625)
        assert (baseline.value_min, baseline.value_max) == (0.25, 1.0)
        assert (baseline.timed, baseline.latency_sum, baseline.latency_max) == (4, 700, 300)
        assert baseline.slowest == "s1"
        assert (baseline.input_tokens, baseline.output_tokens, baseline.cached_tokens) == (19, 9, 2)
        assert (baseline.cost_usd, baseline.judge_cost_usd, baseline.total_cost_usd) == (0.75, 0.5, 1.25)
        assert (terse.judge_cost_usd, terse.total_cost_usd, terse.cache_hits) == (None, 0.0, 0)
        assert (baseline.cache_hits, baseline.unpriced_calls, baseline.unpriced_judge_calls) == (3, 2, 1)
        assert (baseline.cut_off_calls, baseline.reasoning_tokens, baseline.cache_write_tokens) == (4, 3, 1)

    def test_totals_of_many_experiments_agree_with_the_results(self, store: RunStore) -> None:
        names = tuple(f"e{n}" for n in range(9))
        run = store.create_run(run_record(size=4, experiments=names, repeats=1))
        batch = [
            result(run, n, "task_error", latency_ms=n) if n % 4 == 3 else result(run, n, latency_ms=n, attempt=1)
            for n in range(run.planned)
        ]
        store.commit("r1", batch, samples(range(4)))
        for found in store.totals("r1"):
            ours = [each for each in batch if each.experiment == found.experiment]
            assert found.outcomes.get("scored", 0) == sum(each.success for each in ours)
            assert found.latency_sum == sum(each.latency_ms for each in ours)
            assert found.slowest == max(ours, key=lambda each: each.latency_ms).sample_id

    def test_the_largest_numbers_add_up(self, store: RunStore) -> None:
        run = store.create_run(run_record(size=2**29))
        most = 2**31 - 1
        last = run.planned - 1
        batch = [
            result(run, n, latency_ms=most, usage=TokenUsage(most, most, most), attempt=most) for n in (0, 1, last - 3)
        ]
        assert store.commit("r1", batch).new == 3
        baseline, _terse = store.totals("r1")
        assert (baseline.latency_sum, baseline.latency_max, baseline.input_tokens) == (3 * most, most, 3 * most)
        assert baseline.slowest == "s0"

    @pytest.mark.proves("R134")
    def test_totals_and_groups_add_up_rewards_beyond_0_to_1(self, store: RunStore) -> None:
        run = store.create_run(run_record(repeats=1))
        rewards = {0: -5.0, 1: 0.25, 2: None, 3: 0.5, 4: 7.0, 6: None}
        batch = [
            result(run, ordinal, score=Score(0.75, metrics=() if own is None else [Metric("m", own, 1.0)]))
            for ordinal, own in rewards.items()
        ]
        store.commit("r1", [*batch, result(run, 8, "timeout")], samples(range(5)))
        baseline, terse = store.totals("r1")
        assert (baseline.reward_sum, baseline.reward_min, baseline.reward_max) == (3.5, -5.0, 7.0)
        assert (baseline.reward_squares, baseline.value_sum) == (25 + 2 * 0.75**2 + 49, 3.0)
        assert (terse.reward_sum, terse.reward_min, terse.reward_max) == (0.75, 0.25, 0.5)
        groups = {(value, one.experiment): one for value, one in store.group_totals("r1", "topic")}
        even, odd = groups["even", "baseline"], groups["odd", "baseline"]
        assert (even.reward_sum, even.reward_min, even.reward_max) == (2.0, -5.0, 7.0)
        assert (odd.reward_sum, odd.reward_squares) == (1.5, 2 * 0.75**2)

    def test_samples_with_fewer_scored_repeats_count_once_also_in_groups(self, store: RunStore) -> None:
        run = store.create_run(run_record(size=2, experiments=("baseline",)))
        outcomes: list[Outcome] = ["scored", "scored", "timeout", "scored"]
        values = [Score(1.0), Score(0.0), None, Score(1.0)]
        given = {place: sample(place, topic="one") for place in range(2)}
        store.commit(
            "r1", [result(run, n, o, score=v) for n, o, v in zip(range(4), outcomes, values, strict=True)], given
        )
        (whole,) = store.totals("r1")
        ((_, group),) = store.group_totals("r1", "topic")
        for means in (whole.sample_means, group.sample_means):
            assert means is not None
            assert (means.pass_rate, means.mean_score, means.pass_rate_all) == (0.75, 0.75, 0.5)

    @pytest.mark.parametrize("repeats", [1, 2])
    def test_means_of_a_run_that_stopped_are_of_the_samples_on_which_it_decided(
        self, store: RunStore, repeats: int
    ) -> None:
        note = {
            "stopped": True, "reason": "enough", "rule": {"narrower_than": 0.1}, "samples": 2, "planned": 4,
            "beyond": 2, "experiments": {}, "pair": None,
        }  # fmt: skip
        made = run_record(size=4, experiments=("baseline",), repeats=repeats, notes={"adaptive": note})
        run = store.create_run(made)
        values = [1.0, 0.0, 1.0, 1.0]
        batch = [result(run, place * repeats, score=Score(value)) for place, value in enumerate(values)]
        topics = ["a", "b", "b", "c"]
        store.commit("r1", batch, {place: sample(place, topic=topic) for place, topic in enumerate(topics)})
        (whole,) = store.totals("r1")
        assert (whole.outcomes["scored"], whole.passed) == (4, 3)
        means = {topic: one.sample_means for topic, one in store.group_totals("r1", "topic")} | {"": whole.sample_means}
        rates = {topic: None if one is None else one.pass_rate for topic, one in means.items()}
        assert rates == {"a": 1.0, "b": 0.0, "c": None, "": 0.5}

    def test_metric_means_are_over_scored_trials(self, store: RunStore, run: RunRecord) -> None:
        batch = [
            result(run, 0, score=Score(1.0, metrics=[Metric("f1", 0.5), Metric("odd \0", 2.0)])),
            result(run, 1, score=Score(1.0, metrics=[Metric("f1", 1.0, passed=True)])),
            result(run, 2, score=Score(0.0, metrics=[Metric("f1", 0.0, passed=False)])),
            result(run, 3, "timeout"),
            result(run, 4),
        ]
        store.commit("r1", batch, samples(range(2)))
        assert store.metric_totals("r1") == {
            "baseline": {"f1": (2, 0.75, 1, 1), "odd \0": (1, 2.0, 0, 0)},
            "terse": {"f1": (1, 0.0, 1, 0)},
        }

    @pytest.mark.parametrize(
        "key", ["topic", 'quo"te', "back\\slash", "", "new\nline", "$.topic", "dot.ted[0]", "é", "n\0"]
    )
    def test_group_totals_split_by_a_metadata_key(self, store: RunStore, key: str) -> None:
        values: list[Any] = ["a", 1, True, None, [1, {"x": "é"}], "a", 1.0, float("nan")]
        run = store.create_run(run_record(size=9, repeats=1))
        given: dict[int, Sample[Any, Any]] = {
            place: Sample(f"s{place}", place, None, {"other": 0, key: value}) for place, value in enumerate(values)
        }
        given[8] = Sample("s8", 8)
        store.commit("r1", [result(run, n, "timeout" if n == 1 else "scored") for n in range(18)], given)
        groups = [(found, totals) for found, totals in store.group_totals("r1", key) if totals.experiment == "baseline"]
        counted = {repr(found): sum(totals.outcomes.values()) for found, totals in groups}
        assert counted == {
            "'a'": 2, "1": 1, "True": 1, "None": 2, "[1, {'x': 'é'}]": 1, "1.0": 1, "nan": 1,
        }  # fmt: skip
        slowest = {repr(found): totals.slowest for found, totals in groups}
        assert (slowest["'a'"], slowest["None"]) == ("s5", "s8")
        assert [totals.experiment for _, totals in store.group_totals("r1", key)] == ["baseline"] * 7 + ["terse"] * 7

    @pytest.mark.parametrize(
        "text",
        ["k'; DROP TABLE runs; --", 'k") || (select 1) --', "$.a", "a.b", '"', "\\", "%s", ":name", "x' OR '1'='1"],
    )
    def test_text_that_looks_like_sql_or_a_path_is_data_everywhere(self, store: RunStore, text: str) -> None:
        run = store.create_run(run_record(size=2, suite=text, experiments=(text,), repeats=1, dataset_name=text))
        given: dict[int, Sample[Any, Any]] = {n: Sample(f"{text}{n}", text, text, {text: n}) for n in range(2)}
        results = [replace(result(run, n), key=TrialKey("r1", text, f"{text}{n}", 0)) for n in range(2)]
        assert store.commit("r1", results, given)[:3] == (2, 0, ())
        assert [found for found, _ in store.group_totals("r1", text)] == [0, 1]
        assert [found for found, _ in store.group_totals("r1", f"{text}x")] == [None]
        assert [found.sample_id for found in store.results("r1", sample_ids=[f"{text}1"])] == [f"{text}1"]
        assert [found.run_id for found in store.runs(suite=text)] == ["r1"]

    def test_a_key_no_sample_has_is_one_group(self, store: RunStore) -> None:
        full_run(store)
        assert [(found, sum(t.outcomes.values())) for found, t in store.group_totals("r1", "nope")] == [
            (None, 12),
            (None, 12),
        ]


class TestBlobsAndLabels:
    @pytest.mark.parametrize(
        "data", [b"", b"\0\xff" * 10, b"text " * 1000, b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd" * 99]
    )
    def test_a_blob_is_kept_once_under_its_hash(self, store: RunStore, data: bytes) -> None:
        name = store.put_blob(data)
        assert name == store.put_blob(data) == hashlib.sha256(data).hexdigest()
        assert store.get_blob(name) == data

    def test_a_missing_blob_is_an_error(self, store: RunStore) -> None:
        with pytest.raises(StoreError, match="no blob 00"):
            store.get_blob("00" * 32)

    def test_labels_are_only_ever_added(self, store: RunStore) -> None:
        run = full_run(store)
        key = result(run, 0).key
        given = [
            Label(key, "good", True, "ann", 5.0),
            Label(key, "good", False, "bob \0", 4.0),
            Label(key, "comment \0", {"text": "x\0", "n": [1]}, "ann", 6.0),
        ]
        for label in given:
            store.label(label)
        assert list(store.labels("r1")) == given
        assert list(store.labels("r1", name="good")) == given[:2]
        assert list(store.labels("r1", name="comment \0")) == given[2:]

    def test_a_label_without_a_time_gets_the_present_one(self, store: RunStore) -> None:
        run = full_run(store)
        store.label(Label(result(run, 0).key, "good", True))
        [label] = store.labels("r1")
        assert label.at > 1_700_000_000

    def test_a_label_for_an_unknown_experiment_is_an_error(self, store: RunStore) -> None:
        full_run(store)
        with pytest.raises(StoreError, match="no experiment 'nope'"):
            store.label(Label(TrialKey("r1", "nope", "s0"), "good", True))


def test_results_can_be_read_while_others_are_committed(store: RunStore) -> None:
    run = store.create_run(run_record(size=300))
    for start in range(0, 1200, 300):
        store.commit(
            "r1", [result(run, n) for n in range(start, start + 300)], samples(range(start // 4, start // 4 + 75))
        )
        reading = store.results("r1")
        first = next(reading)
        assert first.ordinal == 0
        assert len(list(reading)) == start + 299


class TestNumbers:
    def test_the_numbers_of_an_experiment_come_without_its_words(self, store: RunStore) -> None:
        run = store.create_run(run_record(size=3, repeats=1))
        rows = [result(run, 0), rich_result(run, 2), result(run, 4, "timeout", metadata={"warmup": True})]
        store.commit(run.run_id, rows, samples(range(3)))
        first, second, third = store.scores(run.run_id, experiment="baseline")
        assert first == ScoreRow(0, "scored", True, 0.75, 100, 15, 0.25, {}, 0.75, None)
        assert (second.ordinal, second.passed, second.value) == (2, False, 0.5)
        assert list(second.metrics.items()) == [
            ("accuracy", 0.5), ("f1 \0", 0.25), ("polite", 1.0), ("speed", 12.0),
        ]  # fmt: skip
        assert (second.reward, second.verdicts) == (0.6, "-01- -1")
        assert (third.outcome, third.passed, third.value, third.latency_ms) == ("timeout", None, None, None)
        assert (third.reward, third.verdicts) == (None, None)
        assert list(store.scores(run.run_id, experiment="terse")) == []
        with pytest.raises(StoreError, match="no experiment 'fast'"):
            store.scores(run.run_id, experiment="fast")

    def test_facts_about_samples_come_without_their_inputs(self, store: RunStore) -> None:
        run = store.create_run(run_record(size=4))
        known = {0: sample(0, topic="a", level=[1, 2]), 1: sample(1), 3: sample(3, other={"topic": 1})}
        store.commit(run.run_id, [result(run, run.ordinal(2, 0, 0))], known)
        assert list(store.sample_facts(run.run_id, ["topic", "level"])) == [
            (0, "s0", ("a", [1, 2])),
            (1, "s1", (None, None)),
            (2, "s2", (None, None)),
            (3, "s3", (None, None)),
        ]
        assert [facts for _, _, facts in store.sample_facts(run.run_id)] == [()] * 4

    def test_hashes_of_samples_tell_what_they_ask_and_expect(self, store: RunStore) -> None:
        asked: list[tuple[Any, ...]] = [({"a": 1, "b": "é"}, {"x": 1, "y": 2}), ({"b": "é", "a": 1}, {"y": 2, "x": 1})]
        asked += [("q", "1"), ("q", 1), ("q",), ("q", None), ("",), ([],), (None,), (None, "1")]
        run = store.create_run(run_record(size=11))
        known = {at: Sample(f"s{at}", *given) for at, given in enumerate(asked)}
        store.commit(run.run_id, [result(run, run.ordinal(10, 0, 0))], known)
        found = list(store.sample_hashes(run.run_id))
        assert [at for at, _, _ in found] == list(range(11))
        inputs, expected = [one for _, one, _ in found], [one for _, _, one in found]
        assert inputs[0] == inputs[1] != inputs[2] == inputs[5]
        assert len({*inputs[5:8], UNKNOWN}) == 4  # "q", empty text, an empty list.
        assert inputs[8:] == [UNKNOWN] * 3
        assert expected[0] == expected[1]
        assert len(set(expected[2:6])) == 4  # Text, a number, none at all, None.
        assert expected[6] == expected[7] == expected[4]
        assert (expected[8], expected[9], expected[10]) == (UNKNOWN, expected[2], UNKNOWN)


class TestOwnership:
    """One process at a time owns a run; the epoch fences off those before it."""

    def test_the_first_to_swap_owns_a_run(self, store: RunStore) -> None:
        run_id = store.create_run(run_record()).run_id
        seen = store.run_owner(run_id)
        assert (seen.owner, seen.epoch, seen.heartbeat_at) == (None, 0, None)
        assert store.acquire_run(run_id, "first", seen) == 1
        assert store.acquire_run(run_id, "second", seen) is None
        owned = store.run_owner(run_id)
        assert (owned.owner, owned.epoch) == ("first", 1)
        assert owned.heartbeat_at is not None
        assert owned.age_seconds is None or 0 <= owned.age_seconds < 60

    def test_a_heartbeat_defeats_a_takeover_that_was_decided_before_it(self, store: RunStore) -> None:
        run_id = store.create_run(run_record()).run_id
        epoch = store.acquire_run(run_id, "first", store.run_owner(run_id))
        assert epoch is not None
        seen = store.run_owner(run_id)
        time.sleep(0.01)
        store.renew_run(run_id, epoch)
        assert store.run_owner(run_id).heartbeat_at != seen.heartbeat_at
        assert store.acquire_run(run_id, "second", seen) is None

    def test_an_owner_that_was_taken_over_can_store_and_change_nothing(self, store: RunStore, run: RunRecord) -> None:
        old = store.acquire_run(run.run_id, "first", store.run_owner(run.run_id))
        assert store.commit(run.run_id, [result(run, 0)], samples([0]), epoch=old).new == 1
        new = store.acquire_run(run.run_id, "second", store.run_owner(run.run_id))
        assert (old, new) == (1, 2)
        with pytest.raises(RunBusyError, match="run r1 was taken over"):
            store.commit(run.run_id, [result(run, 1)], samples([0]), epoch=old)
        with pytest.raises(RunBusyError):
            store.update_run(run.run_id, status="finished", epoch=old)
        with pytest.raises(RunBusyError):
            store.renew_run(run.run_id, 1)
        store.release_run(run.run_id, 1)
        assert store.run_owner(run.run_id).owner == "second"
        assert store.get_run(run.run_id).status == "running"
        assert list(store.ordinals(run.run_id, ("scored",))) == [0]
        assert store.commit(run.run_id, [result(run, 1)], samples([0]), epoch=new).new == 1

    def test_a_released_run_has_no_owner_and_keeps_its_epoch(self, store: RunStore) -> None:
        run_id = store.create_run(run_record()).run_id
        epoch = store.acquire_run(run_id, "first", store.run_owner(run_id))
        assert epoch is not None
        store.release_run(run_id, epoch)
        seen = store.run_owner(run_id)
        assert (seen.owner, seen.epoch, seen.heartbeat_at) == (None, 1, None)
        assert store.acquire_run(run_id, "second", seen) == 2

    def test_ownership_of_an_unknown_run_is_an_error(self, store: RunStore) -> None:
        with pytest.raises(UnknownRunError):
            store.run_owner("nothing")


def test_every_store_has_the_defaults_of_the_protocol() -> None:
    methods = [(name, one) for name, one in inspect.getmembers(RunStore, inspect.isfunction) if name[0] != "_"]
    assert len(methods) >= 30
    for name, method in methods:
        wanted = {one.name: one.default for one in inspect.signature(method).parameters.values()}
        for kind in (SqlStore, MemoryStore):
            own = inspect.signature(getattr(kind, name)).parameters.values()
            assert {one.name: one.default for one in own} == wanted, f"{kind.__name__}.{name}"
