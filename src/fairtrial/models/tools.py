"""Tools of agents, calls of them, and content that is more than text."""

from __future__ import annotations

import base64
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

import anyio

from fairtrial.base.codec import dumps, from_json, parse_json, to_json
from fairtrial.base.offload import DaemonThreads
from fairtrial.data.sample import Attachment
from fairtrial.data.session.events import ToolInvoked
from fairtrial.data.session.trajectory import ChatMessage, Echo, ToolCall
from fairtrial.errors import CodecError, ConfigurationError, InvalidCallError, ToolServerError
from fairtrial.models.adapter import ToolSpec
from fairtrial.models.schema import OutputSchema, Schema, hints_of, object_schema, schema_of
from fairtrial.scoring.parameters import is_async_callable
from fairtrial.scoring.structure import schema_check

UNPARSED = "__unparsed__"
"""The only argument of a tool call whose arguments were not a JSON object: the text as it came."""


class StopAgent(Exception):  # noqa: N818 - ends an agent, as StopIteration ends an iteration
    """Raised by a tool to end its agent: the task is finished, or the agent may not go on.

    Args:
        output: The output of the agent, and the result of the call; by default its last text.
    """

    def __init__(self, output: Any = None) -> None:
        super().__init__("a tool ended the agent")
        self.output = output


class ToolCallError(Exception):
    """Raised by a tool to tell the model why a call failed, with nothing before the message."""


class Tool:
    """A typed Python function, sync or async, that a model can call: the schema comes from its signature.

    Args:
        fn: The function. Its docstring is the description for the model; `Annotated[int, "in metres"]` describes a
            parameter.
        name: Its name for the model; by default that of the function.
        description: Instead of the docstring.
        inline: Call it on the event loop instead of in a thread; only for functions that are quick and never block.
        parameters: A JSON Schema of the parameters, instead of the signature. Arguments that fit it are passed as JSON
            values, unconverted; needs `fairtrial[text]`.
    """

    __slots__ = ("_hints", "_open", "_parameters", "fn", "inline", "is_async", "spec")

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        inline: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        given: Any = fn
        if not callable(given):
            remedy = "\nthe tools of a server are for agent_task(tools=[...])" if isinstance(given, ToolSource) else ""
            raise ConfigurationError(f"a tool must be a function (got {fn!r:.80}){remedy}")
        called = name or _name(fn)
        self.fn = fn
        self.inline = inline
        self.is_async = is_async_callable(fn)
        text = inspect.getdoc(fn) if description is None else description
        if parameters is not None:
            self._check_schema(called, parameters)
            self.spec = ToolSpec(called, text or "", parameters)
            return
        signature = inspect.signature(fn).parameters.values()
        positional = [p.name for p in signature if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
        if positional:
            raise ConfigurationError(
                f"the parameters of tool {called!r} must be allowed as keywords, which is how models pass them "
                f"(got {', '.join(positional)} as positional only)"
            )
        self._open = any(p.kind is p.VAR_KEYWORD for p in signature)
        self._parameters = {p.name: p for p in signature if p.kind is not p.VAR_KEYWORD}
        self._hints = hints_of(_annotated(fn))
        self.spec = ToolSpec(called, text or "", self._schema())

    @property
    def name(self) -> str:
        """Its name for the model."""
        return self.spec.name

    def _check_schema(self, name: str, parameters: Mapping[str, Any]) -> None:
        if parameters.get("type") != "object":
            raise ConfigurationError(f'the schema of tool {name!r} must have "type": "object" (got {parameters!r:.80})')
        _schema_check(dumps(parameters), name)

    def _schema(self) -> Schema:
        properties: dict[str, Schema] = {}
        definitions: Schema = {}
        required: list[str] = []
        for name, parameter in self._parameters.items():
            schema = schema_of(self._hints.get(name, Any))
            definitions.update(schema.pop("$defs", {}))
            properties[name] = schema
            if parameter.default is parameter.empty:
                required.append(name)
        found = {**object_schema(properties, required), "additionalProperties": self._open}
        return {**found, "$defs": definitions} if definitions else found

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments from the model to the parameters of the function.

        Raises:
            CodecError: an argument does not match; the message names the place and the reason, for the model.
        """
        if not isinstance(given, Mapping):
            raise CodecError("the arguments must be an object")
        if not hasattr(self, "_parameters"):  # It has a JSON Schema instead.
            if problem := _schema_check(dumps(self.spec.parameters), self.name)(given):
                raise CodecError(problem)
            return dict(given)
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in self._parameters and not self._open:
                near = get_close_matches(name, self._parameters, n=1)
                known = ", ".join(self._parameters) or "no parameters"
                raise CodecError(
                    f"{self.name} has no parameter {name!r}; "
                    + (f"did you mean {near[0]!r}?" if near else f"it has {known}")
                )
            try:
                values[name] = from_json(self._hints.get(name, object), value)
            except CodecError as error:
                raise error.under(name) from None
        for name, parameter in self._parameters.items():
            if name not in values and parameter.default is parameter.empty:
                raise CodecError(f"{self.name} needs the parameter {name!r}")
        return values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Tool {self.name}>"


@functools.lru_cache(256)
def _schema_check(schema: str, tool: str) -> Callable[[Any], str]:
    return schema_check(json.loads(schema), f"tool {tool!r}")


@runtime_checkable
class ToolSource(Protocol):
    """Tools that must be opened before they can be called, such as those of a server."""

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Return the tools for one trial, which end with the block."""
        ...


def split_sources(
    tools: Sequence[Callable[..., Any] | Tool | ToolSource],
) -> tuple[list[Callable[..., Any] | Tool], tuple[ToolSource, ...]]:
    """Return tools that can be called at once, and the sources of others."""
    functions: list[Callable[..., Any] | Tool] = []
    sources: list[ToolSource] = []
    for tool in tools:
        if not callable(tool) and isinstance(tool, ToolSource):
            sources.append(tool)
        else:
            functions.append(tool)
    return functions, tuple(sources)


def as_tools(tools: Sequence[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Return tools by name; rejects two with the same name."""
    named: dict[str, Tool] = {}
    for given in tools:
        tool = given if isinstance(given, Tool) else Tool(given)
        if named.setdefault(tool.name, tool) is not tool:
            raise ConfigurationError(
                f"the names of tools must be unique (got {tool.name!r} twice); rename one with Tool(fn, name=...), "
                "or those of a server with mcp_tools(..., prefix=...)"
            )
    return named


type ToolContent = str | tuple[str | Attachment, ...]
"""The result of a tool for the model: text, or parts if the tool returned attachments."""


def tool_message(call: ToolCall, result: ToolContent, *, failed: bool = False) -> ChatMessage:
    """Return the message with a tool's result; `name` is that of the call."""
    return ChatMessage("tool", result, name=call.id, failed=failed)


def _name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", "") or type(fn).__name__
    if not name.isidentifier():
        raise ConfigurationError(f"a tool must have a name (got {fn!r}); name it with Tool(fn, name=...)")
    return str(name)


def _annotated(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if inspect.isroutine(fn) else fn.__call__


type BeforeTool = Callable[[ToolCall], str | Awaitable[str | None] | None]
"""Decides about a tool call: None lets it happen, a text denies it, and raising `StopAgent` ends the agent."""

LONGEST_ERROR = 2000
"""The longest error message of a tool that a model receives and a session records."""


@dataclass(slots=True)
class ToolCaller:
    """Calls the tools of one trial.

    Args:
        tools: The tools by name.
        threads: The threads of sync tools.
        timeout_seconds: The time limit of one call.
        max_chars: The longest text of a result.
        prompt_name: The name of the agent, for the record.
        adapter_name: The provider of the model, for the record.
        session_id: The session of the trial, for the record.
    """

    tools: Mapping[str, Tool]
    threads: DaemonThreads
    timeout_seconds: float | None = None
    max_chars: int | None = None
    prompt_name: str = field(default="", kw_only=True)
    adapter_name: str = field(default="", kw_only=True)
    session_id: UUID | None = field(default=None, kw_only=True)
    stopped: tuple[str, StopAgent] | None = field(default=None, init=False)
    """What ended the agent, if something did: a tool or the hook before it."""
    broken: ToolServerError | None = field(default=None, init=False)
    """Why the trial cannot go on, if the server of a tool has failed."""

    async def review(self, call: ToolCall, hook: BeforeTool | None) -> str | None:
        """Return why a call is denied; None if it may happen."""
        if hook is None:
            return None
        if self.stopped is not None:
            return "the agent was ended before this call"
        try:
            found = hook(call)
            reason = await found if inspect.isawaitable(found) else found
        except StopAgent as stop:
            self.stopped = f"before_tool, at a call of {call.name!r},", stop
            return "the agent was ended at this call"
        if not isinstance(reason, str | None):
            raise ConfigurationError(f"before_tool must return None, or the reason for a denial (got {reason!r:.80})")
        return reason

    async def call(self, call: ToolCall, denied: str | None = None) -> tuple[ToolInvoked, ToolContent]:
        """Call a tool; returns the event to record and the content for the model, an error message if it failed."""
        if denied is not None:
            return self._failed(call, f"denied: {denied}")
        began = anyio.current_time()
        invoked, text = await self._call(call)
        return replace(invoked, duration_ms=round((anyio.current_time() - began) * 1000, 3)), text

    async def _call(self, call: ToolCall) -> tuple[ToolInvoked, ToolContent]:
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return self._failed(call, f"there is no tool {call.name!r}; the tools are: {known}")
        if UNPARSED in call.arguments:
            return self._failed(call, "the arguments must be a JSON object")
        try:
            arguments = tool.arguments(call.arguments)
        except CodecError as error:
            return self._failed(call, f"bad arguments: {error}")
        stop: StopAgent | None = None
        try:
            with anyio.fail_after(self.timeout_seconds):
                value = await self._invoke(tool, arguments)
        except StopAgent as error:
            stop, value = error, error.output
        except ToolServerError as error:
            self.broken = self.broken or error
            return self._failed(call, str(error))
        except ToolCallError as error:
            return self._failed(call, str(error))
        except Exception as error:
            if isinstance(error, TimeoutError) and not str(error) and self.timeout_seconds:
                return self._failed(call, f"it did not finish within {self.timeout_seconds:g} s")
            return self._failed(call, f"{type(error).__name__}: {error}")
        try:
            result, content = to_json(value), _content(value)
        except CodecError as error:
            return self._failed(call, f"its result cannot be shown: {error}")
        if stop is not None and self.stopped is None:
            self.stopped = f"the tool {call.name!r}", stop
        if self.max_chars is not None and (shorter := _cut(content, self.max_chars)) is not content:
            result = content = shorter
        return self._invoked(call, to_json(result), True, None), content

    async def _invoke(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        if tool.is_async or tool.inline:
            value = tool.fn(**arguments)
        else:
            value = await self.threads.run(partial(tool.fn, **arguments))
        return await value if inspect.isawaitable(value) else value

    def _failed(self, call: ToolCall, problem: str) -> tuple[ToolInvoked, ToolContent]:
        problem = problem[:LONGEST_ERROR]
        return self._invoked(call, None, False, problem), f"Error: {problem}"

    def _invoked(self, call: ToolCall, result: Any, success: bool, problem: str | None) -> ToolInvoked:
        where = (self.prompt_name, self.adapter_name, self.session_id, datetime.now(UTC))
        return ToolInvoked(call.name, call.arguments, result, success, problem, *where, call_id=call.id)


def _content(value: Any) -> ToolContent:
    """Return a result as the model receives it: attachments as parts, other values as text."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list | tuple) else (value,)
    if not any(isinstance(part, Attachment) for part in parts):
        return dumps(value)
    return tuple(part if isinstance(part, str | Attachment) else dumps(part) for part in parts)


def _cut(content: ToolContent, limit: int) -> ToolContent:
    """Return a result with at most this much text, and a note about the rest; the same object if all of it fits."""
    texts = [content] if isinstance(content, str) else [part for part in content if isinstance(part, str)]
    size = sum(map(len, texts))
    if size <= limit:
        return content
    note = f"\n[{size - limit} of {size} characters were left out]"
    if isinstance(content, str):
        return content[:limit] + note
    kept: list[str | Attachment] = []
    for part in content:
        kept.append(part[:limit] if isinstance(part, str) else part)
        limit -= len(part) if isinstance(part, str) else 0
        limit = max(limit, 0)
    return (*(part for part in kept if part != ""), note)


_MERGED = ("tools", "include")  # Lists that parameters add to instead of replacing them.


def with_params(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with its parameters: lists of tools and of what to include are joined."""
    check_one_answer(params)
    merged = {**body, **params}
    for name in _MERGED:
        own, given = body.get(name), params.get(name)
        if isinstance(own, list) and isinstance(given, list | tuple):
            merged[name] = [*own, *(item for item in given if item not in own)]
    return merged


def check_one_answer(params: Mapping[str, Any]) -> None:
    """Refuse parameters that ask for several answers, of which all but one would be paid for and lost."""
    for name in ("n", "candidateCount"):
        if params.get(name) not in (None, 1):
            raise InvalidCallError(
                f"{name} must be 1 (got {params[name]!r}): a call has one answer\n"
                "ask for several answers with EvalConfig(repeats=...): each is a trial of its own"
            )


def split_data_url(url: str) -> tuple[str, str] | None:
    """Return the media type and base64 text of a data URL; None for any other URL."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return None
    media_type = head.removeprefix("data:").partition(";")[0]
    return (media_type if "/" in media_type else "application/octet-stream"), data


def instruction(schema: OutputSchema) -> str:
    """Return the schema of an answer as an instruction, for servers without structured outputs."""
    return (
        "Answer with JSON only, with no text around it, that satisfies this JSON Schema:\n"
        f"{json.dumps(schema.schema, ensure_ascii=False)}"
    )


def content_of(message: ChatMessage) -> tuple[str | Attachment, ...]:
    """Return the parts of a message; the APIs refuse empty texts."""
    content = message.content
    return tuple(part for part in ((content,) if isinstance(content, str) else content) if part != "")


def tool_call(name: Any, arguments: Any, call_id: Any, echo: Echo | None = None) -> ToolCall:
    """Create a tool call. Arguments that are not a JSON object are kept as text, so that the model can be told."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments or "{}")
        except CodecError:
            parsed = None
    if not isinstance(name, str):
        raise TypeError("a tool call without a name")
    if not isinstance(parsed, Mapping):
        parsed = {UNPARSED: arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return ToolCall(name, parsed, str(call_id or ""), echo)


def arguments_text(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text; invalid JSON is returned unchanged."""
    unparsed = call.arguments.get(UNPARSED)
    return unparsed if isinstance(unparsed, str) else json.dumps(call.arguments, default=to_json)


def plain_arguments(call: ToolCall) -> Any:
    """Return the arguments of a call as a JSON value, for protocols that send them as an object."""
    return json.loads(sendable(json.dumps(call.arguments, ensure_ascii=False, default=to_json)))


def add_turn(turns: list[dict[str, Any]], role: str, parts: list[dict[str, Any]], key: str = "content") -> None:
    """Append parts to a conversation whose roles must alternate; the results of parallel calls are one turn."""
    if turns and turns[-1]["role"] == role:
        turns[-1][key].extend(parts)
    else:
        turns.append({"role": role, key: parts})


def sendable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode: models sometimes send half of a surrogate pair."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def required_text(value: Any) -> str:
    """Return a value that must be text; raises TypeError otherwise."""
    if not isinstance(value, str):
        raise TypeError(f"expected text (got {type(value).__name__})")
    return value


def count_of(value: Any) -> int:
    """Return a token count; 0 if the value is not a number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def amount_of(value: Any) -> float | None:
    """Return an amount of dollars; None if the value is not a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        return None
    return float(value)


def base64_text(content: bytes) -> str:
    """Encode bytes as base64."""
    return base64.b64encode(content).decode("ascii")
