"""Conversations in runs, killed in the middle and resumed, and over a fleet; no model says the same twice."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairtrial import EvalReport, open_store
from fairtrial.data.session import ToolInvoked
from fairtrial.fleet import collect_results, submit_dataset
from fairtrial.integrations.model_server import ModelServer, ParsedRequest, Reply, ToolCallReply
from fairtrial.models import ConversationEnded
from tests.fleet.build import until
from tests.fleet.processes import Processes
from tests.models.conversation_process import DATA, mailboxes
from tests.redis_server import RedisServer

SCRIPT = str(Path(__file__).with_name("talk_process.py"))
CALLS = 3 + 6  # Of the user and of the agent, in each conversation.


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


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


def replies(request: ParsedRequest) -> Reply:
    """Both sides draw their words at random. The agent calls a tool twice before it answers; then the user ends."""
    drawn = f"{secrets.token_hex(8)} \u00fc\u2028\n"
    spoken = sum(message.role == "assistant" for message in request.messages)
    if request.model == "user":
        ends = (ToolCallReply("end_conversation", {"reason": drawn}),)
        return Reply(tool_calls=ends) if spoken == 2 else Reply(f"user {drawn}")
    asks = "user" in (request.messages[-1].role, request.messages[-3].role if len(request.messages) > 2 else "")
    return Reply(tool_calls=(ToolCallReply("weather", {"city": drawn}),)) if asks else Reply(f"agent {drawn}")


def sides(result: Any) -> tuple[list[str], list[str]]:
    """What the user and the agent said, as it is stored."""
    messages = result.trajectory.messages
    return tuple([m.text for m in messages if m.role == role and m.text] for role in ("user", "assistant"))  # type: ignore[return-value]


def check_turns(results: list[Any], requests: list[ParsedRequest]) -> None:
    """Compare the turns that are stored with those that both models were sent, byte for byte."""
    last = {}
    for request in requests:
        if request.model == "user":
            words = [message.text for message in request.messages if message.role != "system"]
            if len(words) == 5:  # The beginning, two messages and two answers.
                last[words[1]] = words
    assert len(results) == len(last) == len(DATA)
    for result in results:
        said, answered = sides(result)
        beginning, *talk = last[said[0]]
        assert beginning.startswith("(The conversation begins")
        assert (talk[0::2], talk[1::2]) == (said, answered)
        assert [call.name for call in result.session[ToolInvoked].all()] == ["weather"] * 4
        (end,) = result.session[ConversationEnded].all() or result.session.everything()[ConversationEnded].all()
        assert (end.reason, end.turns) == ("user", 2)


@pytest.mark.long
@pytest.mark.proves("R108")
async def test_a_conversation_that_was_killed_is_resumed_with_the_turns_of_both_sides(
    tmp_path: Path, processes: Processes
) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    with ModelServer(replies) as server:
        command = (SCRIPT, "run", server.base_url, str(tmp_path))
        killed = processes._start("run", *command)
        await held(tmp_path)
        killed.kill()
        killed.wait()
        (run,) = store.runs(suite="talk")
        stored = sum(byte.bit_count() for byte in store.done(run.run_id))
        before = len(server.requests())
        resumed = processes._start("run", *command)
        out, _ = await asyncio.to_thread(resumed.communicate, timeout=60)
        asked = list(server.requests())
    # What both sides had said in the interrupted conversation came from the cache: nothing was asked twice.
    assert out.split() == ["finished", str(before - CALLS * stored)], processes.logs()
    assert before % CALLS > 0
    assert len(asked) == CALLS * len(DATA)
    (run,) = store.runs(suite="talk")
    check_turns(list(EvalReport(store, run).results), asked)


@pytest.mark.long
@pytest.mark.proves("R60", "R61")
async def test_a_fleet_keeps_the_turns_of_both_sides_though_a_worker_is_killed_in_a_conversation(
    tmp_path: Path, processes: Processes, redis_server: RedisServer
) -> None:
    requests, results = mailboxes(redis_server.url)
    with ModelServer(replies) as server:
        command = (SCRIPT, "work", server.base_url, str(tmp_path), redis_server.url)
        workers = [processes._start("worker", *command) for _ in range(2)]
        async with requests, results:
            await submit_dataset(DATA, requests)
            victim = await held(tmp_path)
            (killed,) = [worker for worker in workers if worker.pid == victim]
            killed.kill()
            killed.wait()
            try:
                report = await collect_results(results, len(DATA), timeout_seconds=30)
            except TimeoutError:
                raise AssertionError(processes.logs()) from None
        asked = list(server.requests())
    assert report.pass_rate == 1.0, processes.logs()
    check_turns(list(report.results), asked)
