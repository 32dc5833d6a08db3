"""Tasks, and the model calls that an application makes by itself."""

from __future__ import annotations

import functools
import inspect
import threading
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from fairtrial.base.codec import from_json
from fairtrial.base.isolation import check_sendable
from fairtrial.data.session.events import PromptExecuted, ToolInvoked
from fairtrial.data.session.session import Session
from fairtrial.data.session.trajectory import ChatMessage, ConversationLog, ToolCall, identity_of
from fairtrial.data.session.views import Envelope, RecordedView, kind_of
from fairtrial.errors import ConfigurationError
from fairtrial.scoring.evaluator import warn_of_binding
from fairtrial.scoring.parameters import is_async_callable, name_of

_PROMPT_EXECUTED, _TOOL_INVOKED, _MESSAGE = kind_of(PromptExecuted), kind_of(ToolInvoked), kind_of(ChatMessage)


class ApplicationCalls:
    """The model calls of one attempt of a task, from any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()
        self._log = ConversationLog[None](self._is_recorded)
        self._own: set[str] = set()  # The tool calls that were recorded here.
        self._matched = Counter[str]()
        self._open: set[Callable[[], None]] = set()

    def begin(self, messages: Iterable[ChatMessage], abandon: Callable[[], None]) -> None:
        """Record the messages that a call is given; `abandon` records what has arrived of an answer not yet read."""
        with self._lock:
            self._open.add(abandon)
            for event in self._log.new_events(messages):
                self._record(event)

    def end(self, abandon: Callable[[], None]) -> None:
        """Note that a call has ended, with an answer or without."""
        with self._lock:
            self._open.discard(abandon)

    def answered(self, executed: PromptExecuted, message: ChatMessage | None) -> None:
        """Record an answer."""
        with self._lock:
            self._record(executed)
            if message is not None:
                self._log.answered(message, None)
                self._record(message)

    def finish(self) -> None:
        """Record what is left at the end of the task: streams that were left early, tools without a result."""
        with self._lock:
            for abandon in tuple(self._open):
                abandon()
            for invoked, _origin in self._log.without_result():
                self._record(invoked)

    def _record(self, event: object) -> None:
        if isinstance(event, ToolInvoked):
            self._own.add(event.call_id)
        self._session.record(event)

    def _is_recorded(self, call: ToolCall) -> bool:
        """Return whether the task has recorded a tool call itself, by its id or, without one, by its name."""
        others = [
            tool
            for tool in self._session.view(attempt=self._session.attempt)[ToolInvoked].all()
            if tool.call_id not in self._own
        ]
        if any(tool.call_id == call.id for tool in others if tool.call_id):
            return True
        if sum(tool.name == call.name for tool in others if not tool.call_id) > self._matched[call.name]:
            self._matched[call.name] += 1
            return True
        return False


def without_recorded(view: RecordedView, envelopes: Sequence[Envelope]) -> Sequence[Envelope]:
    """Return the events of a trace without those that are in the session: the same calls, seen twice.

    A model call of the trace is the same if it was under way at the same time and has as many output tokens. Names of
    models are not compared, because instrumentations write either the requested or the served one.
    """
    calls = [envelope for envelope in view.envelopes if envelope.kind == _PROMPT_EXECUTED]
    same: set[int] = set()
    for place, envelope in enumerate(envelopes):
        if envelope.kind == _PROMPT_EXECUTED:
            match = next((call for call in calls if _is_same(call, envelope)), None)
            if match is not None:
                calls.remove(match)
                same.add(place)
    if not same:
        return envelopes
    messages = Counter(identity_of(message) for message in view.trajectory.messages)
    tools = list(view[ToolInvoked].all())
    for place, envelope in enumerate(envelopes):
        if envelope.kind == _MESSAGE:
            identity = identity_of(from_json(ChatMessage, envelope.data))
            if messages[identity] > 0:
                messages[identity] -= 1
                same.add(place)
        elif envelope.kind == _TOOL_INVOKED:
            recorded = _recorded_tool(tools, envelope.data)
            if recorded is not None:
                tools.remove(recorded)
                same.add(place)
    return [envelope for place, envelope in enumerate(envelopes) if place not in same]


def _is_same(recorded: Envelope, traced: Envelope) -> bool:
    (start, end), (traced_start, traced_end) = _interval(recorded), _interval(traced)
    if traced_end < start or end < traced_start:
        return False
    counts = [envelope.data["usage"] for envelope in (recorded, traced)]
    return None in counts or counts[0]["output_tokens"] == counts[1]["output_tokens"]


def _interval(envelope: Envelope) -> tuple[float, float]:
    return envelope.time - (envelope.data.get("duration_ms") or 0.0) / 1000, envelope.time


def _recorded_tool(tools: Iterable[ToolInvoked], traced: Mapping[str, Any]) -> ToolInvoked | None:
    if traced.get("call_id"):
        return next((tool for tool in tools if tool.call_id == traced["call_id"]), None)
    return next((tool for tool in tools if tool.name == traced["name"]), None)


type Task = Callable[..., Any]
"""Any callable `(input)` or `(input, ctx)`, sync or async."""

_MARKS = "__fairtrial_task__"
_CONTEXT_NAMES = ("ctx", "context", "")  # "": underscores alone, for a context that is not used.
CHECK_INPUT = "__fairtrial_check_input__"
"""The attribute of a task with a function that raises `ConfigurationError` for an unusable (input, parameters)."""

FIRST_MESSAGES = "__fairtrial_first_messages__"
"""The attribute of a task with a function that returns its first messages from (sample, parameters), sync or async."""

WITH_ADAPTER = "__fairtrial_with_adapter__"
"""The attribute of a task with a function that returns the same task with another adapter."""


USER_OF = "__fairtrial_user__"
"""The attribute of a conversation with its simulated user, whose model and prompt are stored with a run."""


@dataclass(frozen=True, slots=True)
class TaskMarks:
    """The options of `@task(...)`."""

    inline: bool = False
    isolate: bool = False
    name: str | None = None


@overload
def task[F: Callable[..., Any]](fn: F, /) -> F: ...
@overload
def task[F: Callable[..., Any]](
    *, inline: bool = False, isolate: bool = False, name: str | None = None
) -> Callable[[F], F]: ...
def task(fn: Any = None, /, *, inline: bool = False, isolate: bool = False, name: str | None = None) -> Any:
    """Set options of a task.

    Args:
        fn: The function, which is returned unchanged.
        inline: The function is quick and never blocks: call it on the event loop instead of in a thread.
        isolate: Call it in a child process, which a timeout can kill even if it holds the interpreter lock.
        name: The name in reports.
    """
    if inline and isolate:
        raise ConfigurationError("inline and isolate are mutually exclusive")

    def mark(target: Any) -> Any:
        try:
            setattr(target, _MARKS, TaskMarks(inline, isolate, name))
        except AttributeError:
            target = functools.partial(target)
            setattr(target, _MARKS, TaskMarks(inline, isolate, name))
        return target

    return mark if fn is None else mark(fn)


@dataclass(frozen=True, slots=True)
class ResolvedTask:
    """A task and how it is called."""

    fn: Callable[..., Any]
    name: str
    takes_context: bool
    is_async: bool
    inline: bool
    isolate: bool
    output_type: Any


def resolve_task(fn: Any) -> ResolvedTask:
    """Determine how a task is called: with the input only, or also with the trial's context."""
    as_task = getattr(fn, "as_task", None)
    if callable(as_task):  # A MainLoop, or another object with `as_task`.
        fn = as_task()
    if not callable(fn):
        raise ConfigurationError(f"a task must be callable (got {fn!r}): pass the function itself")
    marks = getattr(fn, _MARKS, None)
    marks = marks if isinstance(marks, TaskMarks) else TaskMarks()
    is_async = is_async_callable(fn)
    if is_async and marks.isolate:
        raise ConfigurationError(f"isolate=True requires a blocking function (task {name_of(fn)!r} is async)")
    if marks.isolate:
        check_sendable(fn, f"task {marks.name or name_of(fn)!r}")
    return ResolvedTask(
        fn, marks.name or name_of(fn), _takes_context(fn), is_async, marks.inline, marks.isolate, _output_type(fn)
    )


def _takes_context(fn: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return False  # A built-in without a signature.
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(required) > 2 or keywords or not (positional or takes_any):
        raise ConfigurationError(
            f"task {name_of(fn)!r} must take (input) or (input, ctx) (got {inspect.signature(fn)})"
        )
    if len(required) == 2:
        second = required[1]
        named = second.name.lstrip("_") in _CONTEXT_NAMES or second.kind is second.POSITIONAL_ONLY
        if not named and not _names_context(second.annotation):
            warn_of_binding(
                fn,
                f"task {name_of(fn)!r}: {second.name!r} receives the context of the trial (a TrialContext). Name it "
                "ctx or annotate it as TrialContext if that is meant; parameters of experiments are in "
                "ctx.experiment.params",
            )
        return True
    return len(positional) > 1 and (positional[1].name == "ctx" or _names_context(positional[1].annotation))


def _names_context(annotation: Any) -> bool:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return text.rpartition(".")[2] == "TrialContext"


def _output_type(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    target = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004 - its annotations, not a test
    try:
        kind = typing.get_type_hints(target).get("return", object)
    except Exception:
        return object
    return object if kind in (Any, inspect.Parameter.empty, type(None)) else kind
