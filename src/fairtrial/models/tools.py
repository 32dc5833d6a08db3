"""Python functions as tools of a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fairtrial.codec import from_json
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.models.adapter import ToolSpec
from fairtrial.models.schema import Schema, hints_of, json_schema
from fairtrial.scoring.evaluator import is_async_callable
from fairtrial.session.trajectory import ChatMessage, ToolCall

UNPARSED = "__unparsed__"
"""The only argument of a tool call whose arguments were not a JSON object: the text as it came."""


class Tool:
    """A typed Python function, sync or async, that a model can call: the schema comes from its signature.

    Args:
        fn: The function. Its docstring tells the model what it is for; `Annotated[int, "in metres"]` describes a
            parameter.
        name: Its name for the model; the function's own unless given.
        description: Instead of the docstring.
        inline: It is quick and never blocks: call it on the event loop instead of in a thread.
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
                f"tool {called!r} takes {', '.join(positional)} by position only; models name the parameters they give"
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
            schema = json_schema(self._hints.get(name, Any))
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
        """What a model gave, as the function's parameters.

        Raises:
            CodecError: it does not fit; the error says where and why, for the model to read.
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
    """Tools by name; two of one name are refused."""
    named: dict[str, Tool] = {}
    for given in tools:
        tool = given if isinstance(given, Tool) else Tool(given)
        if named.setdefault(tool.name, tool) is not tool:
            raise ConfigurationError(f"two tools are called {tool.name!r}; wrap one as Tool(fn, name=...)")
    return named


def tool_message(call: ToolCall, result: str) -> ChatMessage:
    """What a tool answered; `name` says to which call."""
    return ChatMessage("tool", result, name=call.id)


def _name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", "") or type(fn).__name__
    if not name.isidentifier():
        raise ConfigurationError(f"{fn!r} has no name a model could call it by; wrap it as Tool(fn, name=...)")
    return str(name)


def _annotated(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if inspect.isroutine(fn) else fn.__call__
