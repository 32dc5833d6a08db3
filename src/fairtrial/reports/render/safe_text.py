"""Foreign text made safe to show, and sessions as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fairtrial.base import formatting
from fairtrial.base.codec import dumps, to_json
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import CUT_OFF_REASONS
from fairtrial.data.session.views import JUDGE, USER
from fairtrial.errors import StoreError
from fairtrial.trials.result import EvalResult

# Control characters (escape sequences among them), the separators that break lines, marks that reorder text, and tags,
# which are invisible.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]"
)
_ESCAPES = re.compile(r"(?:\x1b(?:\[[0-?]*+[ -/]*+[@-~]|\][^\x07\x1b]*+(?:\x07|\x1b\\)?|[@-Z\\-_]))++")
# Lone surrogates cannot be encoded; the others are non-characters, which XML rejects.
_NO_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def replace_each(pattern: re.Pattern[str], replacement: str, text: str) -> str:
    """Replace every character that a one-character pattern matches.

    `re.sub` takes a microsecond per match, and foreign text can be all matches; `str.replace` takes nanoseconds.
    """
    if pattern.search(text) is None:
        return text
    for character in pattern.findall("".join(set(text))):
        text = text.replace(character, replacement)
    return text


def whole(text: str) -> str:
    """Replace lone surrogates and non-characters."""
    return text if text.isascii() else replace_each(_NO_TEXT, "\ufffd", text)


def lines(text: str, *, limit: int | None = None) -> str:
    """Remove terminal escapes and control characters, keep lines, and cut to `limit` characters."""
    if limit is not None:
        text = text[: 4 * limit + 100]  # Do not search the part of a large output that is cut off anyway.
    clean = _ESCAPES.sub("", text) if "\x1b" in text else text
    clean = clean.replace("\r\n", "\n").replace("\r", "\n")
    clean = whole(replace_each(_UNSAFE, "", clean))
    return clean if limit is None or len(clean) <= limit else clean[: max(limit - 1, 0)] + "…"


def plain(text: str, *, limit: int | None = None) -> str:
    """Remove terminal escapes and control characters, join lines, and cut to `limit` characters."""
    return lines(text, limit=limit).replace("\n", " ").replace("\t", " ")


def shown(value: Any) -> str:
    """Format a value: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else dumps(value)


_HASH = re.compile("[0-9a-f]{16}")
REPEATED_KEYS = ("earlier_attempts", "deliveries")
"""The metadata of a result that says why its trial was executed again."""
_START = 60  # Characters of an input that name its sample.


def envelopes(result: EvalResult) -> tuple[Any, ...]:
    """Return all recorded events of a trial, including those of judges."""
    session: Any = result.session
    return tuple(session.everything().envelopes)


def session_lines(result: EvalResult) -> Iterator[tuple[float, str, str, str]]:
    """Yield for every event: seconds since the first, its title, its text, and the style of the title."""
    recorded = envelopes(result)
    attempts = len({event.attempt for event in recorded}) > 1
    for event in recorded:
        label, body, style = event_text(event)
        by_user = event.actor == USER and not event.kind.endswith(":ChatMessage")
        marks = " (judge)" if event.actor == JUDGE else " (user)" if by_user else ""
        marks += f" (attempt {event.attempt})" if attempts else ""
        yield event.time - recorded[0].time, f"{label}{marks}", body, style


def event_text(event: Any) -> tuple[str, str, str]:
    """Return the title of an event, its text, and the style of the title in a terminal."""
    data = to_json(event.data)
    kind = event.kind.rpartition(":")[2]
    if kind == "ChatMessage":
        text = data.get("content") or ""
        calls = "; ".join(
            f"calls {call['name']}({_arguments(call['arguments'])})" for call in data.get("tool_calls") or ()
        )
        thought = f"(reasoning) {data['reasoning']}" if data.get("reasoning") else ""
        return str(data["role"]), "\n".join(part for part in (thought, value_text(text), calls) if part), "bold"
    if kind == "ToolInvoked":
        ended = value_text(data.get("result"))
        if data.get("error") or data.get("success") is False:
            ended = f"failed: {data.get('error') or ended}"
        return "invoked", f"{data['name']}({_arguments(data.get('params') or {})}) -> {ended}", "cyan"
    if kind == "PromptExecuted":
        usage = data.get("usage") or {}
        paid = "" if usage.get("cost_usd") is None else f", {formatting.money(usage['cost_usd'])}"
        source = ", from the response cache" if data.get("cached") else paid
        tokens = f"{usage.get('input_tokens', 0):,} + {usage.get('output_tokens', 0):,} tokens{source}"
        if data.get("finish_reason") in CUT_OFF_REASONS:
            tokens += ", cut off by a token limit"
        return "model", f"{data.get('model') or data.get('adapter')}: {tokens}", "dim"
    if kind == "AgentEnded" and data.keys() >= {"reason", "turns"}:
        detail = f": {data['detail']}" if data.get("detail") else ""
        return "ended", f"{data['reason']} after {formatting.count(data['turns'], 'turn')}{detail}", "dim"
    if kind == "ConversationEnded" and data.keys() >= {"reason", "turns"}:
        by = {"turns": "its limit", "state": "the state of the environment"}.get(
            data["reason"], f"the {data['reason']}"
        )
        detail = f": {data['detail']}" if data.get("detail") else ""
        return "conversation", f"ended by {by} after {formatting.count(data['turns'], 'turn')}{detail}", "dim"
    if kind == "UserBriefed" and "goal" in data:
        parts = (("goal", data["goal"]), ("persona", data.get("persona")), ("knows", data.get("knows")))
        texts = ((name, "\n" + text if "\n" in text else " " + text) for name, text in parts if text)
        return "brief", "\n".join(f"{name}:{text}" for name, text in texts), "dim"
    if kind == "UserChecked" and "broken" in data:
        return "checked", f"broken: {data.get('reason')}" if data["broken"] else "the user kept to its brief", "dim"
    return kind, json.dumps(data, ensure_ascii=False), "dim"


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def is_hash(sample_id: str) -> bool:
    """Return whether an id is the hash that a sample without an id gets: it says nothing to people."""
    return _HASH.fullmatch(sample_id) is not None


def sample_of(result: EvalResult) -> Sample[Any, Any]:
    """Return the sample of a result; if only its id could be stored, one that says so, so that the rest is shown."""
    try:
        return result.sample
    except StoreError:
        return Sample(result.sample_id, "(not stored)")


def sample_title(sample_id: str, input: Any) -> str:
    """Return what names a sample in lists: its id and, if that is a hash, the start of its input."""
    return f"{sample_id}  {input_start(input)}" if is_hash(sample_id) else sample_id


def input_start(input: Any) -> str:
    """Return the start of an input on one line."""
    text = " ".join(value_text(input)[: 4 * _START].split())
    return text if len(text) <= _START else f"{text[: _START - 1]}…"


def value_text(value: Any) -> str:
    """Format a value for people: text as it is, everything else as JSON."""
    tree = to_json(value)
    if isinstance(tree, str):
        return tree
    short = json.dumps(tree, ensure_ascii=False)
    return short if len(short) <= 60 else json.dumps(tree, ensure_ascii=False, indent=2)


def executions_text(result: EvalResult) -> str:
    """Say why a trial was executed more than once; empty if it was not, or if the result does not say."""
    earlier, deliveries = (result.own_metadata.get(key) for key in REPEATED_KEYS)
    reasons = []
    if isinstance(earlier, int):
        if retries := result.attempt - 1 - earlier:
            reasons.append(f"{formatting.count(retries, 'retry', 'retries')} after an error or a timeout (max_retries)")
        if earlier:
            reasons.append(
                f"{formatting.count(earlier, 'attempt')} in an earlier execution that ended in an error "
                "(--resume errors, or a resumed run)"
            )
    if isinstance(deliveries, int):
        reasons.append(
            f"its request was delivered {deliveries} times (a worker stopped, lost its lease or handed it back)"
        )
    return "; ".join(reasons)
