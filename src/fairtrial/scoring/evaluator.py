"""The four forms an evaluator may have, turned into one call.

| form         | parameters                   | recognised by                                                        |
|--------------|------------------------------|----------------------------------------------------------------------|
| "context"    | (sample, output, *, context) | a keyword-only parameter `context`                                   |
| "trajectory" | (trajectory, sample)         | a first parameter named `trajectory` or annotated `Trajectory`       |
| "session"    | (output, expected, session)  | a third required parameter, or one named or annotated as the session |
| "plain"      | (output, expected)           | everything else                                                      |
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, overload
from uuid import UUID

from fairtrial.codec import dumps
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.frozen import EMPTY
from fairtrial.scoring.score import Score, mean_value, merge
from fairtrial.session.session import Session
from fairtrial.session.trajectory import ChatMessage, Trajectory
from fairtrial.session.views import RecordedView, SessionView

type Form = Literal["plain", "session", "context", "trajectory"]
type Evaluator = Callable[..., Any]
"""Any callable of one of the four forms, sync or async; it returns a Score or something that becomes one."""

_MARKS = "__fairtrial_evaluator__"


class Offload(Protocol):
    """Runs a user's blocking function somewhere it cannot stop everything else."""

    def __call__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, *, isolate: bool, kind: Any
    ) -> Awaitable[Any]:
        """The function's result, from a thread or (isolated, read back as `kind`) a child process."""
        ...


@dataclass(frozen=True, slots=True)
class EvalContext:
    """What an evaluator of the context form is given beside the sample and the output."""

    adapter: Any
    session: SessionView
    run_id: str


class Case:
    """One scored situation: everything any form of evaluator may ask for."""

    __slots__ = ("adapter", "offload", "output", "recorder", "run_id", "sample", "session")

    def __init__(
        self,
        sample: Sample[Any, Any],
        output: Any,
        session: SessionView | None = None,
        *,
        adapter: Any = None,
        run_id: str = "",
        offload: Offload | None = None,
        recorder: Session | None = None,
    ) -> None:
        self.sample = sample
        self.output = output
        self.session = _NO_SESSION if session is None else session
        self.adapter = adapter
        self.run_id = run_id
        self.offload = offload
        self.recorder = recorder  # Where judges record what they did; no evaluator sees it.

    @property
    def trajectory(self) -> Trajectory:
        """The recorded messages; where none were recorded, the input and the output as a conversation."""
        if isinstance(self.output, Trajectory):
            return self.output
        recorded = self.session.trajectory
        if recorded.messages:
            return recorded
        spoken = [ChatMessage("user", _as_text(self.sample.input))]
        if self.output is not None:
            spoken.append(ChatMessage("assistant", _as_text(self.output)))
        return Trajectory(tuple(spoken))


_NO_SESSION = RecordedView(UUID(int=0), EMPTY, ())


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return dumps(value)
    except CodecError:
        return str(value)


@dataclass(frozen=True, slots=True)
class Marks:
    """What `@evaluator(...)` says about a function."""

    form: Form | None = None
    inline: bool = False
    isolate: bool = False
    name: str | None = None


@overload
def evaluator[F: Callable[..., Any]](fn: F, /) -> F: ...
@overload
def evaluator[F: Callable[..., Any]](
    *, form: Form | None = None, inline: bool = False, isolate: bool = False, name: str | None = None
) -> Callable[[F], F]: ...
def evaluator(
    fn: Any = None,
    /,
    *,
    form: Form | None = None,
    inline: bool = False,
    isolate: bool = False,
    name: str | None = None,
) -> Any:
    """Say about a function what its parameters cannot.

    Args:
        fn: The function; it stays as it is and can still be called by hand.
        form: One of the four forms, where the parameters suggest another.
        inline: It is quick and never blocks: call it on the event loop instead of in a thread.
        isolate: It may hold the interpreter lock for long (regular expressions, symbolic mathematics): call it in a
            child process, which a timeout can kill.
        name: Its name in reports.
    """
    if form is not None and form not in get_args(Form.__value__):
        raise ConfigurationError(f"an evaluator's form is one of {', '.join(get_args(Form.__value__))}, not {form!r}")
    if inline and isolate:
        raise ConfigurationError("an evaluator runs inline or isolated, not both")
    marks = Marks(form, inline, isolate, name)

    def mark(target: Any) -> Any:
        try:
            setattr(target, _MARKS, marks)
        except AttributeError:  # Bound methods and built-ins take no attributes; a partial of them does.
            target = functools.partial(target)
            setattr(target, _MARKS, marks)
        return target

    return mark if fn is None else mark(fn)


class Scorer:
    """An evaluator after its form has been decided: one name, one call."""

    __slots__ = ("is_async", "name", "needs_session", "quick")

    name: str
    needs_session: bool
    is_async: bool
    quick: bool  # Every part is built in or marked inline: no await, no thread.

    def score_now(self, case: Case) -> Score:
        """Score without an event loop; only where nothing in it is async."""
        raise NotImplementedError

    async def score(self, case: Case) -> Score:
        """Score a case."""
        raise NotImplementedError


class Leaf(Scorer):
    """One user or built-in function."""

    __slots__ = ("_arguments", "_fn", "_isolate")

    def __init__(self, fn: Callable[..., Any]) -> None:
        marks = marks_of(fn)
        form = marks.form or form_of(fn)
        self._fn = fn
        self._isolate = marks.isolate
        self._arguments = _ARGUMENTS[form]
        self.name = marks.name or name_of(fn)
        self.needs_session = form != "plain"
        self.is_async = is_async_callable(fn)
        self.quick = marks.inline and not self.is_async

    def score_now(self, case: Case) -> Score:
        """Score without an event loop."""
        args, kwargs = self._arguments(case)
        return as_score(self._fn(*args, **kwargs), self.name)

    async def score(self, case: Case) -> Score:
        """Score a case, away from the event loop unless the function is async or quick."""
        args, kwargs = self._arguments(case)
        if self.quick or self.is_async or case.offload is None:
            result = self._fn(*args, **kwargs)
        elif self._isolate:
            # The child makes the score: only a score can be trusted to travel back.
            result = await case.offload(self._scored, args, kwargs, isolate=True, kind=Score)
        else:
            result = await case.offload(self._fn, args, kwargs, isolate=False, kind=object)
        if inspect.isawaitable(result):
            result = await result
        return as_score(result, self.name)

    def _scored(self, *args: Any, **kwargs: Any) -> Score:
        return as_score(self._fn(*args, **kwargs), self.name)


type _Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NO_KEYWORDS: dict[str, Any] = {}


def _plain_arguments(case: Case) -> _Arguments:
    return (case.output, case.sample.expected), _NO_KEYWORDS


def _session_arguments(case: Case) -> _Arguments:
    return (case.output, case.sample.expected, case.session), _NO_KEYWORDS


def _context_arguments(case: Case) -> _Arguments:
    return (case.sample, case.output), {"context": EvalContext(case.adapter, case.session, case.run_id)}


def _trajectory_arguments(case: Case) -> _Arguments:
    return (case.trajectory, case.sample), _NO_KEYWORDS


_ARGUMENTS: dict[Form, Callable[[Case], _Arguments]] = {
    "plain": _plain_arguments,
    "session": _session_arguments,
    "context": _context_arguments,
    "trajectory": _trajectory_arguments,
}


def resolve(fn: Evaluator | Scorer) -> Scorer:
    """Decide once how a callable is to be called."""
    if isinstance(fn, Scorer):
        return fn
    if not callable(fn):
        raise ConfigurationError(f"an evaluator must be callable, and {fn!r} is not")
    return Leaf(fn)


def marks_of(fn: Callable[..., Any]) -> Marks:
    """What was said about a callable with `@evaluator`."""
    marks = getattr(fn, _MARKS, None) or getattr(getattr(fn, "func", None), _MARKS, None)
    return marks if isinstance(marks, Marks) else Marks()


def name_of(fn: Callable[..., Any]) -> str:
    """What a callable is called in a report."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return "lambda" if name == "<lambda>" else str(name)


def is_async_callable(fn: Callable[..., Any]) -> bool:
    """True for async functions, partials of them, and objects whose `__call__` is async."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def form_of(fn: Callable[..., Any]) -> Form:
    """The form a callable's parameters show."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return "plain"  # A built-in that does not show its parameters.
    if any(p.name == "context" and p.kind is p.KEYWORD_ONLY for p in parameters):
        return "context"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if positional and (positional[0].name == "trajectory" or _annotated(positional[0], "Trajectory")):
        form: Form = "trajectory"
    elif any(p.name == "session" or _annotated(p, "SessionView") for p in positional[2:]) or (
        len(positional) > 2 and positional[2].default is inspect.Parameter.empty
    ):
        form = "session"
    else:
        form = "plain"
    _check_arity(fn, form, parameters, positional, takes_more)
    return form


def _annotated(parameter: inspect.Parameter, name: str) -> bool:
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return text.rpartition(".")[2] == name


def _check_arity(
    fn: Callable[..., Any],
    form: Form,
    parameters: list[inspect.Parameter],
    positional: list[inspect.Parameter],
    takes_more: bool,
) -> None:
    given = 3 if form == "session" else 2
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is inspect.Parameter.empty]
    if (len(positional) < given and not takes_more) or len(required) > given or keywords:
        raise ConfigurationError(
            f"evaluator {name_of(fn)!r} takes {inspect.signature(fn)}; an evaluator takes (output, expected), "
            "(output, expected, session), (sample, output, *, context) or (trajectory, sample)"
        )


def as_score(result: Any, name: str) -> Score:
    """What an evaluator returned, as a score."""
    if type(result) is Score:
        return result
    if isinstance(result, bool):
        return Score(1.0 if result else 0.0, result)
    if isinstance(result, int | float):
        return Score(result)
    if isinstance(result, Mapping):
        parts = [(str(key), as_score(item, str(key))) for key, item in result.items()]
    elif isinstance(result, Sequence) and not isinstance(result, str | bytes):
        if not all(isinstance(item, Score) for item in result):
            raise TypeError(f"evaluator {name!r} returned a sequence that holds something other than Score objects")
        parts = [(item.name or name, item) for item in result]
    elif hasattr(result, "item"):  # A number from numpy.
        return as_score(result.item(), name)
    else:
        raise TypeError(
            f"evaluator {name!r} returned {type(result).__name__}; return a Score, a bool, a number from 0 to 1, "
            "a mapping of those, or a sequence of Scores"
        )
    if not parts:
        raise TypeError(f"evaluator {name!r} returned no score at all")
    return merge(parts, value=mean_value(parts), passed=all(part.passed for _, part in parts))
