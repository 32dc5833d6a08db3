"""The four forms an evaluator may have, turned into one call.

| form         | parameters                   | recognised by                                                        |
|--------------|------------------------------|----------------------------------------------------------------------|
| "context"    | (sample, output, *, context) | a keyword-only parameter `context`                                   |
| "trajectory" | (trajectory, sample)         | a first parameter named `trajectory` or annotated `Trajectory`       |
| "session"    | (output, expected, session)  | a third required parameter, or one named or annotated as the session |
| "plain"      | (output, expected)           | everything else                                                      |

A default such as `threshold=0.5` never receives a session, and a session parameter behind it is given by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, overload
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
        if session is None:
            session = _NO_SESSION
        elif isinstance(session, Session):
            session = session.view()  # As it stands now, and nothing an evaluator can write to.
        self.session: SessionView = session
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
        keyword = _session_keyword(_parameters(fn)) if form == "session" else None
        self._fn = fn
        self._isolate = marks.isolate
        self._arguments = _ARGUMENTS[form] if keyword is None else _session_by_name(keyword)
        self.name = marks.name or name_of(fn)
        self.needs_session = form != "plain"
        self.is_async = is_async_callable(fn)
        self.quick = marks.inline and not self.is_async

    def score_now(self, case: Case) -> Score:
        """Score without an event loop."""
        args, kwargs = self._arguments(case)
        result = self._fn(*args, **kwargs)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError(
                f"evaluator {self.name!r} returned an awaitable; make it `async def`, so that it is awaited"
            )
        return as_score(result, self.name)

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


def _session_by_name(keyword: str) -> Callable[[Case], _Arguments]:
    return lambda case: ((case.output, case.sample.expected), {keyword: case.session})


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
    several: object = fn
    if isinstance(several, list | tuple | set):
        names = ", ".join(getattr(one, "__name__", repr(one)) for one in several)
        raise ConfigurationError(
            f"an evaluator must be one callable (got a {type(several).__name__} of {len(several)})\n"
            f"combine several: all_of({names}) passes if all of them pass; any_of and weighted are the other ways"
        )
    if not callable(fn):
        raise ConfigurationError(f"an evaluator must be callable, and {fn!r} is not: pass the function itself")
    return Leaf(fn)


def marks_of(fn: Callable[..., Any]) -> Marks:
    """What was said about a callable, or about the one inside a partial, with `@evaluator`."""
    while True:
        marks = getattr(fn, _MARKS, None)
        if isinstance(marks, Marks):
            return marks
        if not isinstance(fn, functools.partial):
            return Marks()
        fn = fn.func


def _innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def name_of(fn: Callable[..., Any]) -> str:
    """What a callable is called in a report."""
    inner = _innermost(fn)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return "lambda" if name == "<lambda>" else str(name)


def is_async_callable(fn: Callable[..., Any]) -> bool:
    """True for async functions, partials of them, and objects whose `__call__` is async."""
    inner = _innermost(fn)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        try:
            signature = inspect.signature(fn, eval_str=True)
        except Exception:  # Annotations as text may name what exists only for type checkers; their words still help.
            signature = inspect.signature(fn)
    except (TypeError, ValueError):  # A built-in that does not show its parameters.
        return [inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)]
    return list(signature.parameters.values())


def form_of(fn: Callable[..., Any]) -> Form:
    """The form a callable's parameters show."""
    parameters = _parameters(fn)
    positional = _positional(parameters)
    form: Form = "plain"
    if any(p.name == "context" and p.kind is p.KEYWORD_ONLY for p in parameters):
        form = "context"
    elif positional and (positional[0].name == "trajectory" or _annotated(positional[0], _TRAJECTORIES)):
        form = "trajectory"
    elif _session_keyword(parameters) is not None or any(map(_takes_session, positional[2:3])):
        form = "session"
    _check_fit(fn, form, parameters)
    return form


def _positional(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _takes_session(parameter: inspect.Parameter) -> bool:
    """True for the third parameter of a session-aware evaluator."""
    return _is_session(parameter) or parameter.default is inspect.Parameter.empty


def _is_session(parameter: inspect.Parameter) -> bool:
    return parameter.name == "session" or _annotated(parameter, _SESSIONS)


def _session_keyword(parameters: list[inspect.Parameter]) -> str | None:
    """The name of the session parameter, where it is not the third."""
    later = [*_positional(parameters)[3:], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]
    return next((p.name for p in later if _is_session(p)), None)


_SESSIONS = (SessionView, Session, RecordedView)
_TRAJECTORIES = (Trajectory,)


def _annotated(parameter: inspect.Parameter, kinds: tuple[type, ...]) -> bool:
    """True if a parameter is annotated as one of these, perhaps or None; as a type, or in words."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        text = annotation.strip("\"'").removeprefix("Optional[").removesuffix("]")
        return any(part.strip().rpartition(".")[2] == kind.__name__ for part in text.split("|") for kind in kinds)
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return any(member is kind for member in members for kind in kinds)


def _check_fit(fn: Callable[..., Any], form: Form, parameters: list[inspect.Parameter]) -> None:
    """Raise unless the call that the form makes can reach the function."""
    by_name = {"context"} if form == "context" else {_session_keyword(parameters)} if form == "session" else set()
    given = 3 if form == "session" and by_name == {None} else 2
    positional = [p for p in _positional(parameters) if p.name not in by_name]
    required = [p for p in positional if p.default is p.empty]
    needed = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in by_name]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    misplaced = form == "plain" and any(_is_session(p) for p in positional)
    if misplaced or (len(positional) < given and not takes_more) or len(required) > given or needed:
        raise ConfigurationError(
            f"evaluator {name_of(fn)!r} takes {inspect.signature(fn)}; an evaluator takes (output, expected), "
            "(output, expected, session), (sample, output, *, context) or (trajectory, sample)"
        )


def as_score(result: Any, name: str) -> Score:
    """What an evaluator returned, as a score."""
    if isinstance(result, Score):
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
