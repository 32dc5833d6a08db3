"""The conversation of one sample that a trainer runs itself: how it begins, its tools, and its score at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.data.session.events import ToolInvoked
from fairtrial.models.agent import AgentParts
from fairtrial.rl.chat import ChatRow
from fairtrial.rl.prompts import prompt_maker
from fairtrial.rl.reward import RewardFunction, Row, reward
from fairtrial.rl.world import World, agent_parts, tool_rows
from fairtrial.scoring.score import Score
from fairtrial.suites.suite import EvalSuite

_NO_PARTS = AgentParts({}, None, None, None)


class TrainingConversations:
    """Begins conversations about the samples of a suite; made where a trainer wants them."""

    def __init__(self, suite: EvalSuite) -> None:
        self.suite = suite
        self.function = reward(suite)
        self.parts = agent_parts(suite) or _NO_PARTS
        self.prompt_of = prompt_maker(suite)

    def begin(self, row: Row) -> TrainingConversation:
        """Begin a conversation about the sample of a row of a training file."""
        return TrainingConversation(self, row)


class TrainingConversation:
    """One conversation. Its environment is opened at once, and closed when it is scored or by `close`.

    Attributes:
        sample: The sample.
        prompt: Its first messages, in the chat format.
        score: The score, once it has ended.
    """

    def __init__(self, begun_by: TrainingConversations, row: Row) -> None:
        self._function: RewardFunction = begun_by.function
        self.sample = self._function.sample_of(row)
        self.prompt: list[ChatRow] = begun_by.prompt_of(self.sample)
        self.score: Score | None = None
        self._world = World(begun_by.parts, self.sample, close_seconds=begun_by.suite.config.close_seconds)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools, in the format of chat templates."""
        return tool_rows(self._world.tools)

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolInvoked:
        """Call a tool; a failed call is marked as such."""
        return self._world.call(name, arguments)

    def finish(self, completion: str | Sequence[Any], prompt: Sequence[Any] | None = None) -> Score:
        """Score what was said after the prompt, and close the environment; errors of the evaluator are raised.

        Args:
            completion: The answer, or the messages after the prompt with those of tools.
            prompt: The messages before it; by default `prompt`.
        """
        try:
            before = self.prompt if prompt is None else prompt
            self.score = self._function.score(self.sample, completion, before, world=self._world)
            return self.score
        finally:
            self.close()

    def close(self) -> None:
        """Close the environment; a second call does nothing."""
        self._world.close()


def metrics_of(score: Score) -> dict[str, float]:
    """Return the metrics of a score by name."""
    return {metric.name: float(metric.value) for metric in score.metrics}
