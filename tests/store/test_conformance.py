"""The behaviour that all stores share: runs and results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fairtrial import Label, Outcome, Sample, Score, TokenUsage, TrialKey
from fairtrial.errors import RunBusyError, SessionError, StoreError, UnknownRunError
from fairtrial.store import RunRecord, RunStore
from fairtrial.store.records import preview_text
from tests.store.build import full_run, result, rich_result, run_record, sample, samples, without_place

pytestmark = pytest.mark.proves("R100")


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
        assert without_place(kept) == replace(run, number=1)
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
        assert (run.status, run.finished_at) == ("interrupted", 5.0)
        assert without_place(run).notes == {"a": 1, "b": 2, "c": 3}

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
