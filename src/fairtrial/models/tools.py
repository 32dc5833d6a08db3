"""Python functions as tools of a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fairtrial.base.codec import from_json
from fairtrial.data.attachment import Attachment
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.models.adapter import ToolSpec
from fairtrial.models.schema import Schema, hints_of, schema_of
from fairtrial.scoring.evaluator import is_async_callable

UNPARSED = "__unparsed__"
"""The only argument of a tool call whose arguments were not a JSON object: the text as it came."""


class StopAgent(Exception):
    """Raised by a tool to end its agent: the task is finished, or the agent may not go on.

    Args:
        output: The output of the agent, and the result of the call; by default its last text.
    """

    def __init__(self, output: Any = None) -> None:
        super().__init__("a tool ended the agent")
        self.output = output


class Tool:
    """A typed Python function, sync or async, that a model can call: the schema comes from its signature.

    Args:
        fn: The function. Its docstring is the description for the model; `Annotated[int, "in metres"]` describes a
            parameter.
        name: Its name for the model; by default that of the function.
        description: Instead of the docstring.
        inline: Call it on the event loop instead of in a thread; only for functions that are quick and never block.
    """

    __slots__ = ("_hints", "_open", "_parameters", "fn", "inline", "is_async", "spec")

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        inline: bool = False,
    ) -> None:
        called = name or _name(fn)
        self.fn = fn
        self.inline = inline
        self.is_async = is_async_callable(fn)
        parameters = inspect.signature(fn).parameters.values()
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
        if positional:
            raise ConfigurationError(
                f"the parameters of tool {called!r} must be allowed as keywords, which is how models pass them "
                f"(got {', '.join(positional)} as positional only)"
            )
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._parameters = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
        self._hints = hints_of(_annotated(fn))
        said = inspect.getdoc(fn) if description is None else description
        self.spec = ToolSpec(called, said or "", self._schema())

    @property
    def name(self) -> str:
        """Its name for the model."""
        return self.spec.name

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
        found: Schema = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": self._open,
        }
        return {**found, "$defs": definitions} if definitions else found

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments from the model to the parameters of the function.

        Raises:
            CodecError: an argument does not match; the message names the place and the reason, for the model.
        """
        if not isinstance(given, Mapping):
            raise CodecError("the arguments must be an object")
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


def as_tools(tools: Sequence[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Return tools by name; rejects two with the same name."""
    named: dict[str, Tool] = {}
    for given in tools:
        tool = given if isinstance(given, Tool) else Tool(given)
        if named.setdefault(tool.name, tool) is not tool:
            raise ConfigurationError(
                f"the names of tools must be unique (got {tool.name!r} twice); rename one with Tool(fn, name=...)"
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
