"""Evaluators of behaviour: tool calls, token usage and recorded events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAliasType

from typing_extensions import TypeVar

from fairtrial.data.session.events import PromptExecuted, ToolInvoked
from fairtrial.data.session.views import SessionView
from fairtrial.errors import ConfigurationError, NothingToScoreError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import Score

_O = TypeVar("_O", default=Any)
_E = TypeVar("_E", default=Any)
SessionEvaluator = TypeAliasType("SessionEvaluator", Callable[[_O, _E, SessionView], Score], type_params=(_O, _E))
"""An evaluator of output, expected value and session; `SessionEvaluator[str, int]` names the types of the first two."""


def _verdict(passed: bool, reason: str) -> Score:
    return Score(1.0 if passed else 0.0, passed, reason)


_NO_TOOL = "no tool was called"


def _calls(session: SessionView, name: str) -> int:
    return sum(call.name == name for call in session[ToolInvoked].all())


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


def tool_called(name: str) -> SessionEvaluator[object, object]:
    """Passes if the tool was called at least once."""

    @evaluator(form="session", inline=True, name=f"tool_called({name})")
    def called(output: Any, expected: Any, session: SessionView) -> Score:
        count = _calls(session, name)
        return _verdict(count > 0, f"tool '{name}' was called {_times(count)}")

    return called


def tool_not_called(name: str) -> SessionEvaluator[object, object]:
    """Passes if the tool was never called."""

    @evaluator(form="session", inline=True, name=f"tool_not_called({name})")
    def not_called(output: Any, expected: Any, session: SessionView) -> Score:
        count = _calls(session, name)
        return _verdict(count == 0, f"tool '{name}' was called {_times(count)}" if count else "")

    return not_called


def tool_call_count(name: str, *, min_count: int = 0, max_count: int | None = None) -> SessionEvaluator[object, object]:
    """Passes if the number of calls lies within the bounds, both included."""
    if min_count < 0 or (max_count is not None and max_count < min_count):
        raise ConfigurationError(f"min_count must be at most max_count (got {min_count} and {max_count})")
    bounds = f"at least {min_count}" if max_count is None else f"{min_count} to {max_count}"

    @evaluator(form="session", inline=True, name=f"tool_call_count({name})")
    def counted(output: Any, expected: Any, session: SessionView) -> Score:
        count = _calls(session, name)
        passed = count >= min_count and (max_count is None or count <= max_count)
        return _verdict(passed, f"tool '{name}' was called {_times(count)}, expected {bounds}")

    return counted


def all_tools_succeeded() -> SessionEvaluator[object, object]:
    """Passes if no tool call failed: raised, was marked unsuccessful, or reported a failure in its result."""

    @evaluator(form="session", inline=True, name="all_tools_succeeded")
    def succeeded(output: Any, expected: Any, session: SessionView) -> Score:
        calls = session[ToolInvoked].all()
        failed = [call.name for call in calls if call.failed]
        return _verdict(not failed, f"failed tools: {', '.join(failed)}" if failed else "" if calls else _NO_TOOL)

    return succeeded


def token_usage_under(max_tokens: int) -> SessionEvaluator[object, object]:
    """Passes if the task's model calls used at most this many tokens, input and output together."""

    @evaluator(form="session", inline=True, name="token_usage_under")
    def within(output: Any, expected: Any, session: SessionView) -> Score:
        calls = session[PromptExecuted].all()
        used = [call.usage.total_tokens for call in calls if call.usage is not None]
        total = sum(used)
        if total <= max_tokens and len(used) < len(calls):
            raise NothingToScoreError("token_usage_under: a model call has no recorded token usage")
        limit = f"used {total} tokens, limit {max_tokens}"
        return _verdict(total <= max_tokens, limit if calls else f"no model call was recorded; {limit}")

    return within


def slice_contains[T](
    slice_type: type[T], predicate: Callable[[T], bool], *, min_count: int = 1
) -> SessionEvaluator[object, object]:
    """Passes if enough recorded events of a type satisfy a predicate."""

    @evaluator(form="session", inline=True, name=f"slice_contains({slice_type.__name__})")
    def found(output: Any, expected: Any, session: SessionView) -> Score:
        count = len(session[slice_type].where(predicate))
        return _verdict(count >= min_count, f"{count} matching {slice_type.__name__}, needed {min_count}")

    return found
