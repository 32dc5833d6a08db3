"""Files for trainers: prompts, and groups of rollouts."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, get_args

from fairtrial.base.codec import dumps, to_json
from fairtrial.base.frozen import first_is
from fairtrial.base.sync_bridge import call_sync
from fairtrial.data.sample import Sample
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import ConfigurationError
from fairtrial.models.agent import PrepareMessages, opening_messages
from fairtrial.models.tools import Tool, as_tools
from fairtrial.reports.report import EvalReport, ExperimentReport
from fairtrial.rl.advantages import AdvantageKind, Convention
from fairtrial.rl.groups import Group, Rollout, TokenRow, groups, load_group
from fairtrial.rl.local_model import ChatRow, split_prompt, to_chat, tool_rows
from fairtrial.rl.reward import sample_text
from fairtrial.store.export import opened
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.task import FIRST_MESSAGES

type PromptFormat = Literal["trl", "verl", "skyrl", "openrlhf", "miles", "areal", "messages"]
"""The trainers whose files `write_prompts` writes; `messages` is the plain one."""


def write_prompts(
    suite: EvalSuite,
    target: Path | str | IO[str],
    format: PromptFormat = "trl",
    *,
    prepare_messages: PrepareMessages | None = None,
) -> int:
    """Write the samples of a suite as lines of JSON, in the columns that a trainer reads; returns their number.

    Every row has the sample as JSON text, from which `reward` scores on any machine. It is text, because a table of
    different objects is changed when it is read: Arrow gives all of them the same fields.

    Args:
        suite: The suite. The first messages of its task (`agent_task`, `prompt_task`) are the prompt; the input of the
            sample, if the task is any other function.
        target: The path of the file, or an open text file.
        format: The trainer.
        prepare_messages: Makes the prompt of a sample, instead of the task.
    """
    if format not in get_args(PromptFormat.__value__):
        allowed = ", ".join(get_args(PromptFormat.__value__))
        raise ConfigurationError(f"format must be one of {allowed} (got {format!r})")
    make = prompt_maker(suite, prepare_messages)
    count = 0
    with opened(target, binary=False) as file:
        for count, sample in enumerate(suite.dataset, 1):
            file.write(dumps(_row(format, suite, sample, make(sample), count - 1)) + "\n")
    return count


def prompt_maker(
    suite: EvalSuite, prepare_messages: PrepareMessages | None = None
) -> Callable[[Sample[Any, Any]], list[ChatRow]]:
    """Return a function from a sample to its first messages, in the chat format.

    Args:
        suite: The suite, whose task makes them; the input of the sample, if the task is any other function.
        prepare_messages: Makes them instead of the task.
    """
    rules = suite.prepared().rules
    first = getattr(rules.tasks[0].fn, FIRST_MESSAGES, None) if prepare_messages is None else None
    params = rules.experiments[0].params

    async def prompt(sample: Sample[Any, Any]) -> Sequence[Any]:
        made = (
            await opening_messages(prepare_messages, sample, sample.input) if first is None else first(sample, params)
        )
        return await made if inspect.isawaitable(made) else made

    return lambda sample: [to_chat(message) for message in call_sync(partial(prompt, sample))]


def _row(
    format: PromptFormat, suite: EvalSuite, sample: Sample[Any, Any], chat: list[ChatRow], index: int
) -> dict[str, Any]:
    """Return the row of a sample in the columns of a trainer."""
    text, expected = dumps(sample_text(sample)), sample.expected
    named = {"sample_id": sample.id, "sample": text}
    truth = {"ground_truth": expected if isinstance(expected, str) else dumps(to_json(expected))}
    described = {"data_source": suite.name, "prompt": chat}
    more = {"extra_info": {"index": index, **named}}
    match format:
        case "trl":
            return {"prompt": chat, **named}
        case "verl":
            return {**described, "reward_model": {"style": "rule", **truth}, **more}
        case "skyrl":
            return {**described, "env_class": suite.name, "reward_spec": {"method": "rule", **truth}, **more}
        case "openrlhf":
            return {"input": chat, "label": text}
        case "miles":
            return {"prompt": chat, "label": text, "metadata": {"sample_id": sample.id}}
        case "areal" | "messages":
            return {"messages": chat, **named}


type TrainingFormat = Literal["trajectories", "sft", "dpo", "kto", "tokens"]
"""Every rollout; conversations to imitate; pairs; verdicts; token ids with masks and log-probabilities."""

TRAINING_FORMATS: tuple[str, ...] = get_args(TrainingFormat.__value__)


@first_is(int)
@dataclass(frozen=True, slots=True)
class ExportCounts:
    """The number of rows that were written, and of rollouts or groups that were left out, by reason."""

    rows: int
    left_out: Mapping[str, int]

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{self.rows:,} rows" + (f"; left out: {reasons}" if reasons else "")


def export(
    report: EvalReport | ExperimentReport,
    target: Path | str | IO[str],
    format: TrainingFormat = "trajectories",
    *,
    min_reward: float | None = None,
    margin: float = 0.0,
    truncated: bool = False,
    tools: Sequence[Callable[..., Any] | Tool] = (),
    advantage: AdvantageKind = "grpo",
    convention: Convention = "trl",
) -> ExportCounts:
    """Write the rollouts of a run as lines of JSON, for training.

    - `trajectories`: every rollout with its messages, status, reward, advantage and metrics
    - `sft`: `messages` of every rollout that passed
    - `dpo`: `prompt`, `chosen` and `rejected`: the best and the worst rollout of each group, if their rewards differ
    - `kto`: `prompt`, `completion` and `label`: whether the rollout passed
    - `tokens`: `prompt_ids`, `completion_ids`, `mask` and `logprobs` of the policy, with `reward`, `advantage`, `group`
      and what sampled them: `run`, `policy` (the run's tag of that name), `actor`, `model` and `sampling`

    Unscored rollouts are left out of all but the first: an error is not a reward. The result says how many rows there
    are and what was left out.

    Args:
        report: The report of a run, or of one experiment of it.
        target: The path of the file, or an open text file.
        format: The format.
        min_reward: For sft and kto, the lowest reward that counts as passed; by default the verdict of the score.
        margin: For dpo, the difference of rewards that a pair must exceed.
        truncated: Also use rollouts that were ended by a limit; trajectories and tokens always have them.
        tools: Tools to describe in each row of sft, dpo and kto, for chat templates with tools.
        advantage: The formula of the advantages; see `advantages`.
        convention: The trainer whose numbers are reproduced.

    Raises:
        ConfigurationError: no rollout qualifies; nothing is written.
    """
    if format not in TRAINING_FORMATS:
        raise ConfigurationError(f"format must be one of {', '.join(TRAINING_FORMATS)} (got {format!r})")
    if margin < 0:
        raise ConfigurationError(f"margin must be at least 0 (got {margin})")
    described = tool_rows(tool.spec for tool in as_tools(tools).values())
    selection = _Selection(min_reward, margin, truncated, {"tools": described} if described else {})
    found = groups(report, advantage=advantage, convention=convention)
    rows = (row for group in found for row in _WRITERS[format](selection, load_group(group)))
    first = next(rows, None)
    if first is None:
        raise ConfigurationError(_nothing(format, selection.left_out))
    count = 1
    with opened(target, binary=False) as file:
        file.write(dumps(first) + "\n")
        for row in rows:
            file.write(dumps(row) + "\n")
            count += 1
    return ExportCounts(count, dict(selection.left_out))


@dataclass(frozen=True, slots=True)
class _Example:
    """A scored rollout as text."""

    rollout: Rollout
    reward: float
    prompt: list[ChatRow]
    completion: list[ChatRow]


@dataclass(slots=True)
class _Selection:
    """Chooses rollouts and counts those that are left out."""

    min_reward: float | None
    margin: float
    truncated: bool
    extra: dict[str, Any]
    left_out: Counter[str] = field(default_factory=Counter)

    def passed(self, rollout: Rollout) -> bool:
        if self.min_reward is not None:
            return rollout.reward is not None and rollout.reward >= self.min_reward
        return rollout.result.passed

    def examples(self, group: Group) -> Iterator[_Example]:
        for rollout in group.rollouts:
            if rollout.reward is None:
                self.left_out["unscored"] += 1
                continue
            if rollout.status == "truncated" and not self.truncated:
                self.left_out["truncated"] += 1
                continue
            try:
                prompt, completion = split_prompt(rollout.messages)
                example = _Example(rollout, rollout.reward, _chat(prompt), _chat(completion))
            except ConfigurationError:
                self.left_out["with attachments"] += 1
                continue
            if not completion or not prompt:
                self.left_out["without a prompt or an answer"] += 1
                continue
            yield example


def _chat(messages: Sequence[ChatMessage]) -> list[ChatRow]:
    return [to_chat(message) for message in messages]


def _trajectories(selection: _Selection, group: Group) -> Iterator[dict[str, Any]]:
    for rollout in group.rollouts:
        try:
            messages = _chat(rollout.messages)
        except ConfigurationError:
            selection.left_out["with attachments"] += 1
            continue
        yield {
            "run": rollout.key.run_id,
            "experiment": group.experiment,
            "sample_id": group.sample_id,
            "repeat": rollout.repeat,
            "outcome": rollout.outcome,
            "status": rollout.status,
            "reward": rollout.reward,
            "advantage": rollout.advantage,
            "metrics": dict(rollout.metrics),
            "messages": messages,
            "output": rollout.result.output,
            "error": rollout.error,
        }


def _sft(selection: _Selection, group: Group) -> Iterator[dict[str, Any]]:
    for example in selection.examples(group):
        if selection.passed(example.rollout):
            yield {"messages": example.prompt + example.completion, **selection.extra}
        else:
            selection.left_out["not passed"] += 1


def _dpo(selection: _Selection, group: Group) -> Iterator[dict[str, Any]]:
    examples = list(selection.examples(group))
    if len(examples) < 2:
        selection.left_out["groups with fewer than 2 examples"] += 1
        return
    best, worst = (choose(examples, key=lambda one: one.reward) for choose in (max, min))
    if best.reward - worst.reward <= selection.margin:
        selection.left_out["groups without a difference"] += 1
    elif best.prompt != worst.prompt:
        selection.left_out["groups with different prompts"] += 1
    else:
        yield {"prompt": best.prompt, "chosen": best.completion, "rejected": worst.completion, **selection.extra}


def _kto(selection: _Selection, group: Group) -> Iterator[dict[str, Any]]:
    for example in selection.examples(group):
        label = selection.passed(example.rollout)
        yield {"prompt": example.prompt, "completion": example.completion, "label": label, **selection.extra}


def _tokens(selection: _Selection, group: Group) -> Iterator[dict[str, Any]]:
    for rollout in group.rollouts:
        if rollout.reward is None:
            selection.left_out["unscored"] += 1
            continue
        if rollout.missing_tokens:
            # Not even the calls that have them: a part of a rollout did not earn its reward.
            selection.left_out[f"with calls without tokens ({rollout.missing_tokens[0]})"] += 1
            continue
        rows = rollout.rows()
        if not rows:
            selection.left_out["without tokens"] += 1
        for place, row in enumerate(rows):
            yield {
                **{name: getattr(row, name) for name in TokenRow.__slots__},
                "reward": rollout.reward,
                "advantage": rollout.advantage,
                # With the run: groups of two runs were sampled by two policies.
                "group": f"{rollout.key.run_id}/{group.experiment}/{group.sample_id}",
                "run": rollout.key.run_id,
                "policy": rollout.policy,
                "repeat": rollout.repeat,
                "row": place,
                "status": rollout.status,
            }


_WRITERS: dict[str, Callable[[_Selection, Group], Iterator[dict[str, Any]]]] = {
    "trajectories": _trajectories,
    "sft": _sft,
    "dpo": _dpo,
    "kto": _kto,
    "tokens": _tokens,
}


_REMEDIES = {
    "sft": "lower min_reward, or repeat samples more often so that some rollouts pass",
    "dpo": "a pair needs two repeats of a sample with different rewards: run with EvalConfig(repeats=8)",
    "tokens": "run the suite with OpenAIAdapter(tokens=True, base_url=...) of vLLM or SGLang, or record tokens with "
    "fairtrial.data.session.session.record_tokens",
}


def _nothing(format: str, left_out: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "the run has no results"
    remedy = _REMEDIES.get(format)
    return f"no rollout of the run can be exported as {format} ({reasons})" + (f"\n{remedy}" if remedy else "")
