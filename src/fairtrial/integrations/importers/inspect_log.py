"""The content of an Inspect log, from `.eval` (a ZIP file) or `.json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fairtrial.base.foreign import ExpansionBudget, limit_factor
from fairtrial.data.session.events import PromptExecuted, TokenUsage, ToolInvoked
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import DataError
from fairtrial.integrations.importers.scores import SourceScore
from fairtrial.integrations.importers.values import (
    as_document,
    as_mapping,
    as_number,
    as_objects,
    as_text,
    is_id,
    load_object,
    usage_of,
)
from fairtrial.integrations.importers.zip_members import ZipMembers

# The values that `value_to_float` of Inspect gives to letters and words.
_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ATTACHMENT = re.compile(r"attachment://([0-9a-f]{32,})")
OWN_RUN = "fairtrial_run"
"""The key of the metadata of logs that Fairtrial wrote."""
OWN_ENDING = "fairtrial_ending"
"""The key of the outcome and the stage of a trial, in the store of its sample."""
_ATTACHED_BYTES = 32 << 20  # In one sample.
_START, _HEADER, _SAMPLES = "_journal/start.json", "header.json", "samples/"


@dataclass(frozen=True)
class InspectLog:
    """A log: its header, and its samples one by one."""

    path: Path

    @cached_property
    def _members(self) -> ZipMembers:
        return ZipMembers(self.path)

    @property
    def _is_zip(self) -> bool:
        return self.path.suffix.lower() == ".eval"

    @cached_property
    def header(self) -> dict[str, Any]:
        """The log without its samples. A log that is still being written has no results."""
        if not self._is_zip:
            document = load_object(self.path)
            return {name: value for name, value in document.items() if name != "samples"}
        for name in (_HEADER, _START):
            if name in self._members.names:
                return {"status": "started", **self._load(name)}
        raise DataError(f"{self.path} must be a log of Inspect (it has neither {_HEADER} nor {_START})")

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield the samples with their attachments in place."""
        if self._is_zip:
            names = [name for name in self._members.names if name.startswith(_SAMPLES) and name.endswith(".json")]
            found: Iterator[dict[str, Any]] = map(self._load, names)
        else:
            found = iter(as_objects(load_object(self.path).get("samples")))
        for sample in found:
            if not is_id(sample.get("id")) or not isinstance(sample.get("epoch"), int):
                raise DataError(f"{self.path}: every sample must have an id and an epoch (got {list(sample)[:8]})")
            attachments = as_mapping(sample.get("attachments"))
            if attachments:
                source = f"{self.path}: the attachments of sample {str(sample['id'])[:100]}"
                budget = ExpansionBudget(source, int(_ATTACHED_BYTES * limit_factor()))
                sample = with_attachments(_without_inputs(sample), attachments, budget)
            yield sample

    def _load(self, name: str) -> dict[str, Any]:
        return as_document(self._members.read(name), f"{self.path}: {name}")


def _without_inputs(sample: dict[str, Any]) -> dict[str, Any]:
    """Leave out what model calls were sent: it repeats the messages, with all that is attached to them."""
    unused = ("input", "call", "attachments")
    events = [{name: event[name] for name in event if name not in unused} for event in as_objects(sample.get("events"))]
    return {**sample, "events": events}


def with_attachments(value: Any, attachments: Mapping[str, Any], budget: ExpansionBudget) -> Any:
    """Replace references to attachments, which stand for long texts, by what they refer to."""
    if isinstance(value, str):
        if "attachment://" not in value:
            return value

        def attached(found: re.Match[str]) -> str:
            text = as_text(attachments.get(found[1])) or found[0]
            budget.take(len(text))  # A text may be referred to any number of times.
            return text

        return _ATTACHMENT.sub(attached, value)
    if isinstance(value, list):
        return [with_attachments(item, attachments, budget) for item in value]
    if isinstance(value, dict):
        return {
            name: with_attachments(item, attachments, budget) for name, item in value.items() if name != "attachments"
        }
    return value


def number_of(value: Any) -> float | None:
    """Return a value of Inspect as a number; None for NaN and for what Inspect has no number for."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        if value in _GRADES or value.lower() in _GRADES:
            return _GRADES.get(value, _GRADES.get(value.lower()))
        try:
            return as_number(float(value))
        except ValueError:
            return None
    return as_number(value)


def scores_of(sample: Mapping[str, Any], *, own: bool = False) -> list[SourceScore]:
    """Return the scores of a sample. The parts of a score that is an object are scores of their own.

    In logs that Fairtrial wrote (`own`), the metadata of a score say whether it passed.
    """
    found: list[SourceScore] = []
    for name, score in as_mapping(sample.get("scores")).items():
        value = as_mapping(score).get("value")
        reason = as_text(as_mapping(score).get("explanation"))
        if isinstance(value, dict):
            found += [SourceScore(f"{name}.{part}", number_of(number), None, reason) for part, number in value.items()]
        else:
            passed = as_mapping(as_mapping(score).get("metadata")).get("passed") if own else None
            found.append(SourceScore(name, number_of(value), passed if isinstance(passed, bool) else None, reason))
    return found


def input_of(sample: Mapping[str, Any]) -> Any:
    """Return the input of a sample: text, or the messages without what only Inspect needs."""
    given = sample.get("input")
    if not isinstance(given, list):
        return given
    return [{"role": as_text(message.get("role")), "content": text_of(message)} for message in as_objects(given)]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may have parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(as_text(part.get("text")) for part in as_objects(content))
    return as_text(content)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning in a message."""
    return "".join(as_text(part.get("reasoning")) for part in as_objects(message.get("content")))


def sample_usage(sample: Mapping[str, Any]) -> TokenUsage:
    """Return the usage of all models of a sample."""
    total = TokenUsage()
    for usage in as_mapping(sample.get("model_usage")).values():
        total += _usage(as_mapping(usage))
    return total


def session_of(sample: Mapping[str, Any]) -> tuple[object, ...]:
    """Return messages, model calls and tool calls, in order."""
    events = as_objects(sample.get("events"))
    calls = [_model_call(event) for event in events if event.get("event") == "model"]
    tools = {as_text(event.get("id")): event for event in events if event.get("event") == "tool"}
    recorded: list[object] = []
    for message in as_objects(sample.get("messages")):
        role = as_text(message.get("role")) or "user"
        tool = tools.pop(as_text(message.get("tool_call_id")), None) if role == "tool" else None
        if role == "assistant" and calls:
            recorded.append(calls.pop(0))
        if tool is not None:
            recorded.append(_tool_call(tool))
        requested = tuple(
            ToolCall(as_text(call.get("function")), as_mapping(call.get("arguments")), as_text(call.get("id")))
            for call in as_objects(message.get("tool_calls"))
        )
        name = as_text(message.get("tool_call_id")) if role == "tool" else ""
        recorded.append(ChatMessage(role, text_of(message), requested, name, reasoning_of(message)))
    return (*recorded, *calls, *map(_tool_call, tools.values()))


def _usage(usage: Mapping[str, Any]) -> TokenUsage:
    read, written = usage.get("input_tokens_cache_read"), usage.get("input_tokens_cache_write")
    # Inspect counts what came from a cache beside the other input, we count it as part of the input.
    whole = sum(as_number(count) or 0 for count in (usage.get("input_tokens"), read, written))
    return usage_of(whole, usage.get("output_tokens"), read, usage.get("total_cost"))


def _model_call(event: Mapping[str, Any]) -> PromptExecuted:
    output = as_mapping(event.get("output"))
    choices = as_objects(output.get("choices"))
    seconds = as_number(output.get("time"))
    return PromptExecuted(
        adapter="inspect",
        model=as_text(event.get("model")),
        usage=_usage(as_mapping(output.get("usage"))),
        finish_reason=(as_text(choices[0].get("stop_reason")) or None) if choices else None,
        cached=event.get("cache") == "read",
        duration_ms=None if seconds is None else seconds * 1000,
    )


def _tool_call(event: Mapping[str, Any]) -> ToolInvoked:
    error = as_text(as_mapping(event.get("error")).get("message"))
    return ToolInvoked(
        as_text(event.get("function")),
        as_mapping(event.get("arguments")),
        event.get("result"),
        not error,
        error or None,
        adapter="inspect",
        call_id=as_text(event.get("id")),
    )
