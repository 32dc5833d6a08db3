"""MCP servers that others made, over standard input and output and over HTTP, and one made with the SDK."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fairtrial import Attachment, ToolCall
from fairtrial.data import BlobFolder
from fairtrial.data.session import ToolInvoked
from fairtrial.models import ScriptedAdapter, agent_task, mcp_tools
from fairtrial.models.mcp_connection import import_sdk
from tests.models.mcp_faults import png
from tests.models.test_agent import run
from tests.models.test_mcp import error_of, script
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
HEADERS = {"authorization": "Bearer test"}


@pytest.fixture(autouse=True)
def sdk() -> None:
    """Import it before any time limit."""
    import_sdk()


@contextmanager
def http_server() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.models.mcp_http"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with http_server() as address:
        yield address


@pytest.mark.long
async def test_an_agent_uses_two_public_servers_at_once(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        author = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *words], check=True, capture_output=True)

    git("init", "--initial-branch=main")
    git("commit", "--allow-empty", "--message=Add the engine")
    calls = [
        ToolCall("git_log", {"repo_path": str(tmp_path), "max_count": 1}, "c1"),
        ToolCall(
            "time_convert_time", {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "UTC"}, "c2"
        ),
        ToolCall("git_log", {"repo_path": str(tmp_path / "other")}, "c3"),
    ]
    adapter = ScriptedAdapter([calls, "done"])
    tools = [
        mcp_tools([sys.executable, "-m", "mcp_server_git", "--repository", str(tmp_path)], tools=["git_log"]),
        mcp_tools([sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"], prefix="time_"),
    ]
    result, session = await run(agent_task(adapter, tools=tools), timeout_seconds=120)
    assert (result.outcome, result.passed) == ("scored", True)
    log, noon, other = sorted(session[ToolInvoked].all(), key=lambda call: call.call_id)
    assert "Add the engine" in log.result
    assert "Ada" in log.result
    assert '"datetime": "20' in noon.result
    assert "T03:00:00" in noon.result
    assert str(other.error).startswith("Error executing tool git_log")
    assert {tool.name for tool in adapter.calls[0].tools} == {"git_log", "time_convert_time", "time_get_current_time"}


@contextmanager
def spreadsheets(folder: Path) -> Iterator[str]:
    """A public server for spreadsheets, over HTTP; yields its address."""
    port = free_port()
    settings = {**os.environ, "EXCEL_MCP_AUTH_TOKEN": "test", "EXCEL_FILES_PATH": str(folder)}
    command = [sys.executable, "-m", "excel_mcp", "streamable-http", "--port", str(port)]
    with subprocess.Popen(command, env=settings) as process:
        try:
            for _ in range(1200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


@pytest.mark.long
async def test_an_agent_uses_a_public_server_over_http(tmp_path: Path) -> None:
    where = {"path": "book.xlsx", "sheet": "Sheet1"}
    calls = [
        ToolCall("create_workbook", {"path": "book.xlsx"}, "c1"),
        ToolCall("write_range", {**where, "at": "A1", "rows": [["pens", 3], ["books", 5]]}, "c2"),
        ToolCall("read_range", where, "c3"),
        ToolCall("read_range", {**where, "sheet": "Other"}, "c4"),
    ]
    with spreadsheets(tmp_path) as address:
        tools = mcp_tools(address, headers=HEADERS, tools=["create_workbook", "write_range", "read_range"])
        result, session = await run(agent_task(ScriptedAdapter([*calls, "done"]), tools=[tools]), timeout_seconds=120)
    assert (result.outcome, result.passed) == ("scored", True)
    created, _, read, other = session[ToolInvoked].all()
    assert (tmp_path / "book.xlsx").exists()
    assert "book.xlsx" in created.result
    assert "books" in read.result
    assert "Other" in str(other.error)


async def test_an_agent_uses_a_server_at_an_address(address: str, tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    calls = [ToolCall("add", {"a": 2, "b": 3}, "c1"), ToolCall("chart", {}, "c2"), ToolCall("fail", {}, "c3")]
    adapter = ScriptedAdapter([calls, "done"])
    result, session = await run(agent_task(adapter, tools=[mcp_tools(address, headers=HEADERS, blobs=blobs)]))
    assert result.passed
    told = [message.content for message in adapter.calls[1].messages if message.role == "tool"]
    assert told[:2] == ["5", (Attachment.of(png(), media_type="image/png"),)]
    assert "no such order" in str(told[2])
    failed = [call.call_id for call in session[ToolInvoked].all() if not call.success]
    assert failed == ["c3"]


async def test_a_call_over_http_that_hangs_ends_at_its_limit(address: str) -> None:
    task = agent_task(script("hang"), tools=[mcp_tools(address, headers=HEADERS, call_seconds=0.5)])
    result, session = await run(task)
    assert result.passed
    assert session[ToolInvoked].all()[0].error == "the server did not answer within 0.5 s"


async def test_a_server_that_dies_at_a_call_over_http_is_an_error_of_the_trial() -> None:
    with http_server() as address:
        error = await error_of(agent_task(script("die"), tools=[mcp_tools(address, headers=HEADERS)]))
        assert f"the MCP server {address} ended the connection at a call of 'die'" in error
        error = await error_of(agent_task(script("die"), tools=[mcp_tools(address, headers=HEADERS)]))
        assert f"the MCP server {address} cannot be reached" in error


@pytest.mark.parametrize(
    ("tool", "problem"), [("flood", "sent more than 64 MiB in one answer"), ("bomb", "sent a compressed answer (gzip)")]
)
async def test_an_answer_over_http_that_does_not_fit_into_memory_is_not_read(
    address: str, tool: str, problem: str
) -> None:
    error = await error_of(agent_task(script(tool), tools=[mcp_tools(address, headers=HEADERS)]))
    assert f"the MCP server {address} " in error
    assert problem in error


async def test_a_server_that_refuses_the_authorization_is_an_error_of_the_trial(address: str) -> None:
    error = await error_of(agent_task(script(), tools=[mcp_tools(address, headers={"authorization": "Bearer no"})]))
    assert f"the MCP server {address} cannot be reached" in error
    assert "Bearer" not in error
