"""The behaviour that all stores share: totals, numbers, labels and ownership."""

from __future__ import annotations

import hashlib
import inspect
import time
from dataclasses import replace
from typing import Any

import pytest

from fairtrial import Label, Metric, Outcome, Sample, Score, TokenUsage, TrialKey
from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.errors import RunBusyError, StoreError, UnknownRunError
from fairtrial.store import RunRecord, RunStore
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import ScoreRow
from fairtrial.store.sql import SqlStore
from tests.store.build import full_run, result, rich_result, run_record, sample, samples

pytestmark = pytest.mark.proves("R100")


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

    def test_totals_of_an_ended_run_change_with_its_results(self, store: RunStore) -> None:
        run = store.create_run(run_record(size=3))
        store.commit("r1", [result(run, 0, score=Score(1.0)), result(run, 1, "timeout")], samples(range(3)))
        store.update_run("r1", status="finished", finished_at=5.0)
        assert store.totals("r1")[0].outcomes == {"scored": 1, "timeout": 1}
        assert store.totals("r1") == store.totals("r1")
        store.commit("r1", [result(run, 1, score=Score(0.5), attempt=2)])
        assert store.totals("r1")[0].outcomes == {"scored": 2}
        assert store.totals("r1")[0].value_sum == 1.5

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
