"""The adapter over the oldest and the newest SDKs that are allowed, each in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fairtrial
from fairtrial.integrations.model_server import ModelServer, ReasoningNotReturned, Reply, Script, ToolCallReply

SOURCE = Path(fairtrial.__file__).parents[1]
OLDEST = "1.109.1"
OTHERS = ("httpx", "httpx-aiohttp", "httpcore", "h11", "sniffio", "tqdm", "distro", "jiter")
PROGRAM = """
import asyncio, importlib.metadata, sys
from fairtrial.models.agent import agent_task
from fairtrial.models.openai import OpenAIAdapter
from fairtrial.models.tools import Tool, tool_message
from fairtrial.data.session.trajectory import ChatMessage

def look() -> str:
    return "snow"

async def main(url):
    spec = Tool(look).spec
    for api in ("chat", "responses"):
        for stream in (False, True):
            async with OpenAIAdapter("m", base_url=url, api_key="k", api=api, stream=stream) as adapter:
                asked = ChatMessage("user", "Weather?")
                first = (await adapter.complete([asked], tools=[spec])).message
                results = [tool_message(call, "snow") for call in first.tool_calls]
                last = await adapter.complete([asked, first, *results], tools=[spec])
                assert (first.reasoning, last.output) == ("Look.", "Snow."), (api, stream, first, last)
    print(importlib.metadata.version("openai"))

asyncio.run(main(sys.argv[1]))
"""


def test_the_oldest_sdk_tried_is_the_oldest_allowed() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["optional-dependencies"]["openai"] == [f"openai[aiohttp]>={OLDEST}"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", [OLDEST, "2.8.0", "2.54.0", "3.0.0"])
def test_an_agent_works_with_every_allowed_sdk(version: str, tmp_path: Path) -> None:
    folder = tmp_path / "sdk"
    # Only what other versions need and this environment lacks: everything would take a minute for each.
    wanted = [f"openai=={version}", *OTHERS]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([*install, *wanted], check=True, timeout=240)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    look = Reply(tool_calls=(ToolCallReply("look", {}, thought_signature="c2ln"),), reasoning="Look.")
    with ModelServer(Script((look, "Snow."), per="turn"), faults=ReasoningNotReturned()) as server:
        done = subprocess.run(
            [sys.executable, str(program), f"{server.base_url}/v1"],
            env={"PYTHONPATH": f"{folder}:{SOURCE}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout.strip()) == (0, version), done.stderr
