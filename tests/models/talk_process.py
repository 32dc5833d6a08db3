"""Conversations of an agent with a simulated user, in a process of its own, which may be killed in the middle of one.

talk_process.py run MODEL_URL FOLDER
talk_process.py work MODEL_URL FOLDER REDIS_URL

As `conversation_process.py`; the replies of both sides come from the model server, where "user" plays the user.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fairtrial import EvalConfig, EvalSuite
from fairtrial.fleet import EvalLoop, EvalLoopConfig
from fairtrial.mailbox import DLQPolicy
from fairtrial.models import agent_task, conversation_task, simulated_user
from fairtrial.models.cache import ResponseCache
from fairtrial.models.limiter import Unlimited
from fairtrial.models.openai import OpenAIAdapter
from fairtrial.scoring.score import Score
from tests.models.conversation_process import DATA, mailboxes, weather_tool


def scored(output: Any) -> Score:
    """Every conversation passes."""
    return Score(1.0)


def main(role: str, model_url: str, folder: Path, redis_url: str = "") -> None:
    cache = ResponseCache(folder / "cache.db")
    agent, user = (
        OpenAIAdapter(name, base_url=f"{model_url}/v1", api_key="test", limiter=Unlimited(), cache=cache)
        for name in ("agent", "user")
    )
    task = conversation_task(agent_task(agent, tools=[weather_tool(folder)]), simulated_user(user))
    if role == "run":
        suite = EvalSuite("talk", DATA, task, scored, config=EvalConfig(max_concurrent=1), version="1")
        print(suite.run_sync(store=f"sqlite:///{folder / 'runs.db'}").status, cache.hits)
        return
    requests, results = mailboxes(redis_url)
    EvalLoop(
        requests=requests,
        results=results,
        loop=task,
        evaluator=scored,
        config=EvalLoopConfig(concurrency=2, lease_seconds=1, dlq=DLQPolicy(base_seconds=0.1, max_seconds=0.2)),
    ).run_sync()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
