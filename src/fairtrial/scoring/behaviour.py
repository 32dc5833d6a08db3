"""Evaluators of what an agent did: tools called, with which arguments, tokens used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAliasType

from typing_extensions import TypeVar

from fairtrial.base.codec import to_json
from fairtrial.data.session.events import PromptExecuted, ToolInvoked
from fairtrial.data.session.trajectory import ToolCall
from fairtrial.data.session.views import SessionView
from fairtrial.errors import ConfigurationError, NothingToScoreError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import SHARE, Metric, Score
from fairtrial.scoring.structure import same_json

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


type Order = Literal["exact", "in_order", "any_order"]
type Arguments = Literal["exact", "subset", "ignore"]
type _Fits = Callable[[ToolCall, ToolCall], bool]


def _in_order_asked(session: SessionView) -> Sequence[ToolInvoked]:
    """Return the tool calls in the order of the model's requests; concurrent calls are recorded as they end."""
    made = session[ToolInvoked].all()
    asked = [call.id for message in session.trajectory.messages for call in message.tool_calls]
    places = {call_id: place for place, call_id in enumerate(asked)}
    if len(places) < len(asked) or any(call.call_id not in places for call in made):
        return made  # Without unique ids, the calls are in the order of the record.
    return sorted(made, key=lambda call: places[call.call_id])


def tool_calls_match(
    calls: Sequence[ToolCall | Mapping[str, Any] | str] | None = None,
    *,
    order: Order = "in_order",
    arguments: Arguments = "exact",
    allow_extra: bool = True,
) -> SessionEvaluator[object, object]:
    """Compare the tool calls of a trial with those expected; the value is the F1 of the two lists.

    Args:
        calls: The expected calls; by default the sample's `expected`. A call is a ToolCall, a mapping with `name` and
            `arguments`, or only a name, which matches any arguments.
        order: "exact": the same calls in the same places; "in_order": the expected calls occur in this order;
            "any_order": each expected call has a call of its own.
        arguments: "exact": equal; "subset": the expected arguments are among the actual; "ignore".
        allow_extra: Whether calls beyond the expected ones may pass. With order "exact" they never do.

    If no calls are expected, a trial without calls passes with precision, recall and F1 of 1, and a trial with calls
    fails with precision and F1 of 0.
    """
    if order not in ("exact", "in_order", "any_order") or arguments not in ("exact", "subset", "ignore"):
        raise ConfigurationError(
            "order of tool_calls_match must be exact, in_order or any_order, and arguments exact, subset or ignore "
            f"(got order={order!r} and arguments={arguments!r})"
        )
    fixed = None if calls is None else _as_calls(calls)
    fits = _FITS[arguments]

    @evaluator(form="session", inline=True, name="tool_calls_match", needs_expected=fixed is None)
    def match(output: Any, expected: Any, session: SessionView) -> Score:
        wanted = _as_calls(expected) if fixed is None else fixed
        made = [ToolCall(call.name, to_json(call.params)) for call in _in_order_asked(session)]
        if not wanted and not made:
            return _score(1.0, 1.0, 1.0, passed=True, reason="no calls expected and none made")
        if order == "exact":
            right = sum(fits(w, m) for w, m in zip(wanted, made, strict=False))
        else:
            right = (_matched_in_order if order == "in_order" else _matched_in_any_order)(wanted, made, fits)
        precision = right / len(made) if made else 0.0
        recall = right / len(wanted) if wanted else 0.0
        f1 = 2 * right / (len(wanted) + len(made))
        extra_accepted = allow_extra and order != "exact" and wanted
        passed = right == len(wanted) and bool(extra_accepted or len(made) == len(wanted))
        reason = f"{right} of {len(wanted)} expected calls matched, {len(made)} made"
        return _score(precision, recall, f1, passed=passed, reason=reason)

    return match


def tool_correctness(
    calls: Sequence[ToolCall | Mapping[str, Any] | str] | None = None,
    *,
    order: Order = "any_order",
    arguments: Arguments = "subset",
    allow_extra: bool = True,
) -> SessionEvaluator[object, object]:
    """Passes if every expected tool was called, in any order, with at least the arguments that are expected.

    It is `tool_calls_match` with other defaults; a tool that is expected by its name alone may have any arguments.
    If neither a message, a model call nor a tool call was recorded, there is no score: nobody knows which tools were
    called. Whether a call was needed, succeeded or was used is not checked.

    Args:
        calls: The expected tools by name, or calls with arguments; by default the sample's `expected`.
        order: As in `tool_calls_match`.
        arguments: As in `tool_calls_match`.
        allow_extra: As in `tool_calls_match`.
    """
    compare = tool_calls_match(calls, order=order, arguments=arguments, allow_extra=allow_extra)

    @evaluator(form="session", inline=True, name="tool_correctness", needs_expected=calls is None)
    def correct(output: Any, expected: Any, session: SessionView) -> Score:
        if calls is None and expected is None:
            raise NothingToScoreError("tool_correctness: the expected tools are None\nif none is expected, write []")
        if not any((session[ToolInvoked].all(), session[PromptExecuted].all(), session.trajectory.messages)):
            raise NothingToScoreError(
                "tool_correctness: nothing was recorded, so the tools that were called are unknown"
            )
        return compare(output, expected, session)

    return correct


def _score(precision: float, recall: float, f1: float, *, passed: bool, reason: str) -> Score:
    shares = {"precision": precision, "recall": recall, "f1": f1}
    metrics = [Metric(name, share, higher_is_better=True, bounds=SHARE) for name, share in shares.items()]
    return Score(f1, passed, reason, metrics)


class _AnyArguments(dict[str, Any]):
    """The arguments of a call that was expected by name alone."""


def _as_calls(calls: Any) -> list[ToolCall]:
    if isinstance(calls, str | Mapping | ToolCall):
        return [_as_call(calls)]
    return [_as_call(call) for call in calls or ()]


def _as_call(call: Any) -> ToolCall:
    if isinstance(call, str):
        return ToolCall(call, _AnyArguments())
    if isinstance(call, ToolCall):
        return ToolCall(call.name, to_json(call.arguments))
    if isinstance(call, Mapping) and isinstance(call.get("name"), str):
        given = call.get("arguments", call.get("params"))
        return ToolCall(call["name"], _AnyArguments() if given is None else to_json(given))
    raise TypeError(f"an expected tool call must be a ToolCall, a mapping with 'name', or a name (got {call!r})")


def _same_name(wanted: ToolCall, made: ToolCall) -> bool:
    return wanted.name == made.name


def _equal(wanted: ToolCall, made: ToolCall) -> bool:
    return wanted.name == made.name and (
        isinstance(wanted.arguments, _AnyArguments) or same_json(wanted.arguments, made.arguments)
    )


def _subset(wanted: ToolCall, made: ToolCall) -> bool:
    return wanted.name == made.name and all(
        name in made.arguments and same_json(made.arguments[name], value) for name, value in wanted.arguments.items()
    )


_FITS: dict[Arguments, _Fits] = {"exact": _equal, "subset": _subset, "ignore": _same_name}


def _matched_in_order(wanted: Sequence[ToolCall], made: Sequence[ToolCall], fits: _Fits) -> int:
    """The length of the longest common subsequence."""
    best = [0] * (len(made) + 1)
    for want in wanted:
        diagonal = 0
        for position, call in enumerate(made, 1):
            above = best[position]
            best[position] = diagonal + 1 if fits(want, call) else max(above, best[position - 1])
            diagonal = above
    return best[-1]


def _matched_in_any_order(wanted: Sequence[ToolCall], made: Sequence[ToolCall], fits: _Fits) -> int:
    """The size of a largest matching (augmenting paths): a greedy one can miss calls that fit several."""
    taken: dict[int, int] = {}  # Actual call -> the expected call that it is matched with.
    has: dict[int, int] = {}  # The reverse.
    useless: set[int] = set()  # Calls that a failed search reached can be part of no later gain.
    for want in range(len(wanted)):
        reached_from: dict[int, int] = {}
        seekers = [want]
        free: int | None = None
        for seeker in seekers:  # Breadth first, and the list grows: an agent may make thousands of calls.
            for position, call in enumerate(made):
                if position in useless or position in reached_from or not fits(wanted[seeker], call):
                    continue
                reached_from[position] = seeker
                if position not in taken:
                    free = position
                    break
                seekers.append(taken[position])
            if free is not None:
                break
        if free is None:
            useless.update(reached_from)
        while free is not None:  # Each on the way takes what it reached and passes on what it had.
            seeker = reached_from[free]
            before = has.get(seeker)
            taken[free], has[seeker] = seeker, free
            free = before
    return len(taken)
