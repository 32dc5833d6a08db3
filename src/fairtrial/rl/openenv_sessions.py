"""Suites as resource sessions of OpenEnv, which its harness and TRL's AsyncGRPO drive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.base.codec import dumps
from fairtrial.data.sample import Sample
from fairtrial.rl.conversation import TrainingConversation, TrainingConversations, metrics_of
from fairtrial.rl.reward import sample_text
from fairtrial.suites.suite import EvalSuite


def openenv_sessions(suite: EvalSuite) -> Any:
    """Return a `ResourceSessionFactory` of OpenEnv: tasks are rows of `write_prompts`, samples, or ids of samples.

    A session has the first messages of the sample, the tools and the environment of the suite's agent, and is verified
    by its evaluator. The environment is closed by `close()`, as OpenEnv does, and after `verify`.

    Args:
        suite: The suite, a variable of a module.
    """
    from openenv.core.env_server.mcp_types import Tool
    from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, VerifyResult

    conversations = TrainingConversations(suite)

    class OpenEnvSession(ResourceSession):  # type: ignore[misc]  # its types are not known here
        """One sample."""

        def __init__(self, conversation: TrainingConversation) -> None:
            self._conversation = conversation

        def initial_messages(self) -> list[Any]:
            """Return the prompt."""
            return self._conversation.prompt

        def list_tools(self) -> list[Any]:
            """Return the tools."""
            found = [row["function"] for row in self._conversation.tools]
            return [
                Tool(name=one["name"], description=one["description"], input_schema=one["parameters"]) for one in found
            ]

        def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
            """Call a tool."""
            invoked = self._conversation.call(name, arguments)
            return ToolResult(data=invoked.result, error=invoked.error)

        def verify(self, transcript: Sequence[Any], final_state: Any = None) -> Any:
            """Score the conversation; an error of the evaluator is raised, because it is no reward."""
            count = len(self._conversation.prompt)
            score = self._conversation.finish(list(transcript)[count:], list(transcript)[:count])
            return VerifyResult(env_reward=score.reward, done=True, metrics=metrics_of(score))

        def close(self) -> None:
            """Close the environment."""
            self._conversation.close()

    class OpenEnvSessionFactory(ResourceSessionFactory):  # type: ignore[misc]
        """Begins sessions."""

        def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Any:
            """Begin the session of a task."""
            return OpenEnvSession(conversations.begin(task_row(task)))

    return OpenEnvSessionFactory()


def task_row(task: Any) -> Mapping[str, Any]:
    """Return the row that a task names: a sample, its id, or a row of a training file."""
    if isinstance(task, Sample):
        return {"sample": dumps(sample_text(task))}
    if isinstance(task, str):
        return {"sample_id": task}
    row: Mapping[str, Any] = task
    return row
