"""TRL: environments, rollouts, training."""

from __future__ import annotations

import atexit
import inspect
import io
import json
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from fairtrial.base.sync_bridge import call_sync
from fairtrial.errors import ConfigurationError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.agent import AgentParts, PrepareMessages
from fairtrial.models.cache import without_cache
from fairtrial.models.tools import Tool
from fairtrial.reports.figures.rules import GateRules
from fairtrial.reports.gate.gate import gate
from fairtrial.reports.report import EvalReport
from fairtrial.rl.export import write_prompts
from fairtrial.rl.fork import WORLD, World, agent_parts, required_parts
from fairtrial.rl.groups import Rollout, rollout
from fairtrial.rl.local_model import LocalModelAdapter, ParseReply, parse_tool_calls, with_adapter
from fairtrial.rl.reward import RewardFunction, import_path, load_object, log_means, reward
from fairtrial.scoring.score import Score
from fairtrial.store.protocol import RunStore
from fairtrial.suites.suite import EvalSuite

_TYPES = {"integer": int, "number": float, "string": str, "boolean": bool, "array": list, "object": dict}
_TAKEN = ("reset", "get_reward", "close")


class TrlEnvironmentFactory:
    """Makes the environments of TRL's `environment_factory`; made by `TrlTraining.environment_factory`.

    TRL finds the tools as methods of the class, resets an environment before each rollout and never closes it. It is
    closed after scoring, at the next reset, by `close()`, and at the end of the process.
    """

    def __init__(self, suite: EvalSuite) -> None:
        self.where = import_path(suite, f"suite {suite.name!r}")
        self._parts = required_parts(suite, "environment_factory")
        self._samples = reward(suite)
        self._class = _environment_class(self._parts, self._samples, suite)
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        atexit.register(_close_all, weakref.ref(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.where,)

    def __call__(self) -> Any:
        """Return an environment, which opens nothing until it is reset."""
        made = self._class()
        self._made.add(made)
        return made

    def close(self) -> None:
        """Close the environments that TRL has left open."""
        for made in list(self._made):
            made._close()


def _restore(where: str) -> TrlEnvironmentFactory:
    return TrlEnvironmentFactory(load_object(where))


def _close_all(factory: weakref.ref[TrlEnvironmentFactory]) -> None:
    found = factory()
    if found is not None:
        found.close()


def _environment_class(parts: AgentParts, samples: RewardFunction, suite: EvalSuite) -> type:
    close_seconds = suite.config.close_seconds

    class TrlEnvironment:
        def __init__(self) -> None:
            self._world: World | None = None

        def reset(self, **row: Any) -> None:
            """Open the environment of a sample; TRL calls it before each rollout."""
            self._close()
            self._world = World(parts, samples.sample_of(row), close_seconds=close_seconds)

        def _close(self) -> None:
            if self._world is not None:
                self._world.close()

    setattr(TrlEnvironment, WORLD, property(lambda self: self._world))
    for name, tool in _tools(parts, suite, close_seconds).items():
        if name in _TAKEN or name.startswith("_"):
            raise ConfigurationError(f"a tool of an environment of TRL must have another name (got {name!r})")
        setattr(TrlEnvironment, name, _method(tool))
    return TrlEnvironment


def _tools(parts: AgentParts, suite: EvalSuite, close_seconds: float) -> Mapping[str, Tool]:
    """Return the tools of the first sample's environment, which is opened to ask for them."""
    world = World(parts, next(iter(suite.dataset)), close_seconds=close_seconds)
    world.close()
    if world.problem is not None:
        raise ConfigurationError(f"the tools of suite {suite.name!r} are not known: {world.problem}")
    return world.tools


def _method(tool: Tool) -> Any:
    """Return a tool as a method with the signature and the docstring from which TRL makes its schema."""
    spec = tool.spec
    properties: Mapping[str, Any] = spec.parameters.get("properties", {})
    known = inspect.signature(tool.fn).parameters

    def call(self: Any, **arguments: Any) -> Any:
        if self._world is None:
            raise RuntimeError("the environment was not reset")
        invoked = self._world.call(spec.name, arguments)
        if invoked.success is False:
            raise RuntimeError(invoked.error)  # TRL shows it to the model.
        return invoked.result

    hints = {name: _hint(schema) for name, schema in properties.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                inspect.Parameter(name, keyword, default=known[name].default, annotation=hint)
                for name, hint in hints.items()
            ),
        ]
    )
    call.__annotations__ = dict(hints)
    call.__name__ = call.__qualname__ = spec.name
    lines = [f"    {name}: {schema.get('description') or name}" for name, schema in properties.items()]
    call.__doc__ = "\n".join([spec.description or spec.name, *(["", "Args:", *lines] if lines else [])])
    return call


def _hint(schema: Mapping[str, Any]) -> Any:
    choices = schema.get("enum")
    return Literal[tuple(choices)] if choices else _TYPES.get(str(schema.get("type")), dict)


REWARD, METRICS = "fairtrial_reward", "fairtrial_metrics"
"""The columns with which rollouts pass their rewards and metrics to the reward function."""

_log = logging.getLogger("fairtrial.rl")


@dataclass(eq=False)
class TrlRollouts:
    """A `rollout_func` of TRL; made by `TrlTraining.rollout_func`."""

    suite: EvalSuite
    samples: RewardFunction
    adapter: ProviderAdapter | None
    max_new_tokens: int | None
    parse: ParseReply
    _started: bool = field(default=False, init=False)
    __name__ = "fairtrial_rollouts"

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Execute a rollout for each prompt and return its tokens, masks, log-probabilities and rewards."""
        names = [_sample_id(prompt) for prompt in prompts]
        network = trainer.model
        training = network.training
        network.eval()
        try:
            found = self._rollouts(names, trainer)
        finally:
            network.train(training)
        return self._columns([found[name].pop(0) for name in names], prompts, trainer.processing_class)

    def _rollouts(self, names: Sequence[str], trainer: Any) -> dict[str, list[Rollout]]:
        adapter = self.adapter
        if adapter is None:
            adapter = LocalModelAdapter(
                trainer.model,
                trainer.processing_class,
                self.max_new_tokens or trainer.args.max_completion_length,
                temperature=trainer.args.temperature,
                tokens=True,
                parse=self.parse,
            )
        task = with_adapter(self.suite, adapter)
        policy = f"step-{trainer.state.global_step}"
        found: dict[str, list[Rollout]] = {}
        wanted = Counter(names)
        for size in sorted(set(wanted.values())):
            samples = [self.samples.sample_of({"sample_id": name}) for name, count in wanted.items() if count == size]
            config = replace(self.suite.config, max_samples=None, warmup=0, stop_when=None)
            call = partial(rollout, samples, task, self.suite.evaluator, group_size=size, policy=policy, config=config)
            for group in call_sync(call):
                found[group.sample_id] = list(group.rollouts)
        return found

    def _columns(self, rollouts: Sequence[Rollout], prompts: Sequence[Any], tokenizer: Any) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {name: [] for name in (*_TOKENS, REWARD, METRICS)}
        dropped = Counter[str]()
        started, self._started = self._started, True
        for one, prompt in zip(rollouts, prompts, strict=True):
            rows = [] if one.missing_tokens else one.rows()
            dropped["without tokens"] += not rows
            if len(rows) > 1:
                if not started:
                    raise ConfigurationError(_SEVERAL.format(one.sample_id, len(rows)))
                dropped["with several rows, not trained"] += 1
                rows = []  # Not even one of them: a part of a rollout did not earn its reward.
            if rows:
                row = rows[0]
                values: Sequence[Any] = (row.prompt_ids, row.completion_ids, row.logprobs, row.mask)
            else:
                # TRL needs a completion for every prompt: this one is masked and has no reward.
                ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
                values = (ids, [tokenizer.eos_token_id], [0.0], [0])
            for name, value in zip(_TOKENS, values, strict=True):
                columns[name].append(list(value))
            columns[REWARD].append(one.reward if rows else None)
            columns[METRICS].append(dict(one.metrics))
        summary = ", ".join(f"{count} {what}" for what, count in dropped.items() if count)
        if summary:
            first = next((one.error for one in rollouts if one.error), None)
            _log.warning("of %d rollouts: %s%s", len(rollouts), summary, f"; the first error: {first}" if first else "")
        return columns


_SEVERAL = (
    "each rollout must be one row of tokens, because TRL takes one for each prompt (got a rollout of sample {!r} with "
    "{} rows: the prompts of its later calls do not begin with the tokens of the earlier ones)\n"
    "use a chat template that keeps the thoughts of earlier turns, or leave out adapter=, or train on "
    'export(report, "tokens.jsonl", "tokens"), which has every row'
)
_TOKENS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


class RolloutReward:
    """The reward function of rollouts that are scored already."""

    __name__ = "reward"

    def __call__(
        self, *, log_metric: Callable[[str, float], object] | None = None, **columns: Any
    ) -> list[float | None]:
        """Return the rewards of a batch; None for a rollout that was not scored."""
        if REWARD not in columns:
            raise ConfigurationError("the trainer must have rollout_func=training.rollout_func() (it has none)")
        if log_metric is not None:
            log_means(log_metric, columns.get(METRICS) or ())
        return list(columns[REWARD])


def mark_prompts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the id of the sample to the last message of each prompt: `rollout_func` receives nothing but the prompt."""
    return [{**row, "prompt": [*row["prompt"][:-1], {**row["prompt"][-1], _MARK: row["sample_id"]}]} for row in rows]


_MARK = "sample_id"


def _sample_id(prompt: Any) -> str:
    found = prompt[-1].get(_MARK) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else None
    if not isinstance(found, str):
        raise ConfigurationError(
            "the prompts of rollout_func must name their samples (got one that does not)\n"
            "train on training.rollout_dataset"
        )
    return found


def trl(
    suite: EvalSuite, *, metrics: Mapping[str, float] | None = None, prepare_messages: PrepareMessages | None = None
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
        if parts is None or not (parts.environment_factory or parts.tools or parts.sources):
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
                    report = suite_of(policy).run_sync(store=store, tags=tags, resume="never")
                self.reports[state.global_step] = report
                if rules is not None and gate(report, rules).status == "fail":
                    control.should_training_stop = True

        return Evaluation()


@dataclass(eq=False)
class SharedScores:
    """The scores of the last batch, shared by the functions of its metrics: each completion is scored once."""

    function: RewardFunction
    weights: Mapping[str, float]
    _last: tuple[Any, list[Score | None]] | None = field(default=None, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedScores, (self.function, self.weights)

    def of(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Score | None]:
        """Return the scores of a batch."""
        if self._last is None or self._last[0] is not completions:
            scores = self.function.score_columns(prompts or None, completions, columns)
            for score in scores:
                if score is not None:
                    self._check(score)
            self._last = completions, scores
        return self._last[1]

    def _check(self, score: Score) -> None:
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


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Switch a model to evaluation; at the end, restore its mode and the random state of torch."""
    import torch

    state, training = torch.get_rng_state(), model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        torch.set_rng_state(state)
