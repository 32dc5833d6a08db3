"""Reasoning in runs: interrupted and resumed, over a fleet, judged, cut off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairtrial import EvalConfig, EvalReport, EvalSuite, Sample, Score, Session, contains, open_store, scoring
from fairtrial.data.session import ChatMessage, Retrieved
from fairtrial.data.session.trajectory import Echo, Trajectory
from fairtrial.fleet import EvalLoop, EvalReply, EvalRequest, collect_results, submit_dataset
from fairtrial.integrations.model_server import CutOff, FaultRule, ModelServer, ParsedRequest, Reply, ToolCallReply
from fairtrial.integrations.model_server.faults import ReasoningNotReturned
from fairtrial.mailbox import InMemoryMailbox
from fairtrial.models import ResponseCache, ScriptedAdapter, Tool, agent_task
from fairtrial.models import judges as judges_package
from fairtrial.models.judges import checklist, label_judge, llm_judge, numeric_judge, pairwise_judge, panel
from fairtrial.runs.events import ResumeWarning
from fairtrial.scoring.evaluator import Case, resolve
from tests.fleet.build import until
from tests.fleet.processes import Processes
from tests.models.conversation_process import DATA, adapter_of, mailboxes
from tests.redis_server import RedisServer

SECRET = "the-thought-nobody-may-grade"
SCRIPT = str(Path(__file__).with_name("conversation_process.py"))


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["chat", "responses", "anthropic"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"snow in {city}"


def conversation(request: ParsedRequest) -> Reply:
    if request.turn == 3:
        return Reply("It snows everywhere.", reasoning=SECRET)
    call = ToolCallReply("weather", {"city": f"Oslo {request.turn}"}, thought_signature=f"c2ln{request.number}")
    return Reply(tool_calls=(call,), reasoning=f"{SECRET} {request.number}")


async def test_an_interrupted_run_that_is_resumed_gives_every_echo_back(style: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'runs.db'}"
    calls = 0
    reached = asyncio.Event()

    async def look(city: str) -> str:
        """The weather of a city."""
        nonlocal calls
        calls += 1
        if calls == 5:  # In the middle of the second conversation.
            reached.set()
            await asyncio.sleep(60)
        return f"snow in {city}"

    with ModelServer(conversation, faults=ReasoningNotReturned()) as server:
        cache = ResponseCache(tmp_path / "cache.db")
        adapter = adapter_of(style, server.base_url, cache=cache)
        agent = agent_task(adapter, tools=[Tool(look, name="weather")])
        suite = EvalSuite("snow", DATA, agent, contains, config=EvalConfig(max_concurrent=1))
        running = asyncio.create_task(suite.run(store=store))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.warns(ResumeWarning, match=r"trials have changed .*look\(calls\)$"):
            report = await suite.run(store=store)
        results = list(report.results)
        await adapter.aclose()
        cache.close()
        stats = server.stats()
    assert (report.status, report.pass_rate, len(results)) == ("finished", 1.0, len(DATA))
    assert (stats.by_fault, cache.hits) == ({}, 2)  # What had been answered before came with its echoes.
    check_kept(results)


async def test_a_fleet_gives_every_echo_back_and_its_results_keep_them(style: str) -> None:
    results = InMemoryMailbox("results", EvalReply)
    requests = InMemoryMailbox("requests", EvalRequest)
    with ModelServer(conversation, faults=ReasoningNotReturned()) as server:
        adapter = adapter_of(style, server.base_url)
        agent: Any = agent_task(adapter, tools=[Tool(weather, inline=True)])
        loop = EvalLoop(requests=requests, results=results, loop=agent, evaluator=contains)
        run_id = await submit_dataset(DATA, requests)
        working = asyncio.create_task(loop.run(until_empty=True))
        report = await collect_results(results, len(DATA), timeout_seconds=60, run_id=run_id)
        await working
        await adapter.aclose()
        stats = server.stats()
    found = list(report.results)
    assert (report.pass_rate, len(found), stats.by_fault) == (1.0, len(DATA), {})
    assert all(result.usage.reasoning_tokens > 0 for result in found)
    check_kept(found)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "hold").touch()
    with Processes(tmp_path, "") as made:
        yield made


async def held(folder: Path) -> int:
    """Wait until a process stays in the middle of a conversation; returns its id."""
    file = folder / "held"
    await until(lambda: file.exists() and bool(file.read_text()), 60)
    return int(file.read_text())


@pytest.mark.long
@pytest.mark.proves("R108")
async def test_a_run_that_is_killed_in_a_conversation_is_resumed_with_every_echo(
    style: str, tmp_path: Path, processes: Processes
) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    with ModelServer(conversation, faults=ReasoningNotReturned()) as server:
        command = (SCRIPT, "run", style, server.base_url, str(tmp_path))
        killed = processes._start("run", *command)
        await held(tmp_path)
        (run,) = store.runs(suite="snow")
        await until(lambda: any(store.done(run.run_id)))  # The first conversation is stored, the second under way.
        killed.kill()
        killed.wait()
        resumed = processes._start("run", *command)
        out, _ = await asyncio.to_thread(resumed.communicate, timeout=60)
        stats, asked = server.stats(), len(server.requests())
    assert out.split() == ["finished", "2"], processes.logs()  # What had been answered came from the cache.
    assert (stats.by_fault, asked) == ({}, 4 * len(DATA))
    (run,) = store.runs(suite="snow")
    check_kept(list(EvalReport(store, run).results))


@pytest.mark.long
@pytest.mark.proves("R60", "R61")
@pytest.mark.parametrize("style", ["anthropic"])  # What travels is the same in all of them; here it is signed.
async def test_a_fleet_on_redis_gives_every_echo_back_though_a_worker_is_killed_in_a_conversation(
    style: str, tmp_path: Path, processes: Processes, redis_server: RedisServer
) -> None:
    requests, results = mailboxes(redis_server.url)
    with ModelServer(conversation, faults=ReasoningNotReturned()) as server:
        command = (SCRIPT, "work", style, server.base_url, str(tmp_path), redis_server.url)
        workers = [processes._start("worker", *command) for _ in range(2)]
        async with requests, results:
            await submit_dataset(DATA, requests)
            victim = await held(tmp_path)
            (killed,) = [worker for worker in workers if worker.pid == victim]
            killed.kill()
            killed.wait()
            report = await collect_results(results, len(DATA), timeout_seconds=60)
        stats = server.stats()
    found = list(report.results)
    assert (report.pass_rate, len(found), stats.by_fault) == (1.0, len(DATA), {}), processes.logs()
    check_kept(found)


def check_kept(results: list[Any]) -> None:
    for result in results:
        spoken = [message for message in result.trajectory.messages if message.role == "assistant"]
        assert len(spoken) == 4
        assert all(message.reasoning.startswith(SECRET) and message.echo is not None for message in spoken)


async def test_the_report_says_how_many_answers_were_cut_off(tmp_path: Path) -> None:
    rule = FaultRule(CutOff(2), when="[01]\\?")
    with ModelServer("It snows everywhere.", faults=rule) as server:
        adapter = adapter_of("chat", server.base_url)
        suite = EvalSuite("snow", DATA, agent_task(adapter), contains)
        report = await suite.run(store=f"sqlite:///{tmp_path / 'runs.db'}")
        await adapter.aclose()
    assert (report.cut_off_calls, sum(result.cut_off_calls for result in report.results)) == (2, 2)
    assert "2 answers were cut off by a token limit" in str(report)


EVALUATORS: dict[str, Callable[[], Any]] = {
    "adapt": lambda: scoring.adapt(contains),
    "all_of": lambda: scoring.all_of(contains, scoring.exact_match),
    "all_tools_succeeded": scoring.all_tools_succeeded,
    "any_of": lambda: scoring.any_of(contains, scoring.exact_match),
    "bleu": scoring.bleu,
    "chrf": scoring.chrf,
    "composite": lambda: scoring.composite(contains, scoring.exact_match),
    "contains": lambda: scoring.contains,
    "exact_match": lambda: scoring.exact_match,
    "fuzzy_match": scoring.fuzzy_match,
    "json_correctness": lambda: scoring.json_correctness({"not": {"required": ["reasoning"]}}),
    "json_diff": scoring.json_diff,
    "json_schema": lambda: scoring.json_schema({"not": {"required": ["reasoning"]}}),
    "json_subset": lambda: scoring.json_subset,
    "matches": lambda: scoring.matches(SECRET),
    "math_equal": scoring.math_equal,
    "multiple_choice": lambda: scoring.multiple_choice,
    "negate": lambda: scoring.negate(contains),
    "one_of": lambda: scoring.one_of,
    "pii_leakage": scoring.pii_leakage,
    "rouge": scoring.rouge,
    "slice_contains": lambda: scoring.slice_contains(ChatMessage, lambda message: SECRET in message.text),
    "squad": scoring.squad,
    "threshold": lambda: scoring.threshold(contains, 0.5),
    "token_usage_under": lambda: scoring.token_usage_under(10),
    "tool_call_count": lambda: scoring.tool_call_count("weather"),
    "tool_called": lambda: scoring.tool_called("weather"),
    "tool_calls_match": lambda: scoring.tool_calls_match(["weather"]),
    "tool_correctness": lambda: scoring.tool_correctness(["weather"]),
    "tool_not_called": lambda: scoring.tool_not_called("weather"),
    "weighted": lambda: scoring.weighted((contains, 1.0)),
    "within_tolerance": lambda: scoring.within_tolerance(0.1),
}
JUDGES: dict[str, Callable[[ScriptedAdapter], Any]] = {
    "answer_correctness": judges_package.answer_correctness,
    "answer_relevance": lambda model: judges_package.answer_relevance(model, model),
    "bias": judges_package.bias,
    "checklist": lambda model: checklist(model, ["Is it right?"]),
    "context_precision": judges_package.context_precision,
    "context_recall": judges_package.context_recall,
    "faithfulness": judges_package.faithfulness,
    "goal_reached": judges_package.goal_reached,
    "hallucination": judges_package.hallucination,
    "kept_role": judges_package.kept_role,
    "label_judge": lambda model: label_judge(model, "Good?", labels=["yes", "no"], passing=["yes"]),
    "llm_judge": lambda model: llm_judge(model, "Good?"),
    "numeric_judge": lambda model: numeric_judge(model, "Good?"),
    "pairwise_judge": lambda model: pairwise_judge(model, "Better?"),
    "panel": lambda model: panel(llm_judge(model, "Good?"), llm_judge(model, "Short?")),
    "remembered": judges_package.remembered,
    "rubric": lambda model: judges_package.rubric(model, {"Good.": 1}),
    "semantic_similarity": judges_package.semantic_similarity,
    "short_answer_judge": judges_package.short_answer_judge,
    "summarization": judges_package.summarization,
    "task_completion": judges_package.task_completion,
    "toxicity": judges_package.toxicity,
}


def test_every_evaluator_and_judge_is_tried_here() -> None:
    made = {name for name in scoring.__all__ if name.islower()} - {
        "evaluator",
        "extract_choice",
        "golden_set",
        "replay",
        "resolve",
    }
    assert set(EVALUATORS) == made
    assert set(JUDGES) == {name for name in judges_package.__all__ if name.islower()} - {
        "check_judge",
        "check_judge_sync",
        "short_answer_summary",
        "user_check",  # It reads what the user said, and there is none.
    }


def case_with(thought: str, *, whole: bool) -> Case:
    """A trial whose messages, output among them, have this reasoning."""
    echo = Echo("p", "f", json.dumps({"thinking": thought}))
    message = ChatMessage("assistant", "It snows.", reasoning=thought, echo=echo)
    session = Session()
    session.record(ChatMessage("user", "Where?"))
    session.record(message)
    session.record(Retrieved("Where?", ("It snows.",)))
    output = Trajectory((message,)) if whole else message
    return Case(Sample("s", "Where?", SECRET), output, session.view())


async def scored(evaluator: Any, case: Case) -> str:
    """The score as text, or what was wrong with the output."""
    try:
        found = await resolve(evaluator).score(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert isinstance(found, Score)
    return repr(found)


@pytest.mark.proves("R141")
@pytest.mark.parametrize("whole", [False, True], ids=["message", "trajectory"])
@pytest.mark.parametrize("name", EVALUATORS)
async def test_no_evaluator_scores_reasoning_as_the_answer(name: str, whole: bool) -> None:
    with_thought = await scored(EVALUATORS[name](), case_with(SECRET, whole=whole))
    without = await scored(EVALUATORS[name](), case_with("", whole=whole))
    assert with_thought == without


@pytest.mark.proves("R141")
@pytest.mark.parametrize("whole", [False, True], ids=["message", "trajectory"])
@pytest.mark.parametrize("name", JUDGES)
async def test_no_judge_is_shown_reasoning(name: str, whole: bool) -> None:
    model = ScriptedAdapter(lambda messages: "no verdict at all")
    case = case_with("a thought of its own", whole=whole)
    await scored(JUDGES[name](model), case)
    asked = "".join(message.text for call in model.calls for message in call.messages)
    assert "It snows." in asked
    assert "a thought of its own" not in asked
    assert "thinking" not in asked


async def test_an_evaluator_that_asks_for_reasoning_by_name_gets_it() -> None:
    def thoughtful(trajectory: Trajectory) -> bool:
        return any(message.reasoning == SECRET for message in trajectory.messages)

    assert "passed=True" in await scored(thoughtful, case_with(SECRET, whole=False))
