"""Suites as text environments of SkyRL-Gym."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fairtrial.errors import ConfigurationError
from fairtrial.rl.chat import ChatRow, to_chat
from fairtrial.rl.conversation import TrainingConversation, TrainingConversations, metrics_of
from fairtrial.rl.local_model import ParseReply, parse_tool_calls
from fairtrial.suites.suite import EvalSuite


def skyrl_env(suite: EvalSuite, *, max_turns: int = 20, parse: ParseReply = parse_tool_calls) -> Any:
    """Return a `BaseTextEnv` class of SkyRL-Gym: `skyrl_gym.register(id=suite.name, entry_point=skyrl_env(suite))`.

    Train on a file of `write_prompts(suite, "train.jsonl", "skyrl")`. Answers that call tools of the suite's agent are
    observed; the first that does not is scored by the evaluator, in the environment, and ends the episode. An error of
    the evaluator is raised, because SkyRL has no reward for "unknown".

    Args:
        suite: The suite, a variable of a module.
        max_turns: The largest number of answers; the last one is scored in any case.
        parse: Makes a message, with tool calls, from the text of an answer.
    """
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    conversations = TrainingConversations(suite)

    class SkyrlEnvironment(BaseTextEnv):  # type: ignore[misc]  # its types are not known here
        """One sample."""

        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
            super().__init__()
            self._game = TextGame(conversations, extras or {}, max_turns, parse)

        def init(self, prompt: Any) -> Any:
            """Begin with the prompt of the training file."""
            self._game.begin(prompt)
            return prompt, {}

        def step(self, action: str) -> Any:
            """Take an answer of the model."""
            self.turns += 1
            taken = self._game.step(action)
            return BaseTextEnvStepOutput(
                observations=taken.observations, reward=taken.reward, done=taken.done, metadata=taken.metrics
            )

        def get_metrics(self) -> dict[str, Any]:
            """Return the metrics of the score."""
            return self._game.metrics

        def close(self) -> None:
            """Close the environment."""
            self._game.close()

    return SkyrlEnvironment


class GameStep(NamedTuple):
    """What an answer led to."""

    observations: list[ChatRow]
    reward: float
    done: bool
    metrics: dict[str, float]


class TextGame:
    """A conversation in texts: answers with tool calls are observed, any other is scored."""

    def __init__(
        self, conversations: TrainingConversations, extras: Mapping[str, Any], max_turns: int, parse: ParseReply
    ) -> None:
        nested = extras.get("extra_info")
        row = {**nested, **extras} if isinstance(nested, Mapping) else extras
        if not row.get("sample") and not row.get("sample_id"):
            raise ConfigurationError(
                "the extras of an environment must have sample or sample_id (they have neither)\n"
                'write the training file with fairtrial.rl.write_prompts(suite, "train.jsonl", "skyrl")'
            )
        self._conversation: TrainingConversation = conversations.begin(row)
        self._prompt: list[ChatRow] | None = None
        self._said: list[ChatRow] = []
        self._left = max_turns
        self._parse = parse
        self.metrics: dict[str, float] = {}

    def begin(self, prompt: Any) -> None:
        """Begin with the messages of a prompt."""
        self._prompt = list(prompt)

    def step(self, action: str) -> GameStep:
        """Take an answer of the model."""
        message = self._parse(action)
        self._said.append(to_chat(message))
        self._left -= 1
        if not message.tool_calls or not self._left:
            score = self._conversation.finish(self._said, self._prompt)
            self.metrics = metrics_of(score)
            return GameStep([], score.reward, True, self.metrics)
        observed: list[ChatRow] = []
        for call in message.tool_calls:
            invoked = self._conversation.call(call.name, call.arguments)
            text = f"Error: {invoked.error}" if invoked.success is False else str(invoked.result)
            observed.append({"role": "tool", "content": text, "tool_call_id": call.id})
        self._said += observed
        return GameStep(observed, 0.0, False, {})

    def close(self) -> None:
        """Close the environment."""
        self._conversation.close()
