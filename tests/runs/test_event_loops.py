"""The event loops that a run can be executed on."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from fairtrial import ConfigurationError, Dataset, EvalSuite, all_of, exact_match, llm_judge, open_store
from fairtrial.integrations.model_server import ModelServer
from fairtrial.models import MarkdownSection, OpenAIAdapter, PromptTemplate, TaskLoop, agent_task, prompt_task

PROMPT = PromptTemplate[str](key="p", sections=[MarkdownSection("", "$question", "p")])


class Loop(TaskLoop[str, str]):
    def initialize(self, input: str) -> Any:
        raise AssertionError("no trial was to be started")


@pytest.mark.proves("R136")
@pytest.mark.parametrize("where", ["prompt", "agent", "loop", "judge"])
def test_a_model_that_needs_asyncio_is_refused_under_trio_before_the_first_trial(where: str) -> None:
    with ModelServer() as server:
        adapter = OpenAIAdapter[str]("gpt-test", base_url=f"{server.base_url}/v1", api_key="test")
        tasks: dict[str, Any] = {
            "prompt": prompt_task(PROMPT, adapter), "agent": agent_task(adapter), "loop": Loop(adapter=adapter),
            "judge": str.upper,
        }  # fmt: skip
        judged = all_of(exact_match, llm_judge(adapter, "Right")) if where == "judge" else exact_match
        suite = EvalSuite("loops", Dataset.of({"a": "b"}), task=tasks[where], evaluator=judged)
        store = open_store("memory:")
        with pytest.raises(ConfigurationError, match=r"'gpt-test'.*must be run under asyncio \(got trio\)"):
            trio.run(lambda: suite.run(store=store))
        assert store.runs() == []
        assert server.requests() == ()
