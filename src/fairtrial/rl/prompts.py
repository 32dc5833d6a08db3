"""The samples of a suite as the prompt file of a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, get_args

from fairtrial.base.codec import dumps, to_json
from fairtrial.base.sync_bridge import call_sync
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.models.agent import PrepareMessages, opening_messages
from fairtrial.rl.chat import ChatRow, to_chat
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
            chat = make(sample)
            file.write(dumps(_ROWS[format](suite, sample, chat, count - 1)) + "\n")
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


def _plain(key: str) -> Callable[..., dict[str, Any]]:
    def row(suite: EvalSuite, sample: Sample[Any, Any], chat: list[ChatRow], index: int) -> dict[str, Any]:
        return {key: chat, "sample_id": sample.id, "sample": dumps(sample_text(sample))}

    return row


def _verl(suite: EvalSuite, sample: Sample[Any, Any], chat: list[ChatRow], index: int) -> dict[str, Any]:
    return {
        "data_source": suite.name,
        "prompt": chat,
        "reward_model": {"style": "rule", "ground_truth": _truth(sample)},
        "extra_info": {"index": index, "sample_id": sample.id, "sample": dumps(sample_text(sample))},
    }


def _skyrl(suite: EvalSuite, sample: Sample[Any, Any], chat: list[ChatRow], index: int) -> dict[str, Any]:
    return {
        "data_source": suite.name,
        "prompt": chat,
        "env_class": suite.name,
        "reward_spec": {"method": "rule", "ground_truth": _truth(sample)},
        "extra_info": {"index": index, "sample_id": sample.id, "sample": dumps(sample_text(sample))},
    }


def _openrlhf(suite: EvalSuite, sample: Sample[Any, Any], chat: list[ChatRow], index: int) -> dict[str, Any]:
    return {"input": chat, "label": dumps(sample_text(sample))}


def _miles(suite: EvalSuite, sample: Sample[Any, Any], chat: list[ChatRow], index: int) -> dict[str, Any]:
    return {"prompt": chat, "label": dumps(sample_text(sample)), "metadata": {"sample_id": sample.id}}


def _truth(sample: Sample[Any, Any]) -> str:
    expected = sample.expected
    return expected if isinstance(expected, str) else dumps(to_json(expected))


_ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "trl": _plain("prompt"),
    "verl": _verl,
    "skyrl": _skyrl,
    "openrlhf": _openrlhf,
    "miles": _miles,
    "areal": _plain("messages"),
    "messages": _plain("messages"),
}
