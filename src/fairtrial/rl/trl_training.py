"""Training with TRL: datasets, reward functions and evaluation in the loop. TRL is imported only when it is used."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.agent import PrepareMessages
from fairtrial.models.cache import without_cache
from fairtrial.reports.figures.rules import GateRules
from fairtrial.reports.gate.gate import gate
from fairtrial.reports.report import EvalReport
from fairtrial.rl.local_model import LocalModelAdapter, ParseReply, parse_tool_calls
from fairtrial.rl.prompts import write_prompts
from fairtrial.rl.reward import RewardFunction, reward
from fairtrial.rl.trl_environment import TrlEnvironmentFactory
from fairtrial.rl.trl_rollout import RolloutReward, TrlRollouts, mark_prompts
from fairtrial.rl.world import agent_parts, worlds_of
from fairtrial.scoring.score import Score
from fairtrial.store.protocol import RunStore
from fairtrial.suites.suite import EvalSuite


def trl(
    suite: EvalSuite,
    *,
    metrics: Mapping[str, float] | None = None,
    prepare_messages: PrepareMessages | None = None,
) -> TrlTraining:
    """Return what a trainer of TRL needs to train on a suite.

    Args:
        suite: The suite, a variable of a module: its samples are the prompts, its evaluator is the reward.
        metrics: The metrics with a weight, and their weights, to give TRL one reward function for each, which it logs
            separately. By default there is one function, the reward of the score.
        prepare_messages: Makes the prompt of a sample, instead of the task.
    """
    return TrlTraining(suite, metrics or {}, prepare_messages)


class TrlTraining:
    """The arguments of a trainer of TRL; made by `trl`.

    Attributes:
        reward_funcs: The reward functions.
        reward_weights: Their weights, which sum to 1, so that TRL's reward is that of the score.
    """

    def __init__(self, suite: EvalSuite, metrics: Mapping[str, float], prepare: PrepareMessages | None) -> None:
        wrong = {name: weight for name, weight in metrics.items() if not weight > 0}
        if wrong:
            raise ConfigurationError(f"the weights of metrics must be more than 0 (got {wrong})")
        function = self._function = reward(suite)
        self._suite = suite
        self._prepare = prepare
        total = sum(metrics.values())
        shared = SharedScores(function, dict(metrics))
        self.reward_funcs: list[Callable[..., list[float | None]]] = (
            [MetricReward(shared, name) for name in metrics] if metrics else [function]
        )
        self.reward_weights = [weight / total for weight in metrics.values()] if metrics else [1.0]

    @cached_property
    def train_dataset(self) -> Any:
        """The prompts as a `datasets.Dataset`, with the columns `prompt`, `sample_id` and `sample`."""
        from datasets import Dataset as Table

        return Table.from_list(self._rows())

    @cached_property
    def rollout_dataset(self) -> Any:
        """`train_dataset` for `rollout_func`, which receives nothing but prompts: each names its sample."""
        from datasets import Dataset as Table

        return Table.from_list(mark_prompts(self._rows()))

    def _rows(self) -> list[dict[str, Any]]:
        file = io.StringIO()
        write_prompts(self._suite, file, "trl", prepare_messages=self._prepare)
        return [json.loads(line) for line in file.getvalue().splitlines()]

    @cached_property
    def environment_factory(self) -> TrlEnvironmentFactory | None:
        """The tools and the environment of the suite's agent for TRL's own tool loop; None if it has neither.

        An environment is closed as soon as `reward_funcs` have scored its rollout.
        """
        parts = agent_parts(self._suite)
        if parts is None or (parts.environment_factory is None and not parts.tools):
            return None
        return TrlEnvironmentFactory(self._suite)

    def rollout_func(
        self,
        *,
        adapter: ProviderAdapter | None = None,
        max_new_tokens: int | None = None,
        parse: ParseReply = parse_tool_calls,
    ) -> TrlRollouts:
        """Return a `rollout_func`: the suite's own agent, its tools and environments, scored by its evaluator.

        Train on `rollout_dataset` with `reward_funcs=training.rollout_rewards`. Rollouts have the settings of the
        suite, such as `timeout_seconds`.

        Args:
            adapter: The adapter of a server that has the current weights and returns tokens, such as
                `OpenAIAdapter(tokens=True)`. By default the model answers in this process, one answer at a time.
            max_new_tokens: The longest answer of the model in this process; by default TRL's `max_completion_length`.
            parse: Makes a message, with tool calls, from the text of the model in this process.
        """
        return TrlRollouts(self._suite, self._function, adapter, max_new_tokens, parse)

    @property
    def rollout_rewards(self) -> list[RolloutReward]:
        """The reward functions for `rollout_func`, whose rollouts are scored already."""
        return [RolloutReward()]

    def callback(
        self,
        suite_of: Callable[[ProviderAdapter], EvalSuite],
        *,
        every: int,
        store: RunStore | str,
        train: str,
        rules: GateRules | Mapping[str, Any] | None = None,
        adapter: ProviderAdapter | None = None,
        max_new_tokens: int = 256,
    ) -> Any:
        """Return a callback that evaluates the model during training, as ordinary stored runs.

        Each run has the tags `train` and `step`; `compare`, `gate`, `fairtrial show` and `curve` work on them. The
        attribute `reports` of the callback has them by step.

        Args:
            suite_of: Returns the suite to run for the adapter of the model, such as one with held-out samples.
            every: The number of steps between two runs; there is one before the first step, too.
            store: The store of the runs.
            train: The name of the training run.
            rules: Rules of a gate; if a run fails it, training is stopped.
            adapter: The adapter of a server that has the current weights. By default the model answers in this
                process, which works for training with one process only.
            max_new_tokens: The longest answer of the model in this process.
        """
        if every < 1:
            raise ConfigurationError(f"every must be at least 1 (got {every})")
        from transformers import TrainerCallback

        class Evaluation(TrainerCallback):  # type: ignore[misc]  # its types are not known here
            """Runs a suite every few steps."""

            def __init__(self) -> None:
                self.reports: dict[int, EvalReport] = {}

            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                """Evaluate before the first step."""
                self._evaluate(args, state, control, **given)

            def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                """Evaluate after every few steps."""
                if state.global_step % every == 0:
                    self._evaluate(args, state, control, **given)

            def _evaluate(
                self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **_: Any
            ) -> None:
                if not state.is_world_process_zero:
                    return
                if adapter is None and args.world_size > 1:
                    raise ConfigurationError(
                        f"the model can answer in this process only if training has one process (got {args.world_size})"
                        "\npass adapter=OpenAIAdapter(base_url=...) of a server that has the current weights"
                    )
                policy = adapter or LocalModelAdapter(model, processing_class, max_new_tokens)
                tags = {"train": train, "step": str(state.global_step)}
                with _undisturbed(model), without_cache():
                    report = suite_of(policy).run_sync(store=store, tags=tags, fresh=True)
                self.reports[state.global_step] = report
                if rules is not None and gate(report, rules).status == "fail":
                    control.should_training_stop = True

        return Evaluation()


class SharedScores:
    """The scores of the last batch, shared by the functions of its metrics: each completion is scored once."""

    def __init__(self, function: RewardFunction, weights: Mapping[str, float]) -> None:
        self.function = function
        self.weights = weights
        self._last: tuple[Any, list[Score | None]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedScores, (self.function, self.weights)

    def of(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Score | None]:
        """Return the scores of a batch."""
        if self._last is None or self._last[0] is not completions:
            name = "sample" if "sample" in columns else "sample_id"
            rows = [{name: value} for value in columns[name]]
            given = prompts or [None] * len(completions)
            worlds = worlds_of(columns.get("environments"))
            scores = self.function.score_batch(rows, completions, given, worlds=worlds)
            for score in scores:
                self._check(score)
            self._last = completions, scores
        return self._last[1]

    def _check(self, score: Score | None) -> None:
        if score is None:
            return
        found = {metric.name: metric.weight for metric in score.metrics if metric.weight > 0}
        if found != self.weights:
            raise ConfigurationError(
                f"metrics must be the metrics of the evaluator that have a weight (got {dict(self.weights)}, the score "
                f"has {found})"
            )


class MetricReward:
    """One metric of a score as a reward function."""

    def __init__(self, shared: SharedScores, metric: str) -> None:
        self._shared = shared
        self.__name__ = metric

    def __reduce__(self) -> tuple[Any, ...]:
        return MetricReward, (self._shared, self.__name__)

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """Return the values of the metric for a batch; None for a completion that could not be scored."""
        scores = self._shared.of(prompts, completions, columns)
        return [None if score is None else score.metric(self.__name__) for score in scores]


class _undisturbed:  # noqa: N801 - used like a function
    """Switches a model to evaluation, and restores its mode and the random state of torch."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        import torch

        self._state = torch.get_rng_state()
        self._training = self._model.training
        self._model.eval()

    def __exit__(self, *error: object) -> None:
        import torch

        self._model.train(self._training)
        torch.set_rng_state(self._state)
