from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import Attachment, Dataset, EvalSuite, Experiment, Sample, ToolCall, TrialKey
from fairtrial.data import BlobFolder
from fairtrial.data.session import ToolInvoked
from fairtrial.errors import ConfigurationError, MissingExtraError, ToolServerError
from fairtrial.models import AgentEnded, ResponseCache, ScriptedAdapter, agent_task, mcp_connection, mcp_tools
from fairtrial.models import mcp as mcp_module
from fairtrial.models.mcp import McpServer
from fairtrial.models.tools import as_tools
from fairtrial.runs.callables import HOOK
from fairtrial.scoring import exact_match, resolve
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task
from tests.models import mcp_faults
from tests.models.test_agent import run

FAULTS = str(Path(__file__).with_name("mcp_faults.py"))


@pytest.fixture(autouse=True)
def quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the SDK before any time limit, and give servers that hang less time to end by themselves."""
    mcp_connection.import_sdk()
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.3)
    monkeypatch.setattr("mcp.client.stdio.FORCE_KILL_TIMEOUT", 0.3)


@pytest.fixture(autouse=True)
def no_orphans(tmp_path: Path) -> Iterator[None]:
    """Kill servers that a test that failed has left behind."""
    yield
    for pid in filter(is_running, pids(tmp_path)):
        os.kill(pid, signal.SIGKILL)


def server(folder: Path, fault: str = "", **options: Any) -> McpServer:
    return mcp_tools([sys.executable, FAULTS, str(folder), fault], **{"start_seconds": 60.0, **options})


def pids(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.pid")]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def reached(check: Callable[[], bool]) -> bool:
    """Wait until something is true, or for 100 s; returns whether it is."""
    for _ in range(10_000):
        if check():
            return True
        await anyio.sleep(0.01)
    return False


async def all_gone(folder: Path) -> bool:
    """Wait until no server runs; helpers of a server that was killed are reaped a little later by another process."""
    return await reached(lambda: not any(map(is_running, pids(folder))))


def script(*calls: str) -> ScriptedAdapter:
    """A model that calls these tools, one in each turn, and then answers."""
    return ScriptedAdapter([*(ToolCall(name, {}, f"c{at}") for at, name in enumerate(calls)), "done"])


async def error_of(task: Any, outcome: str = "task_error", **rules: Any) -> str:
    """Return the error of a trial in which the task fails."""
    chosen = TrialRules((resolve_task(task),), (Experiment(),), resolve(exact_match), **rules)
    result = await run_trial(chosen, TrialKey("r", "baseline", "s"), 0, Sample("s", "go", "done"), 0)
    assert result.outcome == outcome
    return result.error or ""


async def test_an_agent_uses_the_tools_of_a_server_that_ends_with_the_trial(tmp_path: Path) -> None:
    call = ToolCall("add_numbers", {"a": 2, "b": 3}, "c1")
    adapter = ScriptedAdapter([call, "done"])
    result, session = await run(agent_task(adapter, tools=[server(tmp_path)]))
    assert (result.outcome, result.passed) == ("scored", True)
    (invoked,) = session[ToolInvoked].all()
    assert (invoked.name, invoked.params, invoked.result, invoked.error) == ("add_numbers", call.arguments, "5", None)
    shown = next(tool for tool in adapter.calls[0].tools if tool.name == "add_numbers")
    assert (shown.description, shown.parameters) == ("Add two numbers.", mcp_faults.NUMBERS)
    assert adapter.calls[1].messages[-1].text == "5"
    assert len(pids(tmp_path)) == 1
    assert not is_running(pids(tmp_path)[0])


async def test_arguments_that_do_not_fit_the_schema_do_not_reach_the_server(tmp_path: Path) -> None:
    adapter = ScriptedAdapter([ToolCall("add_numbers", {"a": "two", "b": 3}, "c1"), "done"])
    _, session = await run(agent_task(adapter, tools=[server(tmp_path)]))
    assert session[ToolInvoked].all()[0].error == "bad arguments: $.a: 'two' is not of type 'integer'"
    assert not (tmp_path / "calls").exists()


async def test_each_trial_has_a_server_of_its_own_and_calls_of_a_turn_share_it(tmp_path: Path) -> None:
    calls = [ToolCall("count", {}, "c1"), ToolCall("count", {}, "c2")]
    task = agent_task(
        ScriptedAdapter(lambda messages: calls if len(messages) == 1 else "done"), tools=[server(tmp_path)]
    )
    dataset = Dataset.of({"one": "done", "two": "done"})
    report = await EvalSuite("counts", dataset, task, exact_match).run(store="memory:")
    found = [sorted(call.result for call in result.session[ToolInvoked].all()) for result in report.results]
    assert found == [["1", "2"], ["1", "2"]]
    assert len(pids(tmp_path)) == 2


async def test_a_shared_server_is_started_once_and_ends_after_the_last_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_connection, "_IDLE_SECONDS", 600.0)
    shared = server(tmp_path, shared=True)
    task = agent_task(
        ScriptedAdapter(lambda messages: [ToolCall("pid", {})] if len(messages) == 1 else "done"), tools=[shared]
    )
    dataset = Dataset.of({"one": "done", "two": "done", "three": "done"})
    report = await EvalSuite("pids", dataset, task, exact_match).run(store="memory:")
    found = {call.result for result in report.results for call in result.session[ToolInvoked].all()}
    assert found == {str(pid) for pid in pids(tmp_path)}
    assert len(found) == 1
    monkeypatch.setattr(mcp_connection, "_IDLE_SECONDS", 0.0)
    await run(task)
    assert await all_gone(tmp_path)
    assert len(pids(tmp_path)) == 1


async def test_a_shared_server_that_died_is_started_again_by_the_next_trial(tmp_path: Path) -> None:
    shared = server(tmp_path, shared=True)
    result, _ = await run(agent_task(script("die"), tools=[shared]))
    assert result.outcome == "task_error"
    result, _ = await run(agent_task(script("pid"), tools=[shared]))
    assert result.passed
    assert len(pids(tmp_path)) == 2
    await shared.shared_servers[asyncio.get_running_loop()].stop()
    assert not any(map(is_running, pids(tmp_path)))


def test_a_shared_server_ends_with_its_event_loop(tmp_path: Path) -> None:
    shared = server(tmp_path, shared=True)
    for count in (1, 2):  # The second event loop does not use what is left of the first one.
        asyncio.run(run(agent_task(script("pid"), tools=[shared])))
        assert len(pids(tmp_path)) == count
        assert not any(map(is_running, pids(tmp_path)))


def test_a_shared_server_ends_with_the_process(tmp_path: Path, child: Callable[..., str]) -> None:
    code = """
import sys
import time
import mcp.client.stdio as stdio
from fairtrial import Dataset, EvalSuite, ToolCall, exact_match
from fairtrial.models import ScriptedAdapter, agent_task, mcp_tools

stdio.PROCESS_TERMINATION_TIMEOUT = stdio.FORCE_KILL_TIMEOUT = 0.3
tools = mcp_tools([sys.executable, *sys.argv[1:], "stubborn"], shared=True)
task = agent_task(ScriptedAdapter([ToolCall("pid", {}), "done"]), tools=[tools])
print(EvalSuite("pids", Dataset.of({"one": "done"}), task, exact_match).run_sync(store="memory:").pass_rate)
"""
    assert child(code, FAULTS, str(tmp_path)) == "1.0"
    assert len(pids(tmp_path)) == 2
    assert not any(map(is_running, pids(tmp_path)))


async def test_the_list_of_tools_may_have_pages_and_some_of_them_are_offered(tmp_path: Path) -> None:
    async with server(tmp_path, "split").open() as tools:
        assert [tool.name for tool in tools] == [*mcp_faults.NAMES, "add_numbers"]
    async with server(tmp_path, tools=["fail", "add.numbers"], prefix="shop_").open() as tools:
        assert [tool.name for tool in tools] == ["shop_fail", "shop_add_numbers"]
    with pytest.raises(ConfigurationError, match="has no tool 'pay'; it has: pid, count"):
        async with server(tmp_path, tools=["pay"]).open():
            pass


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ("fail", "no such order"),
        ("refuse", "not today"),
        ("big", "its result must be at most 1 MiB (got 2)"),
    ],
)
async def test_errors_of_tools_are_told_to_the_model(
    tool: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_module, "_MAX_RESULT_BYTES", 1 << 20)
    adapter = script(tool)
    result, session = await run(agent_task(adapter, tools=[server(tmp_path)]))
    assert result.passed
    assert session[ToolInvoked].all()[0].error == problem
    told = adapter.calls[1].messages[-1]
    assert (told.text, told.failed) == (f"Error: {problem}", True)


@pytest.mark.parametrize("tool", ["hang", "notify", "line"])
async def test_a_call_that_hangs_or_floods_ends_at_its_limit_and_so_does_the_server(tool: str, tmp_path: Path) -> None:
    result, session = await run(agent_task(script(tool), tools=[server(tmp_path, call_seconds=0.5)]))
    assert result.passed
    assert session[ToolInvoked].all()[0].error == "the server did not answer within 0.5 s"
    assert not any(map(is_running, pids(tmp_path)))


async def test_a_server_that_writes_many_messages_to_standard_error_is_not_held_up(tmp_path: Path) -> None:
    _, session = await run(agent_task(script("errors"), tools=[server(tmp_path)]))
    assert session[ToolInvoked].all()[0].result == "written"


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ("die", "ended the connection at a call of 'die'"),
        ("die", "cannot go on: disk full"),
        ("lie", "broke the protocol at a call of 'lie': RuntimeError: Invalid structured content"),
        ("damaged", "the tool 'damaged' returned damaged base64"),
        ("fake", "the tool 'fake' returned image/png that is no picture"),
        ("picture", "pass the same BlobFolder as mcp_tools(blobs=...)"),
    ],
)
async def test_a_server_that_fails_is_an_error_of_the_trial_and_not_of_the_agent(
    tool: str, problem: str, tmp_path: Path
) -> None:
    result, session = await run(agent_task(script(tool), tools=[server(tmp_path)]))
    assert result.outcome == "task_error"
    assert result.error is not None
    assert problem in result.error
    assert session[AgentEnded].all()[0].reason == "error"
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.parametrize(("fault", "words"), [("", "cannot go on: disk full"), ("ends", "cannot start: no database")])
async def test_the_last_words_of_a_server_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    read = mcp_connection._LastWords._read

    def read_late(words: mcp_connection._LastWords, reading: int) -> None:
        deadline = time.monotonic() + 30
        while (not pids(tmp_path) or any(map(is_running, pids(tmp_path)))) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        read(words, reading)

    monkeypatch.setattr(mcp_connection._LastWords, "_read", read_late)
    assert words in await error_of(agent_task(script("die"), tools=[server(tmp_path, fault)]))


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("ends", "cannot start: no database"),
        ("version", "cannot be started"),
        ("schema", "the tool 'odd' has an unusable schema"),
        ("circle", "the tool 'odd' has an unusable schema"),
        ("shape", "cannot list its tools"),
        ("twice", "lists several tools with the same name"),
        ("pages", "lists more than 1000 tools or 100 pages of them"),
    ],
)
async def test_a_server_that_cannot_be_used_is_an_error_before_the_model_is_called(
    fault: str, problem: str, tmp_path: Path
) -> None:
    adapter = script()
    assert problem in await error_of(agent_task(adapter, tools=[server(tmp_path, fault)]))
    assert not adapter.calls
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.parametrize("fault", ["silent", "garbage"])
async def test_a_server_that_does_not_answer_is_stopped_at_the_limit(fault: str, tmp_path: Path) -> None:
    with pytest.raises(ToolServerError, match=r"did not answer within 0\.5 s of its start"):
        async with server(tmp_path, fault, start_seconds=0.5).open():
            pass
    assert await all_gone(tmp_path)


async def test_a_command_that_does_not_exist_is_an_error_of_the_trial() -> None:
    error = await error_of(agent_task(script(), tools=[mcp_tools("no-such-program --now")]))
    assert "the MCP server no-such-program --now cannot be started\nFileNotFoundError" in error


@pytest.mark.parametrize("when", ["start", "call"])
@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_trial_that_is_cancelled_leaves_no_server_behind(how: str, when: str, tmp_path: Path) -> None:
    tools = server(tmp_path, "silent" if when == "start" else "", call_seconds=600.0, start_seconds=600.0)
    scope = anyio.CancelScope()

    async def trial() -> None:
        with scope:
            await run(agent_task(script("hang"), tools=[tools]))

    task = asyncio.create_task(trial())
    assert await reached(lambda: bool(pids(tmp_path)) and (when == "start" or (tmp_path / "calls").exists()))
    if how == "task":
        task.cancel()
    else:
        scope.cancel()
    await asyncio.wait([task])
    assert await all_gone(tmp_path)


async def test_a_trial_that_reaches_its_time_limit_leaves_no_server_behind(tmp_path: Path) -> None:
    tools = server(tmp_path, call_seconds=600.0)
    error = await error_of(agent_task(script("hang"), tools=[tools]), "timeout", timeout_seconds=3.0)
    assert "did not finish within 3 s" in error
    assert await all_gone(tmp_path)


async def test_a_server_that_ignores_its_end_is_killed_with_its_helpers(tmp_path: Path) -> None:
    result, _ = await run(agent_task(script("pid"), tools=[server(tmp_path, "stubborn")]))
    assert result.passed
    assert len(pids(tmp_path)) == 2
    assert await all_gone(tmp_path)


async def test_a_trial_that_is_cancelled_twice_ends_after_its_server(tmp_path: Path) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def trial() -> None:
        async with server(tmp_path, "stubborn").open():
            entered.set()
            await left.wait()

    task = asyncio.create_task(trial())
    await entered.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()
    assert len(pids(tmp_path)) == 2
    assert not any(map(is_running, pids(tmp_path)))


def test_a_run_on_trio_is_refused_before_a_server_is_started(tmp_path: Path) -> None:
    async def opened() -> None:
        async with server(tmp_path).open():
            pass

    with pytest.raises(ConfigurationError, match=r"mcp_tools\(\) needs asyncio"):
        anyio.run(opened, backend="trio")
    assert not pids(tmp_path)


async def test_pictures_and_files_are_passed_on(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path / "blobs")
    picture = Attachment.of(mcp_faults.png(), media_type="image/png")
    adapter = script("picture", "wrong_type", "file", "nothing", "data")
    result, session = await run(agent_task(adapter, tools=[server(tmp_path, blobs=blobs)]))
    assert result.passed
    told = [message.content for message in adapter.calls[-1].messages if message.role == "tool"]
    assert told == [("a chart", picture), (picture,), "in a file\nmore: file:///b.txt", "", '{"price":2.5}']
    assert blobs.get(picture) == mcp_faults.png()
    assert session[ToolInvoked].all()[0].result[1]["sha256"] == picture.sha256


async def test_a_recorded_trial_is_replayed_without_the_server(tmp_path: Path) -> None:
    blobs, path = BlobFolder(tmp_path / "blobs"), tmp_path / "results.db"
    calls = [[ToolCall("count", {}, "c1"), ToolCall("count", {}, "c2")], ToolCall("picture", {}), ToolCall("fail", {})]
    told: list[list[Any]] = []
    for policy in ("read-write", "read-write", "read"):
        adapter = ScriptedAdapter([*calls, "done"])
        tools = server(tmp_path, cache=ResponseCache(path, policy), blobs=blobs)
        result, session = await run(agent_task(adapter, tools=[tools]))
        assert result.passed
        assert session[ToolInvoked].all()[-1].error == "no such order"
        told.append([(message.name, message.content) for message in adapter.calls[-1].messages])
        assert len(adapter.calls[0].tools) == len(mcp_faults.NAMES) + 1
    assert told[0] == told[1] == told[2]
    assert len(pids(tmp_path)) == 1


async def test_a_call_that_is_not_recorded_needs_the_server_and_finds_it_in_the_state_of_the_recording(
    tmp_path: Path,
) -> None:
    def tools(policy: Any) -> list[McpServer]:
        return [server(tmp_path, cache=ResponseCache(tmp_path / "results.db", policy))]

    await run(agent_task(script("count", "fail"), tools=tools("read-write")))
    result, _ = await run(agent_task(script("count", "fail", "count"), tools=tools("read")))
    assert result.outcome == "task_error"
    assert "is not recorded in" in str(result.error)
    assert len(pids(tmp_path)) == 1
    _, session = await run(agent_task(script("count", "fail", "count"), tools=tools("read-write")))
    assert [call.result for call in session[ToolInvoked].all()] == ["1", None, "3"]
    assert len(pids(tmp_path)) == 2


async def test_the_same_call_after_other_calls_is_another_recording(tmp_path: Path) -> None:
    tools = [server(tmp_path, cache=ResponseCache(tmp_path / "results.db"))]
    await run(agent_task(script("count"), tools=tools))
    _, session = await run(agent_task(script("fail", "count"), tools=tools))
    assert session[ToolInvoked].all()[-1].result == "2"


def test_a_server_is_part_of_the_identity_of_a_run_and_its_environment_is_not(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text("one")

    def identity(**options: Any) -> Any:
        return getattr(mcp_tools([sys.executable, str(program)], **options), HOOK)()

    before = identity()
    assert identity(env={"KEY": "secret"}) == before
    assert identity(prefix="x") != before
    program.write_text("two")
    assert identity() != before
    assert getattr(mcp_tools("http://me:secret@localhost/mcp?key=secret"), HOOK)()["address"] == "http://localhost/mcp"


def test_a_server_can_be_sent_to_another_process(tmp_path: Path) -> None:
    shared = server(tmp_path, shared=True, env={"A": "b"})
    assert shared.shared_servers == {}
    copy = pickle.loads(pickle.dumps(shared))
    assert (copy.command, copy.env, copy.shared) == (shared.command, {"A": "b"}, True)


@pytest.mark.parametrize(
    ("given", "options", "problem"),
    [
        ("", {}, "must be a command, such as 'python server.py', or an http"),
        ("ws://localhost/mcp", {}, "must be a command"),
        ("python server.py", {"headers": {"A": "b"}}, "headers are for a server at an address"),
        ("http://localhost/mcp", {"env": {"A": "b"}}, "env and cwd are for a server that is started"),
        ("http://localhost/mcp", {"call_seconds": 0}, "must be more than 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        mcp_tools(given, **options)


def test_a_server_where_only_functions_can_be_tools_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"a tool must be a function \(got <McpServer python server\.py>\)"):
        as_tools([mcp_tools("python server.py")])  # type: ignore[list-item]


async def test_tools_of_two_servers_with_the_same_name_are_refused(tmp_path: Path) -> None:
    error = await error_of(agent_task(script(), tools=[server(tmp_path), server(tmp_path)]))
    assert "the names of tools must be unique (got 'pid' twice)" in error
    assert "mcp_tools(..., prefix=...)" in error


def test_the_message_without_the_sdk_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"fairtrial\[mcp\]"):
        mcp_tools("python server.py")
