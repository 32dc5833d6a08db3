"""A conversation with tools and reasoning, in a process of its own, which may be killed in the middle of it.

conversation_process.py run STYLE MODEL_URL FOLDER
conversation_process.py work STYLE MODEL_URL FOLDER REDIS_URL

`run` runs a suite with a store and a response cache in FOLDER, `work` serves requests on Redis. Whoever removes
FOLDER/hold at the fifth call of the tool stays there, and writes FOLDER/held.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from fairtrial import Dataset, EvalConfig, EvalSuite, contains
from fairtrial.fleet import EvalLoop, EvalLoopConfig
from fairtrial.mailbox import DLQPolicy, RedisMailbox
from fairtrial.models.agent import agent_task
from fairtrial.models.cache import ResponseCache
from fairtrial.models.limiter import Unlimited
from fairtrial.models.sdk import SdkAdapter
from fairtrial.models.tools import Tool

DATA = Dataset.of([(f"Where does it snow, {n}?", "everywhere") for n in range(4)])


def adapter_of(style: str, model_url: str, **options: Any) -> SdkAdapter:
    """An adapter of one of the three protocols."""
    given: Any = {"api_key": "test", "limiter": Unlimited(), **options}
    if style == "anthropic":
        from fairtrial.models.anthropic import AnthropicAdapter  # Here: loading an SDK takes long.

        return AnthropicAdapter("m", base_url=model_url, **given)
    from fairtrial.models.openai import OpenAIAdapter

    return OpenAIAdapter("m", base_url=f"{model_url}/v1", api=style, **given)  # type: ignore[arg-type]


def mailboxes(url: str) -> tuple[RedisMailbox[Any], RedisMailbox[Any]]:
    """The mailboxes for requests and results."""
    return (
        RedisMailbox("snow.requests", client=url, sweep_seconds=0.1),
        RedisMailbox("snow.results", client=url, sweep_seconds=0.1),
    )


def weather_tool(folder: Path) -> Tool:
    """The tool, which may be held."""
    calls = 0

    async def weather(city: str) -> str:
        """The weather of a city."""
        nonlocal calls
        calls += 1
        if calls == 5:
            try:
                (folder / "hold").unlink()
            except FileNotFoundError:
                pass
            else:
                (folder / "held").write_text(str(os.getpid()))
                await asyncio.sleep(600)
        return f"snow in {city}"

    return Tool(weather)


def main(role: str, style: str, model_url: str, folder: Path, redis_url: str = "") -> None:
    tool = weather_tool(folder)
    if role == "run":
        cache = ResponseCache(folder / "cache.db")
        agent = agent_task(adapter_of(style, model_url, cache=cache), tools=[tool])
        suite = EvalSuite("snow", DATA, agent, contains, config=EvalConfig(max_concurrent=1), version="1")
        print(suite.run_sync(store=f"sqlite:///{folder / 'runs.db'}").status, cache.hits)
        return
    requests, results = mailboxes(redis_url)
    EvalLoop(
        requests=requests,
        results=results,
        loop=agent_task(adapter_of(style, model_url), tools=[tool]),
        evaluator=contains,
        config=EvalLoopConfig(concurrency=2, lease_seconds=1, dlq=DLQPolicy(base_seconds=0.1, max_seconds=0.2)),
    ).run_sync()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
