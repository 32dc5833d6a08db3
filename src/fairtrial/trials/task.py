"""The thing under test, after it has been decided how to call it."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

from fairtrial.errors import ConfigurationError
from fairtrial.isolation import check_sendable
from fairtrial.scoring.evaluator import is_async_callable, name_of

type Task = Callable[..., Any]
"""Any callable `(input)` or `(input, ctx)`, sync or async."""

_MARKS = "__fairtrial_task__"


@dataclass(frozen=True, slots=True)
class TaskMarks:
    """What `@task(...)` says about a function."""

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
    """Say about a task what its parameters cannot.

    Args:
        fn: The function; it stays as it is.
        inline: It is quick and never blocks: call it on the event loop instead of in a thread.
        isolate: Call it in a child process, which a timeout can kill even if it holds the interpreter lock.
        name: Its name in reports.
    """
    if inline and isolate:
        raise ConfigurationError("a task runs inline or isolated, not both")

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
    """A task and how to call it."""

    fn: Callable[..., Any]
    name: str
    takes_context: bool
    is_async: bool
    inline: bool
    isolate: bool
    output_type: Any


def resolve_task(fn: Any) -> ResolvedTask:
    """Decide once how a task is called: with the input alone, or with the trial's context too."""
    as_task = getattr(fn, "as_task", None)
    if callable(as_task):  # A MainLoop, or anything else that knows how to be one.
        fn = as_task()
    if not callable(fn):
        raise ConfigurationError(f"a task must be callable, and {fn!r} is not: pass the function itself")
    marks = getattr(fn, _MARKS, None)
    marks = marks if isinstance(marks, TaskMarks) else TaskMarks()
    is_async = is_async_callable(fn)
    if is_async and marks.isolate:
        raise ConfigurationError(f"task {name_of(fn)!r} is async; isolate=True is for blocking functions")
    if marks.isolate:
        check_sendable(fn, f"task {marks.name or name_of(fn)!r}")
    return ResolvedTask(
        fn, marks.name or name_of(fn), _takes_context(fn), is_async, marks.inline, marks.isolate, _output_type(fn)
    )


def _takes_context(fn: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return False  # A built-in that does not show its parameters.
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(required) > 2 or keywords or not (positional or takes_any):
        raise ConfigurationError(
            f"task {name_of(fn)!r} takes {inspect.signature(fn)}; a task takes (input) or (input, ctx)"
        )
    if len(required) == 2:
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
