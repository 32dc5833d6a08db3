"""Prompts with typed parameters and typed outputs."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from fairtrial.base.codec import dumps, to_json
from fairtrial.base.frozen import EMPTY, FrozenDict
from fairtrial.data.sample import Attachment
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import ConfigurationError

# `$name`, `${name}`, and `$$` for a dollar; any other dollar is literal, so prices need no escape.
_PLACEHOLDER = re.compile(r"\$(?:(?P<dollar>\$)|(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})", re.ASCII)


class _Parametrised:
    """Keeps the type argument of `Name[Type](...)`; other attributes cannot be assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "__orig_class__":  # `typing` sets it after `__init__`.
            raise AttributeError(f"a {type(self).__name__} cannot be changed; create a new one")
        object.__setattr__(self, name, value)

    def _keep(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _parameter(self) -> Any:
        named = getattr(self, "__orig_class__", None)
        if named is None:  # A subclass may have named it: class Question(PromptTemplate[Answer]).
            bases = (base for kind in type(self).__mro__ for base in types.get_original_bases(kind))
            named = next((base for base in bases if isinstance(typing.get_origin(base), type)), None)
        args = typing.get_args(named)
        return None if not args or isinstance(args[0], TypeVar) else args[0]


class MarkdownSection[P](_Parametrised):
    """One titled part of a prompt.

    Args:
        title: Its heading; empty for none.
        template: Markdown with `$name` or `${name}` for parameters; `$$` is a dollar.
        key: Its name among the sections of a template.
        role: The role of its message; consecutive sections with the same role are one message.

    `MarkdownSection[Params]` names the dataclass of its parameters; the placeholders are checked against it.
    """

    title: str
    template: str
    key: str
    role: str

    def __init__(self, title: str, template: str, key: str = "", *, role: str = "user") -> None:
        # Indentation is removed before parameters are substituted, which keep theirs.
        text = textwrap.dedent(template).strip("\n")
        self._keep(title=title, template=text, key=key or title, role=role)

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The names of its parameters, in order of appearance."""
        found = (match["name"] or match["braced"] for match in _PLACEHOLDER.finditer(self.template))
        return tuple(dict.fromkeys(name for name in found if name))

    def check(self) -> None:
        """Raise if a placeholder is not a field of the section's parameters."""
        params = self._parameter()
        if isinstance(params, type) and dataclasses.is_dataclass(params):
            fields = [field.name for field in dataclasses.fields(params)]
            unknown = [f"${name}" for name in self.placeholders if name not in fields]
            if unknown:
                raise ConfigurationError(
                    f"section {self.key!r} uses {', '.join(unknown)}, "
                    f"but {params.__name__} has {', '.join(fields) or 'no fields'}"
                )

    def parts(self, params: Mapping[str, Any]) -> list[str | Attachment]:
        """Return the section with its parameters substituted once; substituted text is never expanded again."""
        parts: list[str | Attachment] = [f"## {self.title}\n\n" if self.title else ""]
        end = 0
        for match in _PLACEHOLDER.finditer(self.template):
            parts.append(self.template[end : match.start()])
            parts.append("$" if match["dollar"] else _shown(params[match["name"] or match["braced"]]))
            end = match.end()
        parts.append(self.template[end:])
        return parts

    def __repr__(self) -> str:
        return f"<MarkdownSection {self.key!r}>"


class PromptTemplate[O](_Parametrised):
    """A prompt with parameters. `PromptTemplate[Answer]` requests an `Answer`; without a type, text.

    Args:
        ns: The namespace, as in "support".
        key: The name within it.
        name: The name of its calls in sessions; by default `ns/key`.
        sections: The sections.
        output_type: The type of the output, if it cannot be given in brackets.
    """

    ns: str
    key: str
    name: str
    sections: tuple[MarkdownSection[Any], ...]

    def __init__(
        self,
        ns: str = "",
        key: str = "",
        name: str = "",
        sections: Sequence[MarkdownSection[Any]] = (),
        *,
        output_type: type[O] | None = None,
    ) -> None:
        named = name or "/".join(part for part in (ns, key) if part) or "prompt"
        self._keep(ns=ns, key=key, name=named, sections=tuple(sections), _output_type=output_type)
        if not self.sections:
            raise ConfigurationError(f"prompt template {named!r} has no sections")
        keys = [section.key for section in self.sections]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigurationError(f"prompt template {named!r} has more than one section {', '.join(twice)}")
        for section in self.sections:
            section.check()

    _output_type: type[O] | None

    @property
    def output_type(self) -> type[O]:
        """The type of the output."""
        named: Any = getattr(self, "__orig_class__", None)
        if self._output_type is None and named is not None and named.__parameters__:
            # Inside `def make[T](kind: type[T])` the brackets contain the type variable instead of the type.
            raise ConfigurationError(
                f"the output type of prompt template {self.name!r} must be a type (got the type variable "
                f"{typing.get_args(named)[0]})\npass it by name: {type(self).__name__}(..., output_type=...)"
            )
        kind = self._parameter() if self._output_type is None else self._output_type
        return typing.cast("type[O]", str if kind is None else kind)

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The names of all parameters, in order of appearance."""
        return tuple(dict.fromkeys(name for section in self.sections for name in section.placeholders))

    def bind(self, *params: object, **named: object) -> Prompt[O]:
        """Return the prompt with its parameters, from dataclasses, mappings or keywords that name each exactly once."""
        return Prompt(self).bind(*params, **named)

    def __repr__(self) -> str:
        return f"<PromptTemplate {self.name!r}>"


class Prompt[O]:
    """A template with its parameters."""

    __slots__ = ("_params", "_template")

    def __init__(self, template: PromptTemplate[O]) -> None:
        self._template = template
        self._params: Mapping[str, Any] = EMPTY

    @property
    def template(self) -> PromptTemplate[O]:
        """The template of the prompt."""
        return self._template

    @property
    def name(self) -> str:
        """The name of its calls in the session."""
        return self._template.name

    @property
    def output_type(self) -> type[O]:
        """The type of the output."""
        return self._template.output_type

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters."""
        return self._params

    def bind(self, *params: object, **named: object) -> Prompt[O]:
        """Return the prompt with its parameters, from dataclasses, mappings or keywords that name each exactly once."""
        given: dict[str, Any] = {}
        for source in (*params, named):
            for name, value in _fields(source):
                if name in given:
                    raise ConfigurationError(f"prompt {self.name!r} must get each parameter once (got ${name} twice)")
                given[name] = value
        wanted = self._template.placeholders
        problems = []
        if missing := [f"${name}" for name in wanted if name not in given]:
            problems.append(f"needs {', '.join(missing)}")
        if extra := [f"${name}" for name in given if name not in wanted]:
            problems.append(f"has no place for {', '.join(extra)}")
        if problems:
            raise ConfigurationError(f"prompt {self.name!r} {' and '.join(problems)}")
        bound = Prompt(self._template)
        bound._params = FrozenDict(given)
        return bound

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The prompt as chat messages. Attachments become parts of their message."""
        spoken: list[tuple[str, list[str | Attachment]]] = []
        for section in self._template.sections:
            missing = [f"${name}" for name in section.placeholders if name not in self._params]
            if missing:
                raise ConfigurationError(f"prompt {self.name!r} needs {', '.join(missing)}; bind its parameters first")
            if not spoken or spoken[-1][0] != section.role:
                spoken.append((section.role, []))
            elif spoken[-1][1]:
                spoken[-1][1].append("\n\n")
            spoken[-1][1].extend(section.parts(self._params))
        return tuple(ChatMessage(role, _content(parts)) for role, parts in spoken)

    def render(self) -> str:
        """The whole prompt as Markdown; attachments appear by their names."""
        return "\n\n".join(
            message.content
            if isinstance(message.content, str)
            else "".join(
                part if isinstance(part, str) else f"[{part.name or part.media_type}]" for part in message.content
            )
            for message in self.messages
        )

    def __repr__(self) -> str:
        return f"<Prompt {self.name!r}>"


def _fields(source: object) -> Iterable[tuple[str, Any]]:
    if isinstance(source, Mapping):
        return source.items()
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        return [(field.name, getattr(source, field.name)) for field in dataclasses.fields(source)]
    model_fields = getattr(type(source), "model_fields", None)
    if isinstance(model_fields, Mapping):  # A pydantic model.
        return [(name, getattr(source, name)) for name in model_fields]
    raise ConfigurationError(
        "the parameters of a prompt must be a dataclass, a pydantic model, a mapping or keywords "
        f"(got {type(source).__name__})"
    )


def _shown(value: Any) -> str | Attachment:
    """Return a parameter as it appears in the prompt: text and attachments unchanged, other values as JSON."""
    if isinstance(value, str | Attachment) and not isinstance(value, Enum):
        return value
    tree = to_json(value)
    return tree if isinstance(tree, str) else dumps(value)


def _content(parts: Iterable[str | Attachment]) -> str | tuple[str | Attachment, ...]:
    joined: list[str | Attachment] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    texts = [part for part in joined if part != ""]
    if all(isinstance(part, str) for part in texts):
        return "".join(typing.cast("list[str]", texts))
    return tuple(texts)
