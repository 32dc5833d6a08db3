"""The reprs of public objects: one short line, without secrets."""

from __future__ import annotations

import asyncio
import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, assert_type

import pytest
import trio

import fairtrial
import fairtrial.models.judges
from fairtrial import ConfigurationError, EvalSuite, Session, compare, gate, leaderboard, llm_judge, open_store, sync
from fairtrial.data import Dataset, Sample
from fairtrial.fleet import EvalReply, EvalRequest, InMemorySessionStore, LoopGroup, MemoryBroker
from fairtrial.mailbox import InMemoryMailbox
from fairtrial.models import AnthropicAdapter, OpenAIAdapter, PromptResponse, ScriptedAdapter
from fairtrial.reports import EvalReport, GateRules
from fairtrial.scoring import Score, exact_match, negate
from fairtrial.trials import EvalResult, Experiment

LETTERS = Dataset.of({"a": "A", "b": "x"}, name="letters")
SUITE = EvalSuite("upper", LETTERS, str.upper, exact_match, experiments=[Experiment("one"), Experiment("two")])


@pytest.fixture(scope="module")
def report() -> EvalReport[str]:
    return SUITE.run_sync(store="memory:")


def test_a_suite_names_its_dataset_and_counts_its_experiments() -> None:
    assert repr(SUITE) == "<EvalSuite 'upper': 2 samples of 'letters', 2 experiments>"
    assert repr(EvalSuite("s", LETTERS, str.upper, exact_match)) == "<EvalSuite 's': 2 samples of 'letters'>"
    assert repr(SUITE.stream(store="memory:")) == "<ResultStream: not started>"


def test_the_repr_of_a_result_shows_its_outcome() -> None:
    assert repr(EvalResult(sample_id="q1", score=Score(0.25))) == "<EvalResult 'q1' of baseline: failed with 0.25>"
    broken = EvalResult(sample_id="q1", error="ValueError: no\nand more")
    assert repr(broken) == "<EvalResult 'q1' of baseline: task_error: ValueError: no>"


def test_reports_and_what_is_made_of_them_take_one_line(report: EvalReport[str]) -> None:
    shown = [
        report,
        report["one"],
        report.results,
        report.results[3],
        report.store,
        compare(report["one"], report["two"]),
        gate(report["one"], GateRules(0.5)),
        leaderboard(report["one"], report["two"]),
        compare(report["one"], report["two"])["two"],
        report.run,
    ]
    assert [text for each in shown if "\n" in (text := repr(each)) or len(text) > 120 or " at 0x" in text] == []
    assert repr(shown[5]) == "<Comparison of two with one>"
    assert (
        repr(shown[8]) == "<CandidateComparison two: passed no detectable difference, value no detectable difference>"
    )
    assert repr(report.run) == f"<RunRecord upper@1 {report.run_id}: finished, 4 trials planned>"
    assert repr(shown[6]) == "<GateResult: inconclusive, 1 check>"


def test_a_table_of_trials_is_described_without_reading_its_rows(
    report: EvalReport[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = report.trials()

    def refuse(*args: Any, **filters: Any) -> Any:
        raise AssertionError("the rows must not be read")

    monkeypatch.setattr(type(report.store), "results", refuse)
    assert repr(table) == f"<TrialTable of {report.run_id}: {len(table.columns)} columns>"
    assert repr(table.failed()) == f"<TrialTable of {report.run_id}: {len(table.columns)} columns, filtered>"


def test_adapters_judges_and_mailboxes_show_no_secrets() -> None:
    for adapter in (OpenAIAdapter(model="m", api_key="sk-123"), AnthropicAdapter(model="m", api_key="sk-123")):
        assert "sk-123" not in repr(adapter)
        assert "'m'" in repr(adapter)
    assert repr(llm_judge(ScriptedAdapter([]), "It is right.")).startswith("<LLMJudge")
    assert repr(InMemoryMailbox("requests")) == "InMemoryMailbox('requests')"
    assert repr(MemoryBroker()) == "<MemoryBroker: 0 mailboxes>"


# A public record refuses fields in a wrong order: what is given by position must not mean something else.


PER_CALL = "the library makes it for every call, message or event, where a check would cost"
ANYTHING = "its first field may be anything"
STATISTIC = "the library makes it of arrays, thousands of times in a simulation"
EXEMPT = {
    **dict.fromkeys([
        "AgentEnded", "ChoicesShown", "Completion", "EnvironmentSaved", "EvalReply", "EvalRunCompleted",
        "EvalRunStarted", "ExecResult", "ExperimentFigures", "JudgeOutput", "MailboxDepth", "MainLoopResult",
        "ModelCall", "ModelCallFailed", "ModelReply", "OutputRepaired", "Rollout", "SampleEvaluated",
        "SpanClosed", "TokenRow", "Totals", "TrialStarted",
    ], PER_CALL),
    **dict.fromkeys(["EvalContext", "MainLoopRequest", "PromptResponse", "WrongShape"], ANYTHING),
    **dict.fromkeys([
        "BradleyTerry", "ClusteredError", "Confusion", "CorrectedMean", "Diagnosis", "Heterogeneity", "HistoryMean",
        "Interval", "JudgedTrials", "MarginTest", "MeanEstimate", "PairedDifference", "PairsDecision",
        "QuantileEstimate", "RankCorrelation", "Ranking", "RateDecision", "RawAgreement", "Repeats", "SignFlip",
        "SimultaneousDifferences", "Strength", "SystemScores", "Undefined", "VarianceSplit", "WeightedMean",
    ], STATISTIC),
}  # fmt: skip


class Wrong:
    """A value of no type that any field has."""


def public_records() -> dict[str, type]:
    """Every public dataclass that takes something by position, by name."""
    packages = [one.name for one in pkgutil.walk_packages(fairtrial.__path__, "fairtrial.") if one.ispkg]
    found = {}
    for package in ("fairtrial", *packages):
        module = import_module(package)
        for name in getattr(module, "__all__", ()):
            record = getattr(module, name)
            if isinstance(record, type) and is_dataclass(record) and first_of(record) is not None:
                found[name] = record
    return found


def first_of(record: type) -> str | None:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((one.name for one in inspect.signature(record).parameters.values() if one.kind in by_position), None)


def made_with(record: Any, value: object) -> object:
    """Make a record with this first field; the others that it needs are None."""
    _first, *others = inspect.signature(record).parameters.values()
    return record(
        value, **{one.name: None for one in others if one.default is one.empty and one.kind != one.VAR_KEYWORD}
    )


def refusal(record: type) -> str:
    try:
        made_with(record, Wrong())
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


RECORDS = public_records()


def test_every_public_record_refuses_a_first_field_of_another_type() -> None:
    first = {name: first_of(record) or "" for name, record in RECORDS.items()}
    accepting = [name for name in sorted(RECORDS.keys() - EXEMPT.keys()) if first[name] not in refusal(RECORDS[name])]
    assert len(RECORDS) > 100
    assert accepting == []


def test_only_records_that_need_it_are_exempt() -> None:
    assert sorted(EXEMPT.keys() - RECORDS.keys()) == []


@pytest.mark.parametrize(("name", "value"), [("Experiment", 5), ("Label", "r1"), ("RunRecord", None)])
def test_the_refusal_names_record_field_and_value(name: str, value: object) -> None:
    record = RECORDS[name]
    with pytest.raises(TypeError, match=rf"^{first_of(record)} of {name} must be \w+ \(got {value!r}\)$"):
        made_with(record, value)


# `fairtrial.sync`: the synchronous versions of async functions.


def upper(text: str) -> str:
    return text.upper()


def loop() -> sync.EvalLoop[str, str, str]:
    return sync.EvalLoop(
        requests=InMemoryMailbox("requests", EvalRequest),
        loop=upper,
        evaluator=exact_match,
        results=InMemoryMailbox("results", EvalReply),
    )


CALLS: dict[str, Callable[[], Any]] = {
    "EvalLoop.run": lambda: loop().run(max_iterations=1),
    "EvalLoop.execute": lambda: loop().execute(EvalRequest(sample=Sample("s", "a", "A"))),
    "MainLoop.run": lambda: sync.MainLoop(upper, requests=InMemoryMailbox("inputs")).run(until_empty=True),
    "MainLoop.execute": lambda: sync.MainLoop(upper).execute("a"),
    "EvalSuite.run": lambda: sync.EvalSuite("letters", LETTERS, upper, exact_match).run(store="memory:"),
    "EvalSuite.rescore": lambda: sync.EvalSuite("letters", LETTERS, upper, exact_match).rescore("r", store="memory:"),
    "EvalSuite.stream": lambda: sync.EvalSuite("letters", LETTERS, upper, exact_match).stream(store="memory:"),
    "check_judge": lambda: sync.check_judge(fairtrial.llm_judge(fairtrial.ScriptedAdapter([]), "right")),
    "SessionStore.save": lambda: sync.SessionStore(InMemorySessionStore()).save("s", Session()),
    "SessionStore.load": lambda: sync.SessionStore(InMemorySessionStore()).load("s"),
    "SessionStore.delete": lambda: sync.SessionStore(InMemorySessionStore()).delete("s"),
    "submit_dataset": lambda: sync.submit_dataset(LETTERS, InMemoryMailbox("requests")),
    "collect_results": lambda: sync.collect_results(InMemoryMailbox("results"), 1),
    "evaluate": lambda: sync.evaluate(LETTERS, upper, exact_match),
}


def home(name: str) -> ModuleType:
    if name == "check_judge":
        return fairtrial.models.judges
    return fairtrial if name.startswith(("evaluate", "EvalSuite")) else fairtrial.fleet


@pytest.mark.proves("R155")
@pytest.mark.parametrize("run", [lambda call: asyncio.run(call()), trio.run], ids=["asyncio", "trio"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_inside_an_event_loop_is_refused_and_the_async_twin_is_named(name: str, run: Any) -> None:
    async def call() -> None:
        CALLS[name]()

    twin = f"{home(name).__name__}.{name}"
    said = (
        f"fairtrial.sync.{name} cannot be called inside an event loop, because it would block it\nawait {twin} instead"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(said)}$"):
        run(call)


@pytest.mark.proves("R155")
@pytest.mark.parametrize("name", CALLS)
def test_every_call_that_blocks_has_an_async_twin_with_the_same_parameters(name: str) -> None:
    def parameters(root: Any) -> list[str]:
        for part in name.split("."):
            root = getattr(root, part)
        return list(inspect.signature(root).parameters)

    assert parameters(sync) == parameters(home(name))
    assert set(sync.__all__) == {name.partition(".")[0] for name in CALLS}


@pytest.mark.proves("R155")
def test_loops_run_and_execute_and_their_sync_names_stay() -> None:
    working = loop()
    assert working.execute(EvalRequest(sample=Sample("s", "a", "A"))).passed
    assert_type(working.run(until_empty=True), None)
    working.run_sync(until_empty=True)
    main: sync.MainLoop[str, str] = sync.MainLoop(upper)
    response, session = main.execute("a")
    assert_type(response, PromptResponse[str])
    assert_type(session, Session)
    assert response.output == "A"


@pytest.mark.proves("R155")
def test_a_suite_runs_and_scores_again() -> None:
    suite: sync.EvalSuite[str, str, str] = sync.EvalSuite("letters", LETTERS, upper, exact_match)
    store = open_store("memory:")
    report = suite.run(store=store)
    assert_type(report, EvalReport[str])
    assert report.pass_rate == 0.5
    again = suite.rescore(report.run_id, negate(exact_match), store=store)
    assert [result.passed for result in again.results] == [False, True]
    assert sync.evaluate(LETTERS, upper, exact_match).pass_rate == 0.5


@pytest.mark.proves("R155")
def test_a_group_refuses_a_loop_that_blocks() -> None:
    async def group() -> None:
        await LoopGroup([loop()]).run()  # type: ignore[list-item]

    with pytest.raises(ConfigurationError, match=r"await fairtrial\.fleet\.EvalLoop\.run instead"):
        asyncio.run(group())


def test_the_module_is_loaded_only_where_it_is_imported(child: Any) -> None:
    assert child("import sys, fairtrial\nprint('fairtrial.sync' in sys.modules)") == "False"


def test_results_are_streamed_to_blocking_code_as_they_arrive() -> None:
    suite = fairtrial.EvalSuite("letters", LETTERS, upper, exact_match)
    assert sorted(result.output or "" for result in suite.stream_sync(store="memory:")) == ["A", "B"]
    blocking = sync.EvalSuite("letters", LETTERS, upper, exact_match)
    assert sorted(result.passed for result in blocking.stream(store="memory:")) == [False, True]


def test_a_stream_that_is_left_early_stops_its_run_which_can_be_resumed() -> None:
    store = open_store("memory:")
    suite = fairtrial.EvalSuite("letters", LETTERS, upper, exact_match)
    results = suite.stream_sync(store=store)
    first = next(results)
    results.close()  # type: ignore[attr-defined]  # a generator, though it does not say so
    report = suite.run_sync(store=store)
    assert report.run_id == first.key.run_id or report.total == 2
    assert report.total == 2


def test_a_judge_is_checked_by_blocking_code() -> None:
    judge = fairtrial.llm_judge(fairtrial.ScriptedAdapter([{"reason": "no", "rating": "poor"}] * 20), "It is right.")
    checked = fairtrial.models.judges.check_judge_sync(judge)
    assert not checked.passes_good_answer
    assert sync.check_judge(judge) == checked
