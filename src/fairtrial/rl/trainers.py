"""Other trainers: OpenEnv, SkyRL, verifiers, verl."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from anyio import to_thread

from fairtrial.base.codec import dumps
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.rl.episode import TrainingConversation, TrainingConversations, metrics_of
from fairtrial.rl.export import prompt_maker
from fairtrial.rl.local_model import ChatRow, ParseReply, parse_tool_calls, to_chat
from fairtrial.rl.reward import RewardFunction, reward, sample_text
from fairtrial.scoring.score import Score
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
            self._game.prompt = list(prompt)
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
        self.prompt: list[ChatRow] | None = None
        self._said: list[ChatRow] = []
        self._left = max_turns
        self._parse = parse
        self.metrics: dict[str, float] = {}

    def step(self, action: str) -> GameStep:
        """Take an answer of the model."""
        message = self._parse(action)
        self._said.append(to_chat(message))
        self._left -= 1
        if not message.tool_calls or not self._left:
            score = self._conversation.finish(self._said, self.prompt)
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


def verifiers_taskset(suite: EvalSuite) -> Any:
    """Return a `Taskset` class of verifiers with the samples of a suite, scored by its evaluator.

    The package of a verifiers environment is three lines:

        from fairtrial import rl
        from my_evals import suite
        Words = rl.verifiers_taskset(suite); __all__ = ["Words"]

    Weighted metrics become rewards with weights that sum to 1, so that the reward of verifiers is that of the score;
    the others become metrics.

    Args:
        suite: The suite, a variable of a module.
    """
    import verifiers.v1 as vf

    function = reward(suite)
    prompt_of = prompt_maker(suite)

    class VerifiersData(vf.TaskData):  # type: ignore[misc]  # its types are not known here
        """The row of a sample."""

        sample_id: str
        sample: str

    class VerifiersTask(vf.Task[VerifiersData]):  # type: ignore[misc]
        """One sample."""

        @property
        def key(self) -> str:
            """The id of the sample."""
            return str(self.data.sample_id)

        async def score(self, trace: Any, runtime: Any = None) -> None:
            """Score the conversation of a rollout."""
            prompt, completion = split_trace([_row(message) for message in trace.messages])
            row = {"sample": self.data.sample}
            # In a thread, because an evaluator may block.
            score = await to_thread.run_sync(partial(function.score, row, completion, prompt))
            for name, value, weight in weighted_metrics(score):
                if weight > 0:
                    trace.record_reward(name, value, weight)
                else:
                    trace.record_metric(name, value)

    class VerifiersTaskset(vf.Taskset[VerifiersTask, vf.TasksetConfig]):  # type: ignore[misc]
        """The samples of the suite."""

        def load(self) -> Iterable[Any]:
            """Yield the samples as tasks."""
            for sample in suite.dataset:
                system, messages = split_system(prompt_of(sample))
                named = {"id": sample.id, "sample_id": sample.id, "sample": dumps(sample_text(sample))}
                yield VerifiersTask(VerifiersData(prompt=messages, system_prompt=system, **named), self.config.task)

    for made in (VerifiersData, VerifiersTask, VerifiersTaskset):
        made.__qualname__ = made.__name__
    return VerifiersTaskset


def weighted_metrics(score: Score) -> list[tuple[str, float, float]]:
    """Return the metrics of a score with weights that sum to 1; the reward itself, if none has a weight."""
    total = sum(metric.weight for metric in score.metrics)
    found = [(metric.name, float(metric.value), metric.weight / total if total else 0.0) for metric in score.metrics]
    return found if total else [("reward", score.reward, 1.0), *found]


def split_system(chat: list[ChatRow]) -> tuple[str | None, Any]:
    """Return the system message of a prompt and the rest; one message of the user is returned as text."""
    system = chat[0]["content"] if chat and chat[0]["role"] == "system" else None
    rest = chat[1:] if system is not None else chat
    return system, rest[0]["content"] if len(rest) == 1 and rest[0]["role"] == "user" else rest


def split_trace(chat: list[ChatRow]) -> tuple[list[ChatRow], list[ChatRow]]:
    """Return the messages before the first of the assistant, and the rest."""
    first = next((place for place, row in enumerate(chat) if row["role"] == "assistant"), len(chat))
    return chat[:first], chat[first:]


def _row(message: Any) -> ChatRow:
    content = message.content
    if not isinstance(content, str):
        content = "".join(getattr(part, "text", None) or "" for part in content or ())
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in getattr(message, "tool_calls", None) or ()
    ]
    row: ChatRow = {"role": message.role, "content": content, "tool_calls": calls}
    name = getattr(message, "tool_call_id", None)
    return {**row, "tool_call_id": name} if name else row


_log = logging.getLogger("fairtrial.rl")


def verl_reward(suite: EvalSuite, *, metrics: Sequence[str] = (), on_error: float | None = None) -> VerlReward:
    """Return the evaluator of a suite as the function that verl's `reward.custom_reward_function` names.

    Train on a file of `write_prompts(suite, "train.jsonl", "verl")`. Assign the result to a variable of the file whose
    path verl gets: `compute_score = rl.verl_reward(suite)`.

    Args:
        suite: The suite, a variable of a module.
        metrics: The metrics of the score to report, too; verl wants the same ones from every answer, so a score without
            one of them reports NaN.
        on_error: The reward of an answer that could not be scored. verl has no "unknown", so by default the error is
            raised, which ends the training step.
    """
    return VerlReward(reward(suite, name="compute_score"), tuple(metrics), on_error)


class VerlReward:
    """A reward function of verl; made by `verl_reward`. It is synchronous, as verl's remote reward manager needs it."""

    def __init__(self, function: RewardFunction, metrics: tuple[str, ...], on_error: float | None) -> None:
        if "score" in metrics:
            raise ConfigurationError('metrics must not have the name "score", under which verl reads the reward')
        self.__name__ = "compute_score"
        self._function = function
        self._metrics = metrics
        self._on_error = on_error

    def __reduce__(self) -> tuple[Any, ...]:
        return VerlReward, (self._function, self._metrics, self._on_error)

    def __call__(
        self,
        data_source: str = "",
        solution_str: str = "",
        ground_truth: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        **ignored: Any,
    ) -> dict[str, float]:
        """Score one answer; `score` is the reward."""
        if not extra_info or not (extra_info.get("sample") or extra_info.get("sample_id")):
            raise ConfigurationError(
                "extra_info must have sample or sample_id (it has neither)\n"
                'write the training file with fairtrial.rl.write_prompts(suite, "train.jsonl", "verl")'
            )
        try:
            score = self._function.score(extra_info, solution_str)
        except ConfigurationError:
            raise
        except Exception as error:
            if self._on_error is None:
                raise
            _log.warning("an answer has the reward %g, because it could not be scored: %r", self._on_error, error)
            return {"score": self._on_error, **dict.fromkeys(self._metrics, math.nan)}
        known = metrics_of(score)
        return {"score": score.reward, **{name: known.get(name, math.nan) for name in self._metrics}}
