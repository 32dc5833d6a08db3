"""A training loop over small protocols: prompts, rollouts, rewards, advantages, one step of your trainer."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.rl.advantages import AdvantageKind, Convention, check_kind
from fairtrial.rl.buffer import DataBuffer
from fairtrial.rl.groups import Group, Rollout
from fairtrial.rl.metric_log import MetricLog, MetricSink
from fairtrial.rl.sampling import rollout
from fairtrial.scoring.evaluator import Evaluator, Scorer
from fairtrial.trials.config import EvalConfig


class TrainingBackend(Protocol):
    """What owns the model and the optimizer."""

    def train_step(self, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> float | Awaitable[float]:
        """Update the weights with scored rollouts and their advantages; returns the loss. May be async."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The settings of a training loop.

    Attributes:
        num_steps: The number of steps; fewer if the buffer has no more prompts.
        batch_size: The number of prompts in a step.
        group_size: The number of rollouts of each prompt.
        advantage: The formula of the advantages; see `advantages`.
        convention: The trainer whose numbers are reproduced.
        max_returns: How often a prompt is given back to the buffer because none of its rollouts was scored.
        seed: The seed of step 0; each step has another one.
        run: Settings of the runs that execute the rollouts, such as `max_concurrent`.
    """

    num_steps: int
    batch_size: int = 8
    group_size: int = 8
    advantage: AdvantageKind = "grpo"
    convention: Convention = "trl"
    max_returns: int = 1
    seed: int = 0
    run: EvalConfig = EvalConfig()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        check_kind(self.advantage, self.convention)
        for name, least in (("num_steps", 1), ("batch_size", 1), ("group_size", 1), ("max_returns", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"TrainConfig.{name} must be at least {least} (got {getattr(self, name)})")


async def train(
    backend: TrainingBackend,
    buffer: DataBuffer[Any],
    task: Any,
    evaluator: Evaluator | Scorer,
    config: TrainConfig,
    *,
    log: MetricSink | None = None,
    start: int = 0,
) -> list[dict[str, Any]]:
    """Train: take prompts, execute and score rollouts, compute advantages, call `backend.train_step`.

    Only scored rollouts reach the backend. A prompt without any scored rollout is given back to the buffer, at most
    `max_returns` times; if a step is cancelled or fails, all its prompts are given back, so that the state of the
    buffer can be saved and the training continued with `start`.

    Args:
        backend: An object with `train_step(rollouts, advantages)`, sync or async.
        buffer: The prompts: samples, or values that become the input `{"prompt": value}` of a sample.
        task: The task, which calls the model that the backend trains.
        evaluator: Scores the rollouts.
        config: The settings.
        log: Receives the reward and every metric of every rollout, the mean reward and the loss.
        start: The number of the first step.

    Returns:
        One dict for each step: `step`, `loss` (None if no rollout was scored), `mean_reward`, `rollouts`, `scored`,
        and `mixed_groups`, the number of groups whose rewards differ.
    """
    sink = MetricLog() if log is None else log
    returns: Counter[str] = Counter()
    history: list[dict[str, Any]] = []
    for step in range(start, config.num_steps):
        prompts = buffer.get_prompts(config.batch_size)
        if not prompts:
            break
        try:
            samples = _samples(prompts, step)
            found = await rollout(
                samples,
                task,
                evaluator,
                group_size=config.group_size,
                policy=f"step-{step}",
                advantage=config.advantage,
                convention=config.convention,
                seed=(config.seed + step * 1_000_003) % (1 << 31),
                config=config.run,
            )
            loss = await _step(backend, [one for group in found for one in group.scored])
        except BaseException:
            buffer.give_back(prompts)
            raise
        _return_unscored(buffer, prompts, samples, found, returns, config.max_returns)
        history.append(_logged(sink, step, found, loss))
    return history


def _samples(prompts: Sequence[Any], step: int) -> list[Sample[Any, Any]]:
    """Return the prompts as samples with distinct ids: a batch may reach from one epoch into the next."""
    samples = [
        prompt if isinstance(prompt, Sample) else Sample(f"step_{step}_{place}", {"prompt": prompt})
        for place, prompt in enumerate(prompts)
    ]
    seen: Counter[str] = Counter()
    distinct: list[Sample[Any, Any]] = []
    for sample in samples:
        seen[sample.id] += 1
        again = seen[sample.id]
        distinct.append(sample if again == 1 else replace(sample, id=f"{sample.id}#{again}"))
    return distinct


async def _step(backend: TrainingBackend, scored: Sequence[Rollout]) -> float | None:
    if not scored:
        return None
    loss = backend.train_step(scored, [one.advantage or 0.0 for one in scored])
    return float(await loss if inspect.isawaitable(loss) else loss)


def _return_unscored(
    buffer: DataBuffer[Any],
    prompts: Sequence[Any],
    samples: Sequence[Sample[Any, Any]],
    found: Sequence[Group],
    returns: Counter[str],
    most: int,
) -> None:
    scored = {group.sample_id for group in found if group.scored}
    aborted: list[Any] = []
    for prompt, sample in zip(prompts, samples, strict=True):
        name = sample.id if isinstance(prompt, Sample) else repr(prompt)
        if sample.id not in scored and returns[name] < most:
            returns[name] += 1
            aborted.append(prompt)
    buffer.give_back(aborted)


def _logged(sink: MetricSink, step: int, found: Sequence[Group], loss: float | None) -> dict[str, Any]:
    rollouts = [one for group in found for one in group.rollouts]
    rewards: list[float] = []
    for one in rollouts:
        if one.reward is None:
            continue
        rewards.append(one.reward)
        sink.log_metric("reward", one.reward, step=step)
        for name, value in one.metrics.items():
            sink.log_metric(f"score/{name}", value, step=step)
    mean = sum(rewards) / len(rewards) if rewards else None
    for name, number in (("loss", loss), ("mean_reward", mean)):
        if number is not None:
            sink.log_metric(name, number, step=step)
    return {
        "step": step,
        "loss": loss,
        "mean_reward": mean,
        "rollouts": len(rollouts),
        "scored": len(rewards),
        "mixed_groups": sum(group.signal == "mixed" for group in found),
    }
