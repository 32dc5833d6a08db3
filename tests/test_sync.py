"""`fairtrial.sync`: the synchronous versions of async functions."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, assert_type

import pytest
import trio

import fairtrial
import fairtrial.models.judges
from fairtrial import ConfigurationError, Dataset, EvalReport, Sample, Session, exact_match, negate, open_store, sync
from fairtrial.fleet import EvalReply, EvalRequest, InMemorySessionStore, LoopGroup
from fairtrial.mailbox import InMemoryMailbox
from fairtrial.models import PromptResponse

LETTERS = Dataset.of({"a": "A", "b": "x"}, name="letters")


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
