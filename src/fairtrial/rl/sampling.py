"""Execute rollouts in memory, for training loops of your own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import getrandbits
from typing import Any

from fairtrial.base.frozen import EMPTY
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.agent import EnvironmentFactory, PrepareMessages, agent_task
from fairtrial.models.cache import without_cache
from fairtrial.rl.advantages import AdvantageKind, Convention
from fairtrial.rl.groups import Group, Rollout, groups, unscored
from fairtrial.scoring.evaluator import Evaluator, Scorer, evaluator
from fairtrial.scoring.score import Score
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.config import EvalConfig


async def rollout(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any,
    evaluator: Evaluator | Scorer,
    *,
    group_size: int = 8,
    policy: str = "",
    advantage: AdvantageKind = "grpo",
    convention: Convention = "trl",
    seed: int | None = None,
    config: EvalConfig | None = None,
) -> list[Group]:
    """Execute each sample `group_size` times, score the trials, and return the groups with their advantages.

    Nothing is stored on disk. The response cache is not used for the task: after a training step, the same model name
    stands for other weights. Seeds of trials are new in every call, because equal seeds give equal rollouts.

    Args:
        samples: The samples.
        task: The task, as in a suite.
        evaluator: The evaluator, as in a suite.
        group_size: The number of rollouts of each sample.
        policy: The name of the weights, such as "step-120"; a tag of the run.
        advantage: The formula of the advantages; see `advantages`.
        convention: The trainer whose numbers are reproduced.
        seed: The seed from which seeds of trials are derived; by default a random one.
        config: Other settings of the run; `repeats` and `seed` are set here.
    """
    if group_size < 1:
        raise ConfigurationError(f"group_size must be at least 1 (got {group_size})")
    dataset = samples if isinstance(samples, Dataset) else Dataset(samples)
    settings = replace(
        config or EvalConfig(), repeats=group_size, seed=getrandbits(31) if seed is None else seed, stop_when=None
    )
    # With a version, because the hash of a project's files takes longer than a rollout, and nothing resumes this run.
    suite = EvalSuite("rollouts", dataset, task, evaluator, config=settings, version="rollouts")
    with without_cache():
        report = await suite.run(store="memory:", tags={"policy": policy} if policy else EMPTY)
    return list(groups(report, advantage=advantage, convention=convention))


async def generate_rollouts(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any = None,
    *,
    endpoint: ProviderAdapter | None = None,
    environment_factory: EnvironmentFactory | None = None,
    prepare_messages: PrepareMessages | None = None,
    seed: int | None = None,
    config: EvalConfig | None = None,
) -> list[Rollout]:
    """Execute each sample once, without scoring, and return one rollout for each, in the order of the samples.

    A rollout that failed is in its place, with what it recorded, its `status` and its `error`. Environments are closed.

    Args:
        samples: The samples.
        task: The task; or leave it out and give `endpoint`.
        endpoint: The model of an agent that is made with `agent_task`.
        environment_factory: The environment of that agent, from the sample.
        prepare_messages: The first messages of that agent, from the sample.
        seed: The seed from which seeds of trials are derived; by default a random one.
        config: Settings of the run, such as `max_concurrent`.
    """
    if (task is None) == (endpoint is None):
        raise ConfigurationError("generate_rollouts() needs either a task or an endpoint, the adapter of a model")
    if task is not None and (environment_factory or prepare_messages):
        raise ConfigurationError("environment_factory and prepare_messages belong to endpoint; the task has its own")
    if endpoint is not None:
        task = agent_task(endpoint, environment_factory=environment_factory, prepare_messages=prepare_messages)
    found = await rollout(samples, task, _no_score, group_size=1, seed=seed, config=config)
    return [unscored(group).rollouts[0] for group in found]


@evaluator(form="plain", inline=True, name="unscored")
def _no_score(output: Any, expected: Any) -> Score:
    return Score(0.0)
