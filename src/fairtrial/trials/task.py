"""Tasks, the functions under test, and how they are called."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

from fairtrial.base.isolation import check_sendable
from fairtrial.errors import ConfigurationError
from fairtrial.scoring.evaluator import is_async_callable, name_of, warn_of_binding

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
