"""Episodes: a conversation with an environment, for trainers that step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fairtrial.base.codec import to_json
from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import ToolInvoked
from fairtrial.errors import ConfigurationError
from fairtrial.models.agent import AgentParts
from fairtrial.models.limiter import Unlimited
from fairtrial.models.openai import OpenAIAdapter
from fairtrial.rl.export import prompt_maker
from fairtrial.rl.fork import World, agent_parts
from fairtrial.rl.groups import RolloutStatus, rollout
from fairtrial.rl.local_model import ChatRow, tool_rows, with_adapter
from fairtrial.rl.reward import RewardFunction, Row, import_path, load_object, reward
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
        return tool_rows(tool.spec for tool in self._world.tools.values())

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


@first_is(str)
@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """How an episode ended. `reward` is None if it was not scored: an error is not a reward of 0."""

    sample_id: str
    reward: float | None
    metrics: Mapping[str, float]
    status: RolloutStatus
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        found: dict[str, Any] = to_json(self)
        return found


def episode(suite: EvalSuite, *, model: str = "policy") -> TrainerEpisode:
    """Return the agent of a suite as an episode that trainers run against their own address of the model.

    AReaL takes it as it is: `await episode(suite).run(data, base_url=..., api_key=...)`.

    Args:
        suite: The suite. Its task is an `agent_task` or a `prompt_task`, whose model is replaced by the trainer's.
        model: The name of the model in requests; gateways route by it.
    """
    return TrainerEpisode(suite, model)


class TrainerEpisode:
    """Runs single trials of a suite against the model of a trainer; made by `episode`."""

    def __init__(self, suite: EvalSuite, model: str = "policy") -> None:
        self._suite = suite
        self._model = model
        self._samples = RewardFunction(suite, None, ("", None), "reward")
        with_adapter(suite, OpenAIAdapter(model, base_url="http://127.0.0.1/v1", api_key="none"))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (import_path(self._suite, f"suite {self._suite.name!r}"), self._model)

    async def run(
        self, data: Sample[Any, Any] | Row, *, base_url: str, api_key: str = "none", **ignored: Any
    ) -> float | None:
        """Run one episode and return its reward; None if it was not scored, so that trainers leave it out.

        Args:
            data: A sample, or a row of a file of `write_prompts`: with `sample` or `sample_id`.
            base_url: The address of the model for this episode, up to and including `/v1`.
            api_key: The key of the trainer's gateway.
            ignored: What else the trainer passes, such as AReaL's `http_client`.
        """
        return (await self.play(data, base_url=base_url, api_key=api_key)).reward

    async def play(
        self, data: Sample[Any, Any] | Row, *, base_url: str | None = None, api_key: str | None = None
    ) -> EpisodeResult:
        """Run one episode and return how it ended.

        Args:
            data: A sample, or a row of a training file.
            base_url: The address of the model; by default OPENAI_BASE_URL.
            api_key: The key; by default OPENAI_API_KEY.
        """
        sample = data if isinstance(data, Sample) else self._samples.sample_of(_flat(data))
        config = replace(self._suite.config, repeats=1, max_samples=None, warmup=0, stop_when=None, experiment_name="")
        # Each episode may have an address of its own, so a limiter that is kept for every address would only grow.
        adapter = OpenAIAdapter(
            self._model, api="chat", base_url=base_url, api_key=api_key, limiter=Unlimited(), prices_of=None
        )
        async with adapter:
            task = with_adapter(self._suite, adapter)
            (group,) = await rollout([sample], task, self._suite.evaluator, group_size=1, config=config)
        (found,) = group.rollouts
        return EpisodeResult(sample.id, found.reward, dict(found.metrics or EMPTY), found.status, found.error)


def _restore(where: str, model: str) -> TrainerEpisode:
    return TrainerEpisode(load_object(where), model)


def _flat(row: Row) -> Row:
    """Return a row with the columns that name its sample; verl and SkyRL have them under `extra_info`."""
    nested = row.get("extra_info")
    found = {**nested, **row} if isinstance(nested, Mapping) else row
    if not found.get("sample") and not found.get("sample_id"):
        raise ConfigurationError(
            f"the data of an episode must have sample or sample_id (got {', '.join(map(str, row)) or 'nothing'})\n"
            "write the training file with fairtrial.rl.write_prompts, which adds both"
        )
    return found
