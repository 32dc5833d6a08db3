"""Rollouts of agents for TRL's `rollout_func`: our loop, tools and environments, with the tokens of every call."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fairtrial.base.sync_bridge import call_sync
from fairtrial.errors import ConfigurationError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.rl.groups import Rollout
from fairtrial.rl.local_model import LocalModelAdapter, ParseReply
from fairtrial.rl.policy import with_adapter
from fairtrial.rl.reward import RewardFunction
from fairtrial.rl.sampling import rollout
from fairtrial.suites.suite import EvalSuite

REWARD, METRICS = "fairtrial_reward", "fairtrial_metrics"
"""The columns with which rollouts pass their rewards and metrics to the reward function."""

_log = logging.getLogger("fairtrial.rl")


class TrlRollouts:
    """A `rollout_func` of TRL; made by `TrlTraining.rollout_func`."""

    def __init__(
        self,
        suite: EvalSuite,
        samples: RewardFunction,
        adapter: ProviderAdapter | None,
        max_new_tokens: int | None,
        parse: ParseReply,
    ) -> None:
        self.__name__ = "fairtrial_rollouts"
        self._suite = suite
        self._samples = samples
        self._adapter = adapter
        self._max_new_tokens = max_new_tokens
        self._parse = parse
        self._started = False

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
        adapter = self._adapter
        if adapter is None:
            adapter = LocalModelAdapter(
                trainer.model,
                trainer.processing_class,
                self._max_new_tokens or trainer.args.max_completion_length,
                temperature=trainer.args.temperature,
                tokens=True,
                parse=self._parse,
            )
        task = with_adapter(self._suite, adapter)
        policy = f"step-{trainer.state.global_step}"
        found: dict[str, list[Rollout]] = {}
        wanted = Counter(names)
        for size in sorted(set(wanted.values())):
            samples = [self._samples.sample_of({"sample_id": name}) for name, count in wanted.items() if count == size]
            config = replace(self._suite.config, max_samples=None, warmup=0, stop_when=None)
            call = partial(rollout, samples, task, self._suite.evaluator, group_size=size, policy=policy, config=config)
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
        said = ", ".join(f"{count} {what}" for what, count in dropped.items() if count)
        if said:
            first = next((one.error for one in rollouts if one.error), None)
            _log.warning("of %d rollouts: %s%s", len(rollouts), said, f"; the first error: {first}" if first else "")
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

    def __init__(self) -> None:
        self.__name__ = "reward"

    def __call__(
        self, *, log_metric: Callable[[str, float], object] | None = None, **columns: Any
    ) -> list[float | None]:
        """Return the rewards of a batch; None for a rollout that was not scored."""
        if REWARD not in columns:
            raise ConfigurationError("the trainer must have rollout_func=training.rollout_func() (it has none)")
        if log_metric is not None:
            metrics: Sequence[Mapping[str, float]] = columns.get(METRICS) or ()
            for name in sorted({name for one in metrics for name in one}):
                values = [one[name] for one in metrics if name in one]
                log_metric(name, sum(values) / len(values))
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
