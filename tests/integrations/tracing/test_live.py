"""`fairtrial watch start`: live traces over HTTP as trials of daily runs, through crashes, budgets and bad input."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalReport, EvalSuite, Score, llm_judge, open_store
from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import ConfigurationError, StoreUnavailableError
from fairtrial.integrations.tracing.importing import recorded_trial
from fairtrial.integrations.tracing.live import LiveWatch, lowered
from fairtrial.integrations.tracing.live_traces import LiveReceiver, LiveTraces, Sampling, Stratum, position
from fairtrial.integrations.tracing.received import ReceivedSpan, parse_traces
from fairtrial.models import ScriptedAdapter
from fairtrial.reports.watch.alarm import watch_alarm
from fairtrial.store.notes import SAMPLING_STRATUM, SAMPLING_WEIGHT, write_notes
from fairtrial.store.protocol import RunStatus
from fairtrial.store.sql import SqlStore
from fairtrial.trials import EvalConfig
from tests.integrations.tracing.live_traffic import LONG, send, span, trace_id, until, watching
from tests.store import build

DAY = 86_400.0
NOON = 1_794_571_200.0  # 2026-11-13 12:00 UTC
SETTLE = 0.2


def recorded(question: object) -> str:
    raise NotImplementedError


def polite(output: str) -> Score:
    return Score(float(output == "yes"))


def suite_of(judge: Any = polite, **config: Any) -> EvalSuite:
    return EvalSuite("live", Dataset([], name="traffic"), recorded, judge, config=EvalConfig(**config))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = open_store(str(tmp_path / "runs.db"))
    assert isinstance(opened, SqlStore)
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    """A store of each kind that a watch may have."""
    opened = open_store(request.getfixturevalue("pg_url") if request.param == "postgresql" else str(tmp_path / "a.db"))
    assert isinstance(opened, SqlStore)
    yield opened
    opened.close()


def watch_of(store: SqlStore, sampling: Sampling, judge: Any = polite, **options: Any) -> LiveWatch:
    return LiveWatch(suite_of(judge), store, sampling, port=0, settle_seconds=options.pop("settle", SETTLE), **options)


class Clock:
    """A clock that a test advances, and that may run faster than real time."""

    def __init__(self, start: float, speed: float = 1.0) -> None:
        self._start, self._speed, self._began = start, speed, time.monotonic()

    def __call__(self) -> float:
        return self._start + (time.monotonic() - self._began) * self._speed

    def advance(self, seconds: float) -> float:
        self._start += seconds
        return self()


def weights(report: EvalReport[Any]) -> dict[str, Any]:
    return {result.sample_id: result.sample.metadata[SAMPLING_WEIGHT] for result in report.results}


class TestSampling:
    def test_the_same_traces_are_taken_every_time_and_their_share_is_the_one_asked_for(self, store: SqlStore) -> None:
        sampling, taken = Sampling(0.1), []
        for suite in ("first", "second"):
            traces = LiveTraces(store.spool, suite, sampling, settle_seconds=1)
            with watching_receiver(traces) as url:
                for start in range(0, 4000, 500):
                    assert send(url, [span(number) for number in range(start, start + 500)]) == 200
            assert traces.counts.received == 4000
            taken.append({one.trace for one in store.spool.traces(suite)})
        assert taken[0] == taken[1]
        assert abs(len(taken[0]) - 400) < 80
        assert taken[0] == {trace_id(n) for n in range(4000) if position(trace_id(n)) < 0.1}

    def test_a_stratum_has_its_own_share_and_weights_say_what_each_trial_stands_for(self, any_store: SqlStore) -> None:
        store = any_store
        sampling = Sampling(0.2, (Stratum("user.feedback", "down", 1.0), Stratum("error", "true", 0.5)))
        watch = watch_of(store, sampling)
        # Of 20 unhappy users in 400, all are taken: without weights, the pass rate would be far too low.
        with watching(watch) as url:
            for number in range(400):
                down = number % 20 == 0
                one = span(number, answer="no" if down else "yes", **({"user.feedback": "down"} if down else {}))
                assert send(url, [one]) == 200
            until(lambda: not len(watch.traces), "all traces scored")
        report = EvalReport.load(store, "live")
        expected = {trace_id(n) for n in range(400) if n % 20 == 0 or position(trace_id(n)) < 0.2}
        assert {result.sample_id for result in report.results} == expected
        for result in report.results:
            facts = result.sample.metadata
            down = facts.get(SAMPLING_STRATUM) == "user.feedback=down"
            assert facts[SAMPLING_WEIGHT] == (1.0 if down else 5.0)
        others = len(expected) - 20
        weighted = 5 * others / (5 * others + 20)
        assert report.pass_rate == pytest.approx(weighted)
        figure = report["baseline"].figures.get("pass_rate")
        assert figure is not None
        assert figure.low is not None
        assert figure.high is not None
        assert figure.value == pytest.approx(weighted)
        assert figure.low < 0.95 < figure.high
        assert report["baseline"].totals.passed / len(expected) < 0.9  # What it would be without weights.
        # End the run as midnight would, so that the alarm reads it.
        store.update_run(report.run_id, status="finished", finished_at=time.time())
        found = watch_alarm(store, "live", reference=200)
        assert found.status == "too little data"
        assert "sampled at several rates" in " ".join(found.remarks)

    def test_a_failed_application_is_a_task_error_in_the_stratum_of_errors(self, store: SqlStore) -> None:
        watch = watch_of(store, Sampling(0.01, (Stratum("error", "true", 1.0),)))
        failed = span(1)
        failed["attributes"] = failed["attributes"][:1]
        failed["status"] = {"code": 2, "message": "the database is away"}
        with watching(watch) as url:
            assert send(url, [failed]) == 200
            until(lambda: not len(watch.traces), "the trace is stored")
        (result,) = EvalReport.load(store, "live").results
        assert (result.outcome, result.error) == ("task_error", "the database is away")
        assert result.sample.metadata[SAMPLING_STRATUM] == "error=true"

    @pytest.mark.parametrize("text", ["down", "feedback:0.5", "feedback=down:2", "feedback=down:x", "=a:0.5"])
    def test_a_wrong_stratum_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match=r"a stratum must be KEY=VALUE:SHARE|the share of traces"):
            Stratum.parse(text)


class TestBudget:
    def test_the_factor_keeps_the_rest_of_a_day_within_what_is_left(self) -> None:
        assert lowered(1.0, 10, 2, 0.001, 8_000) == 1.0
        assert lowered(1.0, 10, 2, 0.001, 16_000) == pytest.approx(0.5)
        assert lowered(0.5, 10, 9, 0.001, 16_000) == pytest.approx(0.03125)
        assert lowered(0.5, 10, 10, 0.001, 16_000) == 0.0

    @pytest.mark.parametrize(
        "sent",
        [[(400, "Right.")], [(90, "Right."), (90, "Polite."), (90, "Right and polite.")]],
        ids=["burst", "three"],
    )
    def test_a_burst_and_new_evaluators_stay_within_the_budget_of_the_day(
        self, store: SqlStore, sent: list[tuple[int, str]]
    ) -> None:
        clock = Clock(NOON)
        adapter = ScriptedAdapter(
            lambda _messages: {"reason": "b", "rating": "excellent"}, usage=TokenUsage(1, 1, cost_usd=0.01)
        )
        for start, (many, text) in zip((0, 400, 800), sent, strict=False):
            watch = watch_of(store, Sampling(1.0, max_cost_usd=1.0), llm_judge(adapter, text), clock=clock)
            with watching(watch) as url:
                assert send(url, [span(number) for number in range(start, start + many)]) == 200
                until(lambda: not len(watch.traces), "scored, or left out")  # noqa: B023 - called here.
        spent = sum(one.judge_cost_usd or 0.0 for run in store.runs() for one in store.totals(run.run_id))
        assert 0.9 < spent < 2.2  # What is being scored when the budget ends is paid: at most two batches of 64.

    def test_over_budget_the_rate_is_lowered_noted_and_allowed_for(self, store: SqlStore) -> None:
        clock = Clock(NOON + DAY / 4, speed=1_500)  # The rest of the day takes 14 seconds.
        reply = {"reason": "because", "rating": "excellent"}
        adapter = ScriptedAdapter(lambda messages: reply, usage=TokenUsage(1, 1, cost_usd=0.01))
        watch = watch_of(store, Sampling(1.0, max_cost_usd=2.0), llm_judge(adapter, "Right."), settle=100, clock=clock)
        number = 0
        with watching(watch) as url:
            while clock() < NOON + DAY / 2 - 1_000:  # Thousands of traces would be judged, for tens of dollars.
                assert send(url, [span(number + more) for more in range(10)]) == 200
                number += 10
                time.sleep(0.1)
            until(lambda: not len(watch.traces) and any(run.finished_at for run in store.runs()), "the day has ended")
        report = EvalReport.load(store, store.runs()[-1].run_id)
        note = report.run.noted.sampling
        assert note is not None
        assert report.status == "finished"
        factors = [factor for _, factor in note.rates]
        assert factors == sorted(factors, reverse=True)
        assert 0 < factors[-1] < 0.5
        spent = report["baseline"].totals.judge_cost_usd or 0.0
        assert spent <= 2.2
        assert report.total < number / 2
        own = weights(report)
        assert {round(weight, 6) for weight in own.values()} <= {round(1 / one, 6) for one in (1.0, *factors) if one}
        # Each weight is that of the chance which the trace had: it stands for as many traces.
        assert all(position(name) < 1 / weight for name, weight in own.items())
        assert sum(own.values()) == pytest.approx(number, rel=0.5)


def test_each_day_has_a_run_of_its_own_and_ends_with_the_day(store: SqlStore) -> None:
    clock = Clock(NOON)
    watch = watch_of(store, Sampling(1.0), clock=clock)
    with watching(watch) as url:
        assert send(url, [span(1)]) == 200
        until(lambda: not len(watch.traces), "the first is scored")
        clock.advance(DAY)
        assert send(url, [span(2)]) == 200
        until(lambda: not len(watch.traces), "the second is scored")
    newest, first = store.runs(suite="live")
    assert (first.status, first.dataset_version, first.planned) == ("finished", "2026-11-13", 1)
    assert (newest.status, newest.dataset_version, newest.planned) == ("interrupted", "2026-11-14", 1)
    assert first.dataset_fingerprint != newest.dataset_fingerprint


def test_a_restart_finds_the_run_of_the_day_and_its_rate_behind_any_number_of_other_runs(any_store: SqlStore) -> None:
    store, clock = any_store, Clock(NOON)
    watch = watch_of(store, Sampling(1.0), clock=clock)
    with watching(watch) as url:
        assert send(url, [span(1)]) == 200
        until(lambda: not len(watch.traces), "the first is scored")
    (live,) = store.runs()
    note = live.noted.sampling
    assert note is not None
    lower = replace(note, rates=((NOON, 0.999),))
    store.update_run(live.run_id, notes=write_notes(sampling=lower))
    for number in range(12):  # The last ones were interrupted, which makes them no runs of the day.
        status: RunStatus = "finished" if number < 8 else "interrupted"
        again = replace(live, run_id=f"again{number}", number=0, parent_run=live.run_id, status=status)
        store.create_run(replace(again, notes=write_notes(sampling=note)))
        store.create_run(replace(again, run_id=f"other{number}", parent_run=None, notes={}))
    restarted = watch_of(store, Sampling(1.0), clock=clock)
    with watching(restarted) as url:
        assert send(url, [span(1), span(2)]) == 200
        until(lambda: not len(restarted.traces), "the second is scored")
        assert restarted.traces.factor(clock()) == 0.999
    assert len(store.runs()) == 25
    assert {one.sample_id for one in store.results(live.run_id)} == {trace_id(1), trace_id(2)}
    assert [run.status for run in store.runs() if run.run_id.startswith("again")] == ["interrupted"] * 4 + [
        "finished"
    ] * 8


def test_failed_scoring_is_repeated_and_replaces_the_error(store: SqlStore) -> None:
    calls: list[str] = []

    def fails_first(output: str) -> Score:
        calls.append(output)
        if len(calls) == 1:
            raise ConnectionError("the judge is away")
        return Score(1.0)

    clock = Clock(NOON)
    watch = watch_of(store, Sampling(1.0), fails_first, clock=clock)
    with watching(watch) as url:
        assert send(url, [span(1)]) == 200
        until(lambda: bool(calls) and store.done(store.runs()[0].run_id) != b"", "the error is stored")
        until(lambda: clock.advance(30) > 0 and not len(watch.traces), "it is scored")
    (result,) = EvalReport.load(store, "live").results
    assert (result.outcome, result.attempt, len(calls)) == ("scored", 2, 2)


def test_a_trace_that_cannot_be_read_again_leaves_its_place_in_the_run_to_no_other(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def fails_first(output: str) -> Score:
        calls.append(output)
        if len(calls) == 1:
            raise ConnectionError("the judge is away")
        return Score(1.0)

    def damaged(trace: Any, events: Any) -> Any:
        if calls and trace.trace_id == trace_id(1):
            raise ValueError("a late span cannot be read")
        return recorded_trial(trace, events)

    monkeypatch.setattr("fairtrial.integrations.tracing.live.recorded_trial", damaged)
    clock = Clock(NOON)
    watch = watch_of(store, Sampling(1.0), fails_first, clock=clock)
    with watching(watch) as url:
        assert send(url, [span(1)]) == 200
        until(lambda: bool(calls) and store.done(store.runs()[0].run_id) != b"", "the error is stored")
        until(lambda: clock.advance(30) > 0 and not len(watch.traces), "the trace is left out")
        assert send(url, [span(2)]) == 200
        until(lambda: clock.advance(1) > 0 and not len(watch.traces), "the next one is scored", seconds=20)
    results = {result.sample_id: result.outcome for result in EvalReport.load(store, "live").results}
    assert results == {trace_id(1): "scorer_error", trace_id(2): "scored"}


def test_a_live_run_with_gaps_and_unscored_trials_is_rescored_with_its_weights(any_store: SqlStore) -> None:
    store = any_store

    def sometimes(output: str) -> Score:
        if output == "maybe":
            raise ConnectionError("the judge is away")
        return Score(float(output == "yes"))

    clock = Clock(NOON)
    watch = watch_of(store, Sampling(0.5, (Stratum("user.feedback", "down", 1.0),)), sometimes, clock=clock)
    failed = span(3, **{"user.feedback": "down"})
    failed["attributes"] = [one for one in failed["attributes"] if one["key"] != "output.value"]
    failed["status"] = {"code": 2, "message": "the database is away"}
    with watching(watch) as url:
        spans = [span(1, answer="maybe", **{"user.feedback": "down"}), failed]
        assert send(url, [*spans, *(span(number) for number in range(10, 20))]) == 200
        until(lambda: clock.advance(30) > 0 and not len(watch.traces), "the judge was asked three times")
        clock.advance(DAY)
        until(lambda: all(run.finished_at for run in store.runs()), "the day has ended")
    live = EvalReport.load(store, "live@1")
    store.extend_run(live.run_id, live.run.dataset_size + 2)  # Places of results that the store refused.
    again = suite_of(lambda output: Score(0.5 if output == "maybe" else 1.0)).rescore_sync(live.run_id, store=store)
    assert {one.sample_id: one.outcome for one in again.results} == {
        one.sample_id: "task_error" if one.sample_id == trace_id(3) else "scored" for one in live.results
    }
    assert weights(again) == weights(live)
    others = live.total - 2
    assert again.mean_score == pytest.approx((0.5 + 2 * others) / (1 + 2 * others))
    assert again.status == "finished"


class TestWhatIsRefused:
    def test_bad_requests_are_answered_as_senders_expect_and_the_service_goes_on(self, store: SqlStore) -> None:
        watch = watch_of(store, Sampling(1.0))
        with watching(watch) as url:
            assert raw(url, b"{", "application/json") == 400
            assert raw(url, b"\xff\xff\xff", "application/x-protobuf") == 400
            assert raw(url, b'{"resourceSpans": 3}', "application/json") == 400
            assert raw(url, b"spans", "text/plain") == 415
            assert raw(url, b" " * (17 * 1024 * 1024), "application/json") == 413
            odd = span(1) | {"traceId": "", "attributes": None}
            assert send(url, [odd]) == 200  # Nobody's trace.
            assert send(url, [span(2)]) == 200
            until(lambda: not len(watch.traces), "the good one is scored")
        assert EvalReport.load(store, "live").total == 1

    def test_overload_asks_the_sender_to_come_back(self, store: SqlStore) -> None:
        traces = LiveTraces(store.spool, "live", Sampling(1.0), settle_seconds=1, max_traces=3)
        with watching_receiver(traces) as url:
            assert send(url, [span(number) for number in range(3)]) == 200
            request = urllib.request.Request(
                f"{url}/v1/traces",
                json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span(4)]}]}]}).encode(),
                {"Content-Type": "application/json"},
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=LONG)
            with refused.value as answer:
                assert (answer.code, answer.headers["Retry-After"]) == (503, "5")
            assert send(url, [span(2, span_id="2" * 16, parent="1" * 16)]) == 200  # Of a trace that is there.
        assert traces.counts.refused == 1
        assert len(store.spool.traces("live")) == 3  # Nothing of what was refused was stored.

    def test_a_trace_that_never_ends_and_one_that_is_too_large_are_left_out_and_counted(self, store: SqlStore) -> None:
        clock = Clock(NOON)
        watch = watch_of(store, Sampling(1.0), clock=clock, settle=60)
        with watching(watch) as url:
            orphan = span(1, parent="7" * 16), span(1, span_id="2" * 16, parent="8" * 16)
            assert send(url, orphan) == 200
            noise = os.urandom(9_000_000).hex()[:15_000_000]
            for part in range(3):
                assert send(url, [span(2, span_id=f"{part + 1:016x}", noise=noise)]) == 200
            assert send(url, [span(3)]) == 200
            until(lambda: clock.advance(100) > 0 and not len(watch.traces), "all are settled")
        counts = watch.traces.counts
        assert (counts.incomplete, counts.too_large) == (1, 1)
        report = EvalReport.load(store, "live")
        assert [result.sample_id for result in report.results] == [trace_id(3)]
        assert not store.spool.traces("live")

    @pytest.mark.parametrize("known", ["before", "after"])
    def test_a_secret_in_the_id_of_a_trace_leaves_it_out_counts_it_and_the_day_ends(
        self, store: SqlStore, known: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(NOON)
        secret, watch = trace_id(1), watch_of(store, Sampling(1.0), clock=clock)
        if known == "before":
            monkeypatch.setenv("SERVICE_API_KEY", secret)
        with watching(watch) as url:
            assert send(url, [span(1), span(2)]) == 200
            if known == "before":
                assert secret not in {one.trace for one in store.spool.traces("live")}
            monkeypatch.setenv("SERVICE_API_KEY", secret)
            until(lambda: not len(watch.traces), "both are scored, or left out")
            assert not store.spool.traces("live")
            clock.advance(DAY)
            assert send(url, [span(3)]) == 200
            until(lambda: len(store.runs()) == 2 and not len(watch.traces), "the next day's too")
        assert watch.traces.counts.unstorable == 1
        first = EvalReport.load(store, store.runs()[-1].run_id)
        assert [result.sample_id for result in first.results] == [trace_id(2)]
        assert first.status == "finished"
        assert "Sampled traces that were left out: 1 not storable." in first.to_markdown()

    def test_a_result_that_the_store_refuses_keeps_no_day_open(self, store: SqlStore) -> None:
        clock = Clock(NOON)
        watch, commit = watch_of(store, Sampling(1.0), clock=clock), store.commit
        refused = trace_id(2)

        def commit_others(run_id: str, results: Any, *given: Any, **named: Any) -> Any:
            mine = [one.key for one in results if one.sample_id == refused]
            done = commit(run_id, [one for one in results if one.sample_id != refused], *given, **named)
            return done._replace(refused=tuple((key, "no place for it") for key in mine))

        store.commit = commit_others  # type: ignore[method-assign]
        with watching(watch) as url:
            assert send(url, [span(1), span(2)]) == 200
            until(lambda: not len(watch.traces), "both have left the spool", seconds=30)
            clock.advance(DAY)
            assert send(url, [span(3)]) == 200
            until(lambda: len(store.runs()) == 2 and not len(watch.traces), "the next day's too")
        first = store.runs()[-1]
        assert (first.status, watch.traces.counts.unstorable) == ("finished", 1)
        assert first.noted.sampling is not None
        assert first.noted.sampling.unstorable == 1

    @pytest.mark.parametrize("wrong", ["\ud800", "a\0b", "1" * 1_000, "ü"])
    def test_ids_that_are_no_text_of_ids_are_a_bad_request(self, store: SqlStore, wrong: str) -> None:
        watch = watch_of(store, Sampling(1.0))
        with watching(watch) as url:
            for name in ("traceId", "spanId", "parentSpanId"):
                body = {"resourceSpans": [{"scopeSpans": [{"spans": [span(1) | {name: wrong}]}]}]}
                assert raw(url, json.dumps(body).encode(), "application/json") == 400
            assert send(url, [span(2)]) == 200

    def test_a_trace_that_goes_on_becomes_due(self, store: SqlStore) -> None:
        clock = Clock(NOON, speed=0.0)
        traces = LiveTraces(store.spool, "live", Sampling(1.0), settle_seconds=10, clock=clock)
        for number in range(40):
            assert traces.add(received(span(1, span_id=f"{number + 2:016x}", parent="1" * 16)), ()) == ""
            clock.advance(9)
        assert [one.trace for one in traces.take_due("2026-11-13")] == [trace_id(1)]

    def test_no_more_is_stored_of_a_trace_that_is_too_large(self, store: SqlStore) -> None:
        traces = LiveTraces(store.spool, "live", Sampling(1.0), settle_seconds=10, max_trace_bytes=500)
        for number in range(3):
            assert traces.add(received(span(1, span_id=f"{number + 1:016x}", noise=os.urandom(600).hex())), ()) == ""
        assert len(store.spool.read("live", trace_id(1))) == 1

    def test_more_of_a_trace_that_waits_is_taken_when_there_is_no_room_for_others(self, store: SqlStore) -> None:
        traces = LiveTraces(store.spool, "live", Sampling(1.0), settle_seconds=10, max_bytes=1)
        assert traces.add(received(span(1, span_id="2" * 16, parent="1" * 16)), ()) == ""
        assert "wait to be scored" in traces.add(received(span(2)), ())
        assert traces.add(received(span(1)), ()) == ""
        assert len(store.spool.read("live", trace_id(1))) == 2

    def test_settings_that_a_watch_has_no_use_for_are_refused_by_name(self, store: SqlStore) -> None:
        for config, said in (({"processes": 2}, "EvalConfig.processes"), ({"max_cost_usd": 5}, "--max-cost 5/day")):
            with pytest.raises(ConfigurationError, match=said):
                LiveWatch(suite_of(**config), store, Sampling(1.0))

    def test_a_store_in_memory_and_a_suite_with_experiments_are_refused(self, store: SqlStore) -> None:
        with pytest.raises(ConfigurationError, match=r"settle_seconds must be above 0 \(got nan\)"):
            watch_of(store, Sampling(1.0), settle=float("nan"))
        with pytest.raises(ConfigurationError, match="needs a store in SQLite or PostgreSQL"):
            LiveWatch(suite_of(), open_store("memory:"), Sampling(1.0))


def received(one: dict[str, Any]) -> list[ReceivedSpan]:
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]}
    return parse_traces(json.dumps(body).encode(), is_json=True)


def raw(url: str, body: bytes, kind: str) -> int:
    request = urllib.request.Request(f"{url}/v1/traces", body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (ConnectionError, urllib.error.URLError):  # Refused before the body was read.
        return 413


@contextmanager
def watching_receiver(traces: LiveTraces) -> Iterator[str]:
    receiver = LiveReceiver(traces, host="127.0.0.1", port=0)
    with receiver.running():
        yield receiver.endpoint


SUITE = """
import time
from pathlib import Path
from fairtrial import Dataset, EvalConfig, EvalSuite, Score

def recorded(question: object) -> str:
    raise NotImplementedError

def slow(output: str, input: str) -> Score:
    with Path("calls.txt").open("a") as file:
        file.write(f"{input}\\n")
    time.sleep(0.05)
    return Score(1.0)

suite = EvalSuite("live", Dataset([], name="traffic"), recorded, slow, config=EvalConfig(max_concurrent=2))
"""


class TestTrouble:
    @pytest.mark.parametrize("request_of_store", ["read", "delete"])
    def test_an_outage_of_the_store_holds_nothing_up_for_good(self, store: SqlStore, request_of_store: str) -> None:
        clock = Clock(NOON)
        watch, answers = watch_of(store, Sampling(1.0), clock=clock), iter([True, False])
        real = getattr(watch.traces._spool, request_of_store)

        def once_away(*given: Any) -> Any:
            if not next(answers, True):
                raise StoreUnavailableError("the database is away")
            return real(*given)

        setattr(watch.traces._spool, request_of_store, once_away)
        with watching(watch) as url:
            for number in range(5):
                assert send(url, [span(number)]) == 200
                time.sleep(SETTLE / 2)
            until(lambda: not len(watch.traces), "all traces scored", seconds=40)
            clock.advance(DAY)
            assert send(url, [span(9)]) == 200
            until(lambda: not len(watch.traces), "the next day's too", seconds=40)
        assert sorted(run.planned for run in store.runs()) == [1, 5]

    def test_a_trace_that_goes_on_over_midnight_holds_up_no_later_day(self, store: SqlStore) -> None:
        clock = Clock(NOON + DAY / 2 - 2)
        watch, over = watch_of(store, Sampling(1.0), clock=clock), threading.Event()
        numbers = itertools.count(100)

        def go_on() -> None:
            while not over.wait(SETTLE / 2):
                send(url, [span(1, span_id=f"{next(numbers):016x}", parent="7" * 16)])

        with watching(watch) as url:
            assert send(url, [span(2)]) == 200
            endless = threading.Thread(target=go_on)
            endless.start()
            try:
                until(lambda: bool(store.runs()), "the run of the first day")
                clock.advance(10)
                assert send(url, [span(3)]) == 200
                until(lambda: len(store.runs()) == 2, "the run of the next day")
                until(lambda: len(watch.traces) <= 1, "its trace scored")
            finally:
                over.set()
                endless.join()
        days = {run.noted.sampling.day for run in store.runs() if run.noted.sampling is not None}
        assert days == {"2026-11-13", "2026-11-14"}

    def test_an_evaluator_that_always_fails_with_one_error_ends_in_one_run(self, store: SqlStore) -> None:
        def mistaken(output: str) -> Score:
            return Score(float(output.lowr() == "yes"))  # type: ignore[attr-defined]

        watch = watch_of(store, Sampling(1.0), mistaken)
        with watching(watch) as url:
            for start in range(0, 90, 30):
                assert send(url, [span(number) for number in range(start, start + 30)]) == 200
                time.sleep(4 * SETTLE)
            until(lambda: len(list(store.results(store.runs()[0].run_id))) == 90, "all were tried")
        assert len(store.runs()) == 1

    def test_a_plan_that_was_extended_while_it_was_read_takes_the_new_trials(self, store: SqlStore) -> None:
        run = store.create_run(build.run_record(size=1, experiments=("baseline",), repeats=1))
        old = store._plan("r1")
        store.extend_run("r1", 2)
        store._plans["r1"] = old  # What a read that began before the extension remembers.
        store.commit("r1", [build.result(run, 1)], build.samples(range(1, 2)))
        assert [found.ordinal for found in store.results("r1")] == [1]


class TestCrash:
    def test_after_kill_9_what_was_acknowledged_is_scored_once(self, tmp_path: Path) -> None:
        (tmp_path / "live.py").write_text(SUITE)
        port = free_port()
        url, acknowledged = f"http://127.0.0.1:{port}", set()
        command = [sys.executable, "-m", "fairtrial.cli", "watch", "start", "live.py", "--sample", "1",
                   "--receive", str(port), "--settle", "0.3", "--store", "runs.db"]  # fmt: skip
        service = subprocess.Popen(command, cwd=tmp_path)
        try:
            until(lambda: listens(port), "it listens")
            for number in range(60):
                if send(url, [span(number)]) == 200:
                    acknowledged.add(number)
            calls = tmp_path / "calls.txt"
            until(lambda: calls.exists() and len(calls.read_text().splitlines()) > 10, "some are being scored")
            service.kill()
            service.wait(LONG)
            before = len(calls.read_text().splitlines())
            assert before < 60
            service = subprocess.Popen([*command, "--json"], cwd=tmp_path, stdout=subprocess.PIPE)
            until(lambda: listens(port), "it listens again")
            for number in range(60, 70):
                if send(url, [span(number)]) == 200:
                    acknowledged.add(number)
            for number in range(5):  # A sender that had no answer sends again.
                assert send(url, [span(number)]) == 200
            opened = open_store(str(tmp_path / "runs.db"))
            assert isinstance(opened, SqlStore)
            until(lambda: not opened.spool.traces("live"), "the spool is empty")
            service.send_signal(signal.SIGTERM)
            ended, _ = service.communicate(timeout=LONG)
            assert service.returncode == 0
        finally:
            service.kill()
            service.wait(LONG)
        facts = json.loads(ended)
        assert (facts["format"], facts["suite"], facts["waiting"]) == ("fairtrial.live/1", "live", 0)
        assert facts["received"] == 15
        report = EvalReport.load(opened, "live")
        assert len(acknowledged) == 70
        assert sorted(result.sample_id for result in report.results) == sorted(map(trace_id, acknowledged))
        assert {result.outcome for result in report.results} == {"scored"}
        assert (report.run.planned, len(opened.runs())) == (70, 1)
        assert len(calls.read_text().splitlines()) <= 70 + 2 + 10  # At most those in flight were judged twice.
        opened.close()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
