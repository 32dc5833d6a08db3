"""The progress display of a run."""

from __future__ import annotations

import io
import sys
import threading
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from fairtrial import Dataset, EvalResult, EvalSuite, Score, TokenUsage, TrialKey, exact_match, open_store, sync
from fairtrial.base.rates import rate_bounds
from fairtrial.runs import EvalRunStarted, SampleEvaluated, TrialStarted, progress
from fairtrial.runs.progress import Display, Tally, shown
from fairtrial.stats import Interval, rate_interval
from fairtrial.store.protocol import RunRecord

RUN = RunRecord("r1", "support", "data", "1", "f", 10, ("baseline",), 1, number=1)


def key(number: int) -> TrialKey:
    return TrialKey("r1", "baseline", f"s{number}")


def result(number: int, **fields: Any) -> EvalResult:
    fields.setdefault("outcome", "scored")
    if fields["outcome"] == "scored":
        fields.setdefault("score", Score(1.0))
    return EvalResult(key=key(number), ordinal=number, **fields)


def started(tally: Tally, done: int = 0) -> None:
    tally.publish(EvalRunStarted("r1", "data", 10, 10, done, RUN))


def lines(tally: Tally, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(Display(tally))
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("passed", "scored"),
    [(0, 1), (1, 1), (1, 2), (3, 10), (10, 10), (12, 24), (13, 26), (12, 500), (977, 1_000), (999_991, 1_000_000)],
)
def test_the_interval_is_the_one_reports_print(passed: int, scored: int) -> None:
    wanted = rate_interval(passed, scored)
    assert isinstance(wanted, Interval)
    assert rate_bounds(passed, scored) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


def test_it_counts_what_happens() -> None:
    tally = Tally()
    assert lines(tally) == ["starting".ljust(8)]
    started(tally)
    for number in range(6):
        tally.publish(TrialStarted("r1", key(number)))
    tally.publish(SampleEvaluated("r1", result(0, usage=TokenUsage(100, 20, 0, 0.5))))
    tally.publish(SampleEvaluated("r1", result(1, score=Score(0.0))))
    tally.publish(SampleEvaluated("r1", result(2, outcome="timeout")))
    tally.publish(SampleEvaluated("r1", result(3, outcome="timeout")))
    first, second, third = lines(tally)
    assert first.startswith("support ")
    assert "4/10 40% eta " in first
    assert second.rstrip() == "  passed 50.0% [1.3%, 98.7%]   2 timeouts"
    assert third.split("   ")[0] == "  2 in flight"
    assert third.rstrip().endswith("/s   120 tokens   $0.5000")
    tally.remark = "interrupted: finishing"
    assert lines(tally)[3].rstrip() == "interrupted: finishing"
    assert Display(tally).plain_line().startswith("support: 4 of 10 trials, passed 50.0% [1.3%, 98.7%], 2 timeouts, ")


def test_costs_and_tokens_are_shown_once_there_are_any() -> None:
    tally = Tally()
    started(tally)
    tally.publish(SampleEvaluated("r1", result(0)))
    assert lines(tally)[2].rstrip().endswith("/s")
    tally.publish(SampleEvaluated("r1", result(1, judge_cost_usd=0.25)))
    assert lines(tally)[2].rstrip().endswith("/s   $0.2500")
    tally.publish(SampleEvaluated("r1", result(2, usage=TokenUsage(1, 2, cost_usd=0.5), judge_cost_usd=0.25)))
    assert (tally.cost, tally.tokens, tally.begun, tally.ended) == (1.0, 3, 0, 3)
    tally.publish(SampleEvaluated("r1", result(3, outcome="task_error")))
    assert lines(tally)[1].rstrip().endswith("   1 task error")


def test_colours_say_what_is_good_and_what_is_not() -> None:
    tally = Tally()
    started(tally)

    def coloured() -> str:
        console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
        with console.capture() as captured:
            console.print(Display(tally))
        return captured.get().splitlines()[1].rstrip()

    assert coloured() == "  \x1b[2mnothing scored yet\x1b[0m   \x1b[2mno errors\x1b[0m"
    tally.publish(SampleEvaluated("r1", result(0)))
    tally.publish(SampleEvaluated("r1", result(1, outcome="timeout")))
    assert coloured() == "  \x1b[32mpassed 100.0% [2.5%, 100.0%]\x1b[0m   \x1b[31m1 timeout\x1b[0m"


def test_the_rate_is_that_of_the_last_twenty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fairtrial.runs.progress.time.monotonic", lambda: now[0])
    tally = Tally()
    started(tally)
    display = Display(tally)
    rates = []
    for seconds, done in ((0, 0), (10, 5), (20, 5), (30, 6), (31, 7)):
        now[0], tally.done = 100.0 + seconds, done
        rates.append(round(display.rate(), 6))
    assert rates == [0.0, 0.5, 0.25, 0.2, round(2 / 21, 6)]


@pytest.mark.parametrize("last", [False, True])
def test_the_last_line_is_written_if_it_was_asked_for_and_the_run_had_begun(last: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=80)
    tally = Tally()
    with shown(tally, console, last=last):
        pass
    assert file.getvalue() == ""
    with shown(tally, console, last=last):
        started(tally)
    assert file.getvalue().startswith("support: 0 of 10 trials, nothing scored yet, no errors" if last else "")
    assert bool(file.getvalue()) == last


@pytest.mark.parametrize("several", [{"repeats": 3}, {"experiments": ("plain", "terse")}])
def test_several_trials_of_a_sample_have_no_interval_as_if_they_were_independent(several: dict[str, Any]) -> None:
    tally = Tally()
    tally.publish(EvalRunStarted("r1", "data", 10, 10, 0, replace(RUN, **several)))
    tally.publish(SampleEvaluated("r1", result(0)))
    assert lines(tally)[1].rstrip() == "  passed 100.0% of 1 scored so far   no errors"


@pytest.mark.parametrize("width", [80, 140])
def test_no_line_is_longer_than_the_screen(width: int) -> None:
    tally = Tally()
    started(tally)
    tally.suite = "a-name-" * 20
    tally.errors.update(dict.fromkeys(("task_error", "timeout", "scorer_error", "dead_letter"), 123456))
    assert max(len(line) for line in lines(tally, width)) <= width
    assert len(lines(tally, width)) == 3


@pytest.mark.parametrize("retries", [False, True])
def test_a_resumed_run_starts_where_it_stopped(retries: bool) -> None:
    store = open_store("memory:")
    store.create_run(RUN)
    stored = [
        result(0, usage=TokenUsage(10, 0, 0, 0.1)), result(1, score=Score(0.0)), result(2, outcome="timeout"),
        result(3, outcome="scorer_error", output="x", output_json='"x"'),
    ]  # fmt: skip
    store.commit("r1", stored)
    seen: list[EvalRunStarted] = []
    tally = Tally(store, seen.append, retries=retries)
    started(tally, done=4)
    assert len(seen) == 1
    # What could not be scored is scored again in any case; a timeout is tried again if that was asked for.
    assert tally.done == tally.first == (2 if retries else 3)
    assert dict(tally.errors) == ({} if retries else {"timeout": 1})
    assert (tally.scored, tally.passed, tally.tokens, tally.cost) == (2, 1, 10, 0.1)


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", 0.01)
    file = io.StringIO()
    console = Console(file=file, width=80)
    tally = Tally()
    with shown(tally, console):
        started(tally)
        tally.publish(SampleEvaluated("r1", result(0)))
        for _ in range(1000):
            if file.getvalue():
                break
            threading.Event().wait(0.01)
    assert file.getvalue().startswith("support: 1 of 10 trials, passed 100.0% [2.5%, 100.0%], no errors, ")


def test_quiet_shows_nothing() -> None:
    file = io.StringIO()
    with shown(Tally(), Console(file=file, force_terminal=True), quiet=True):
        pass
    assert file.getvalue() == ""


def test_a_terminal_gets_it_live() -> None:
    file = io.StringIO()
    tally = Tally()
    with shown(tally, Console(file=file, force_terminal=True, width=80), prints=False):
        started(tally)
    assert "\x1b[" in file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "said"), [(5, "eta 0:01"), (0, "eta -:--"), (5 * 3600, "eta 1:15:00"), (5 * 60, "eta 1:15")]
)
def test_the_time_left_is_told_from_the_pace(seconds: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fairtrial.runs.progress.time.monotonic", lambda: now[0])
    tally = Tally()
    started(tally)
    display = Display(tally)
    if seconds:
        tally.done = 8
        now[0] += seconds
    assert display._eta() == said
    tally.done = 10
    assert display._eta() == "eta 0:00"
    now[0] += 100
    display.rate()
    now[0] += 1
    assert display.rate() == 0.0


def test_a_run_in_a_program_shows_its_progress_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    suite = EvalSuite("letters", Dataset.of({"a": "A", "b": "x"}), str.upper, exact_match)
    suite.run_sync(store="memory:")
    assert capsys.readouterr().err == ""
    suite.run_sync(store="memory:", progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("letters: 2 of 2 trials, passed 50.0%")
    sync.EvalSuite("letters", suite.dataset, str.upper, exact_match).run(store="memory:", progress=True)
    assert "2 of 2 trials" in capsys.readouterr().err


async def test_an_awaited_run_shows_its_progress_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    suite = EvalSuite("letters", Dataset.of({"a": "A"}), str.upper, exact_match)
    await suite.run(store="memory:", progress=True)
    assert "1 of 1 trials" in capsys.readouterr().err


class NotebookShell:
    kernel = object()


class NotebookLine:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> NotebookLine:
        assert raw
        assert display_id
        self.texts.append(data["text/plain"])
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.texts.append(data["text/plain"])


def test_progress_in_a_notebook_is_one_line_that_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = NotebookLine()
    package, displays = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = NotebookShell  # type: ignore[attr-defined]
    displays.display = line.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    suite = EvalSuite("letters", Dataset.of({"a": "A", "b": "x"}), str.upper, exact_match)
    suite.run_sync(store="memory:", progress=True)
    assert line.texts[0] == "starting"
    assert line.texts[-1].startswith("letters: 2 of 2 trials")
    assert capsys.readouterr().err == ""


def test_the_first_line_is_as_wide_as_the_terminal() -> None:
    tally = Tally()
    started(tally)
    assert [len(lines(tally, width)[0].rstrip()) for width in (60, 100)] == [60, 100]


def test_a_resumed_run_says_what_is_stored_and_what_is_retried() -> None:
    def text(done: int, retried: int = 0) -> str:
        return EvalRunStarted("r1", "data", 10, 10, done, RUN, retried=retried).resume_text("support@1")

    assert text(4) == "resuming support@1: 4 of 10 trials are stored"
    assert text(4, retried=2) == "resuming support@1: 4 of 10 trials are stored, of which 2 are retried"
    assert text(10, retried=1) == "retrying 1 trial of support@1: the others are stored"
