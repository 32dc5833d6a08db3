"""Names and parameters of callables of the user."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin


def innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable inside of partials."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a callable in reports."""
    inner = innermost(fn)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return "lambda" if name == "<lambda>" else str(name)


def is_async_callable(fn: Callable[..., Any]) -> bool:
    """True for async functions, partials of them, and objects whose `__call__` is async."""
    inner = innermost(fn)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def parameters_of(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a callable."""
    try:
        try:
            signature = inspect.signature(fn, eval_str=True)
        except Exception:  # Annotations as text may name what exists only for type checkers; the text is still useful.
            signature = inspect.signature(fn)
    except (TypeError, ValueError):  # A built-in that does not show its parameters.
        return [inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)]
    return list(signature.parameters.values())


def partial_keywords(fn: Callable[..., Any]) -> set[str]:
    """Return the keywords set by partials."""
    fixed: set[str] = set()
    while isinstance(fn, functools.partial):
        fixed.update(fn.keywords)
        fn = fn.func
    return fixed


def is_annotated(parameter: inspect.Parameter, kinds: tuple[type, ...]) -> bool:
    """Return whether a parameter is annotated as one of these types, also `| None`, as a type or as text."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        text = annotation.strip("\"'").removeprefix("Optional[").removesuffix("]")
        names = (part.partition("[")[0].strip().rpartition(".")[2] for part in text.split("|"))
        return any(name == kind.__name__ for name in names for kind in kinds)
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return any((get_origin(member) or member) is kind for member in members for kind in kinds)
