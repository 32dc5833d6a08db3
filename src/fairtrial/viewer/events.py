"""The session of a trial as the trial page shows it: entries, outline, waterfall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairtrial.base import formatting
from fairtrial.base.codec import to_json
from fairtrial.data.session.views import JUDGE, USER, Envelope
from fairtrial.reports.render.pictures import AttachmentShown, attachments_in
from fairtrial.reports.render.safe_text import event_text, value_text
from fairtrial.viewer.text import json_text

PAGE_EVENTS = 5_000
"""Events on one page; browsers lay out only those in view."""
_BARS = 400


class CallShown(NamedTuple):
    """A tool call that a message asks for."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TranscriptEntry:
    """One event of a transcript.

    Attributes:
        seq: Its number, which is its anchor on the page.
        seconds: Since the first event.
        lane: "message", "tool", "model", "judge", "user" (what a simulated user does beside speaking) or "other".
        label: What it is: a role, a tool's name, the model.
        body: Its text.
        attempt: The attempt that recorded it.
        calls: Tool calls that a message asks for.
        reasoning: What the model thought before it spoke.
        failed: Whether it is a failed call or attempt.
        timing: How long it took, as text.
        raw: The event as JSON.
        attachments: What it refers to.
    """

    seq: int
    seconds: float
    lane: str
    label: str
    body: str
    attempt: int
    calls: tuple[CallShown, ...] = ()
    reasoning: str = ""
    failed: bool = False
    timing: str = ""
    raw: str = ""
    attachments: tuple[AttachmentShown, ...] = ()


class WaterfallBar(NamedTuple):
    """One bar: from `x` to `x + width`, in thousandths of the whole."""

    seq: int
    label: str
    lane: str
    x: float
    width: float
    words: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """The events of a trial, or some of them, and what can be said about all of them."""

    entries: tuple[TranscriptEntry, ...]
    total: int
    attempts: tuple[int, ...]
    bars: tuple[WaterfallBar, ...]
    seconds: float
    unmeasured: int
    lanes: Mapping[str, int] = field(default_factory=dict)


def transcript(
    envelopes: Sequence[Envelope], *, lane: str = "", attempt: int | None = None, start: int = 0, raw: bool = False
) -> Transcript:
    """Build the transcript: of one lane or attempt if these are named, from the event at `start` on."""
    first = min((event.time for event in envelopes), default=0.0)
    attempts = tuple(sorted({event.attempt for event in envelopes}))
    lanes = Counter(map(_lane, envelopes))
    chosen = [
        event
        for event in envelopes
        if (not lane or _lane(event) == lane) and (attempt is None or event.attempt == attempt)
    ]
    bars, seconds, unmeasured = _waterfall(chosen)
    page = chosen[start : start + PAGE_EVENTS]
    entries = tuple(_entry(event, event.time - first, raw=raw) for event in page)
    return Transcript(entries, len(chosen), attempts, bars, seconds, unmeasured, lanes)


def _lane(event: Envelope) -> str:
    if event.actor == JUDGE:
        return "judge"
    if event.actor == USER and _kind(event) != "ChatMessage":
        return "user"
    return {"ChatMessage": "message", "ToolInvoked": "tool", "PromptExecuted": "model"}.get(_kind(event), "other")


def _kind(event: Envelope) -> str:
    return event.kind.rpartition(":")[2]


def _entry(event: Envelope, seconds: float, *, raw: bool) -> TranscriptEntry:
    data = to_json(event.data)
    label, body, _style = event_text(event)
    kind, lane = _kind(event), _lane(event)
    calls: tuple[CallShown, ...] = ()
    reasoning = ""
    if kind == "ChatMessage" and isinstance(data, dict):
        label = str(data.get("role") or "message") + (f" {data['name']}" if data.get("name") else "")
        content = data.get("content") or ""
        body = content if isinstance(content, str) else _parts(content)
        reasoning = str(data.get("reasoning") or "")
        calls = tuple(
            CallShown(str(call.get("name")), value_text(call.get("arguments") or {}))
            for call in data.get("tool_calls") or ()
            if isinstance(call, dict)
        )
    elif kind == "ToolInvoked" and isinstance(data, dict):
        label = str(data.get("name"))
        arguments = value_text(data.get("params") or {})
        body = f"{arguments}\n-> {data.get('error') or value_text(data.get('result'))}"
    elif kind not in ("PromptExecuted", "AgentEnded", "ConversationEnded", "UserBriefed", "UserChecked"):
        label, body = kind, value_text(data)
    failed = kind == "AttemptFailed" or (
        isinstance(data, dict) and (bool(data.get("error")) or data.get("success") is False)
    )
    return TranscriptEntry(
        event.seq, seconds, lane, label, body, event.attempt, calls, reasoning, failed, _timing(data),
        json_text(event._asdict()) if raw else "", tuple(attachments_in(data)),
    )  # fmt: skip


def _parts(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    return "\n".join(part if isinstance(part, str) else f"[attachment {_attachment_name(part)}]" for part in parts)


def _attachment_name(part: Any) -> str:
    found = next(iter(attachments_in(part)), None)
    return value_text(part) if found is None else found.name or found.media_type


def _timing(data: Any) -> str:
    if not isinstance(data, dict):
        return ""
    took, waited = data.get("duration_ms"), data.get("waited_ms")
    parts = [formatting.duration(took)] if isinstance(took, int | float) else []
    if isinstance(waited, int | float) and waited >= 1:
        parts.append(f"waited {formatting.duration(waited)}")
    return ", ".join(parts)


def _waterfall(events: Sequence[Envelope]) -> tuple[tuple[WaterfallBar, ...], float, int]:
    """Return the bars of all measured calls, the length of the whole in seconds, and the number of unmeasured calls.

    Calls are recorded when they end, so a call began its duration before its event.
    """
    spans: list[tuple[float, float, Envelope, Mapping[str, Any]]] = []
    unmeasured = 0
    for event in events:
        data = event.data
        if _kind(event) not in ("PromptExecuted", "ToolInvoked", "SpanClosed") or not isinstance(data, Mapping):
            continue
        took = data.get("duration_ms")
        if isinstance(took, int | float) and took >= 0:
            spans.append((event.time - took / 1000, event.time, event, data))
        else:
            unmeasured += 1
    if not spans:
        return (), 0.0, unmeasured
    start, end = min(one[0] for one in spans), max(one[1] for one in spans)
    scale = 1000 / max(end - start, 1e-6)
    bars = [
        WaterfallBar(
            event.seq,
            str(data.get("name") or data.get("model") or data.get("adapter") or "model"),
            "span" if _kind(event) == "SpanClosed" else _lane(event),
            round((began - start) * scale, 1),
            max(round((ended - began) * scale, 1), 2.0),
            f"{began - start:.2f} s, {formatting.duration(1000 * (ended - began))}",
        )
        for began, ended, event, data in sorted(spans, key=lambda one: one[0])[:_BARS]
    ]
    return tuple(bars), end - start, unmeasured
