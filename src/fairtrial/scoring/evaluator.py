"""Resolve evaluators with any supported parameters to one interface.

Parameters are bound by name if all names are known (`KNOWN_NAMES`), in any order:

| given                       | names                                                          |
|-----------------------------|----------------------------------------------------------------|
| the output                  | output, outputs, prediction, actual, response                  |
| the sample's expected value | expected, reference, target, ground_truth, reference_outputs   |
| the sample's input          | input, inputs                                                  |
| the rest                    | sample, session, context, trajectory, environment              |

If no name is known, or all parameters are positional-only, they are bound by position: (output, expected),
(output, expected, session), (sample, output, *, context) or, where the first is annotated so, (trajectory, sample). A
warning says how, unless they are positional-only. If some names are known, they must stand where the position says;
otherwise the evaluator is refused; a third parameter with an unknown name receives the session, with a warning. A
parameter annotated as `SessionView`, `Trajectory`, `Sample` or `EvalContext` counts as known. Parameters with a default
keep it unless their name is known, and what a partial has set stays set.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAliasType, Unpack, get_args, overload
from uuid import UUID

from typing_extensions import TypeVarTuple

from fairtrial.base.codec import dumps
from fairtrial.base.frozen import EMPTY
from fairtrial.base.isolation import check_sendable
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import Session
from fairtrial.data.session.trajectory import ChatMessage, Trajectory, chat_messages
from fairtrial.data.session.views import RecordedView, SessionView
from fairtrial.errors import CodecError, ConfigurationError, NothingToScoreError
from fairtrial.scoring.parameters import (
    innermost,
    is_annotated,
    is_async_callable,
    name_of,
    parameters_of,
    partial_keywords,
)
from fairtrial.scoring.score import Score, as_score

type Form = Literal["plain", "session", "context", "trajectory"]
type Role = Literal["output", "expected", "input", "sample", "session", "context", "trajectory", "environment"]
"""The value that a parameter of an evaluator receives."""
# With defaults, for a plain `Evaluator` without types; the syntax of PEP 695 has them only from Python 3.13.
_Types = TypeVarTuple("_Types", default=Unpack[tuple[Any, ...]])
Evaluator = TypeAliasType("Evaluator", Callable[..., Any], type_params=(_Types,))
"""Any callable of one of the four forms, sync or async; it returns a Score or something that becomes one.

`Evaluator[str, int]` names the types of output and expected value, `Evaluator[Question, str, int]` that of the input
too. Only readers use them: which form a callable has is decided from its parameters.
"""

_ROLE_NAMES: dict[Role, tuple[str, ...]] = {
    "output": ("output", "outputs", "prediction", "actual", "response"),
    "expected": ("expected", "reference", "target", "ground_truth", "reference_outputs"),
    "input": ("input", "inputs"),
    "sample": ("sample",),
    "session": ("session",),
    "context": ("context",),
    "trajectory": ("trajectory",),
    "environment": ("environment",),
}
KNOWN_NAMES: Mapping[str, Role] = {name: role for role, names in _ROLE_NAMES.items() for name in names}
"""The parameter names that determine which value a parameter receives."""

_log = logging.getLogger("fairtrial.scoring")
_warned: set[tuple[str, str]] = set()  # The bindings that have been logged.
_MAX_WARNED = 1_000
_MARKS = "__fairtrial_evaluator__"
_ISOLATE_IF = "__fairtrial_isolate_if__"


class OffloadedCall(NamedTuple):
    """A call of a blocking function of the user, to be made outside the event loop.

    With a `wrapper` it is made in a child process, as `wrapper(fn, name, *args, **kwargs)`, and read back as `kind`;
    otherwise in a thread.
    """

    fn: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wrapper: Callable[..., Any] | None = None
    kind: Any = object


type Offload = Callable[[OffloadedCall], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class EvalContext:
    """The context of an evaluator of the context form."""

    adapter: Any
    session: SessionView
    run_id: str
    environment: Any = None


class Case:
    """All that an evaluator of any form can receive for one trial."""

    __slots__ = ("adapter", "environment", "guarded", "offload", "output", "recorder", "run_id", "sample", "session")

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
        guarded: bool = False,
        environment: Any = None,
    ) -> None:
        self.sample = sample
        self.guarded = guarded  # Whether evaluators can be called in child processes.
        self.output = output
        if session is None:
            session = _NO_SESSION
        elif isinstance(session, Session):
            session = session.view()  # A read-only view of the session in its current state.
        self.session: SessionView = session
        self.adapter: Any = adapter
        self.run_id: str = run_id
        self.offload = offload
        self.environment: Any = (
            environment  # Still open, if the task acted in one; None when stored outputs are scored.
        )
        self.recorder = recorder  # The session in which judges record their calls; evaluators do not see it.

    @property
    def trajectory(self) -> Trajectory:
        """The recorded messages or, if there are none, the input and the output as a conversation."""
        if isinstance(self.output, Trajectory):
            return self.output
        recorded = self.session.trajectory
        if recorded.messages:
            return recorded
        given = self.sample.input
        spoken = list(chat_messages(given) or (ChatMessage("user", as_text(given)),))
        if self.output is not None:
            spoken.append(ChatMessage("assistant", as_text(self.output)))
        return Trajectory(tuple(spoken))


_NO_SESSION = RecordedView(UUID(int=0), EMPTY, ())


def as_text(value: Any) -> str:
    """Return text as it is, and other values as JSON or, where they have none, as Python prints them."""
    if isinstance(value, str):
        return value
    try:
        return dumps(value)
    except CodecError:
        return str(value)


@dataclass(frozen=True, slots=True)
class Marks:
    """The options of `@evaluator(...)`."""

    form: Form | None = None
    inline: bool = False
    isolate: bool = False
    name: str | None = None
    needs_expected: bool = False


@overload
def evaluator[F: Callable[..., Any]](fn: F, /) -> F: ...
@overload
def evaluator[F: Callable[..., Any]](
    *,
    form: Form | None = None,
    inline: bool = False,
    isolate: bool = False,
    name: str | None = None,
    needs_expected: bool = False,
) -> Callable[[F], F]: ...
def evaluator(
    fn: Any = None,
    /,
    *,
    form: Form | None = None,
    inline: bool = False,
    isolate: bool = False,
    name: str | None = None,
    needs_expected: bool = False,
) -> Any:
    """Set options of an evaluator that its parameters cannot express.

    Args:
        fn: The function; it is not changed and can still be called directly.
        form: One of the four forms, if the parameters suggest another.
        inline: Call it on the event loop instead of in a thread; only for functions that are quick and never block.
        isolate: Call it in a child process, which a timeout can kill; for functions that may keep the interpreter lock
            for long (regular expressions, symbolic mathematics).
        name: Its name in reports.
        needs_expected: A sample without an expected value is a scorer error, and the function is not called. Without
            this option it receives None, as for a sample with `expected=None`.
    """
    if form is not None and form not in get_args(Form.__value__):
        raise ConfigurationError(
            f"the form of an evaluator must be one of {', '.join(get_args(Form.__value__))} (got {form!r})"
        )
    if inline and isolate:
        raise ConfigurationError("inline and isolate of an evaluator are mutually exclusive")
    marks = Marks(form, inline, isolate, name, needs_expected)

    def mark(target: Any) -> Any:
        try:
            setattr(target, _MARKS, marks)
        except AttributeError:  # Bound methods and built-ins cannot have attributes; a partial of them can.
            target = functools.partial(target)
            setattr(target, _MARKS, marks)
        return target

    return mark if fn is None else mark(fn)


type Condition = Callable[[Any, Any], bool]


def isolate_if[F: Callable[..., Any]](fn: F, condition: Condition | None) -> F:
    """Call an inline evaluator in a child process for those outputs and expected values that require it."""
    setattr(fn, _ISOLATE_IF, condition)
    return fn


def isolation_of(fn: Callable[..., Any]) -> Condition | None:
    """Return the condition under which an inline evaluator is called in a child process."""
    condition: Condition | None = getattr(innermost(fn), _ISOLATE_IF, None)
    return condition


class NeedsIsolationError(Exception):
    """An inline evaluator must be called in a child process for this case."""


class Scorer:
    """A resolved evaluator: one name, one interface."""

    __slots__ = ("__weakref__", "is_async", "name", "needs_session", "quick")

    @property
    def needs_adapter(self) -> bool:
        """Whether it needs the suite's adapter because it has none of its own."""
        return False

    @property
    def needs_expected(self) -> bool:
        """Whether a sample without an expected value cannot be scored."""
        return False

    @property
    def is_guard(self) -> bool:
        """Whether it only decides if a trial can be scored at all, by raising an error: it is no part of the score."""
        return False

    name: str
    needs_session: bool
    is_async: bool
    quick: bool  # Every part is built in or marked inline: no await, no thread.

    @property
    def function(self) -> Callable[..., Any] | None:
        """The one function that it calls, whose annotations say what it takes; None for a combination."""
        return None

    def score_now(self, case: Case) -> Score:
        """Score without an event loop; only if nothing in it is async."""
        raise NotImplementedError

    async def score(self, case: Case) -> Score:
        """Score a case."""
        raise NotImplementedError


class Leaf(Scorer):
    """A scorer that calls one function."""

    __slots__ = ("_arguments", "_fn", "_isolate", "_isolate_if", "_needs_expected")

    def __init__(self, fn: Callable[..., Any]) -> None:
        marks = marks_of(fn)
        binding = _bind(fn) if marks.form is None else _bind_form(fn, marks.form)
        self._fn = fn
        self._isolate = marks.isolate
        self._needs_expected = marks.needs_expected
        self._isolate_if = isolation_of(fn)
        self._arguments = binding.arguments()
        self.name = marks.name or name_of(fn)
        self.needs_session = binding.form != "plain"
        self.is_async = is_async_callable(fn)
        self.quick = marks.inline and not self.is_async
        if self._isolate:
            check_sendable(fn, f"evaluator {self.name!r}")

    @property
    def function(self) -> Callable[..., Any]:
        """The function."""
        return self._fn

    @property
    def needs_expected(self) -> bool:
        """Whether a sample without an expected value cannot be scored."""
        return self._needs_expected

    def _check(self, case: Case) -> None:
        if self._needs_expected and not case.sample.has_expected:
            raise NothingToScoreError(
                f"the sample has no expected value, with which evaluator {self.name!r} compares: "
                "give it one; if None is the right answer, write expected=None"
            )

    def score_now(self, case: Case) -> Score:
        """Score without an event loop."""
        self._check(case)
        args, kwargs = self._arguments(case)
        if case.guarded and self._isolate_if is not None and self._isolate_if(args[0], args[1]):
            raise NeedsIsolationError
        result = self._fn(*args, **kwargs)
        if type(result) is Score:
            return result
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError(
                f"evaluator {self.name!r} returned an awaitable; make it `async def`, so that it is awaited"
            )
        return as_score(result, self.name)

    async def score(self, case: Case) -> Score:
        """Score a case, in a thread unless the function is async or inline."""
        self._check(case)
        args, kwargs = self._arguments(case)
        isolate = self._isolate or (
            self._isolate_if is not None and case.guarded and self._isolate_if(args[0], args[1])
        )
        if case.offload is None or self.is_async or (self.quick and not isolate):
            result = self._fn(*args, **kwargs)
        elif isolate:
            # The child creates the score, because other results may not be encodable as JSON.
            call = OffloadedCall(self._fn, self.name, args, kwargs, score_in_child, Score)
            result = await case.offload(call)
        else:
            result = await case.offload(OffloadedCall(self._fn, self.name, args, kwargs))
        if inspect.isawaitable(result):
            result = await result
        return as_score(result, self.name)


def call_directly[T](call: Callable[[], Coroutine[Any, Any, T]]) -> T | Coroutine[Any, Any, T]:
    """Call async code of an evaluator: return an awaitable inside an event loop, otherwise block for the result."""
    from fairtrial.base.offload import in_event_loop  # Not at the top: `import fairtrial` loads no event loop.
    from fairtrial.base.sync_bridge import call_sync

    return call() if in_event_loop() else call_sync(call)


def score_in_child(fn: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Score:
    """Call an evaluator in a child process."""
    return as_score(fn(*args, **kwargs), name)


type _Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NO_KEYWORDS: dict[str, Any] = {}


_VALUES: dict[Role, Callable[[Case], Any]] = {
    "output": lambda case: case.output,
    "expected": lambda case: case.sample.expected,
    "input": lambda case: case.sample.input,
    "sample": lambda case: case.sample,
    "session": lambda case: case.session,
    "context": lambda case: EvalContext(case.adapter, case.session, case.run_id, case.environment),
    "trajectory": lambda case: case.trajectory,
    "environment": lambda case: case.environment,
}
_POSITIONS: dict[Form, tuple[Role, ...]] = {
    "plain": ("output", "expected"),
    "session": ("output", "expected", "session"),
    "context": ("sample", "output"),
    "trajectory": ("trajectory", "sample"),
}


@dataclass(frozen=True, slots=True)
class _Binding:
    """The arguments of an evaluator."""

    positional: tuple[Role, ...]
    keywords: Mapping[str, Role] = EMPTY

    @property
    def form(self) -> Form:
        """The form of the call; "plain" if it needs nothing but the sample and the output."""
        roles = {*self.positional, *self.keywords.values()}
        forms: tuple[Form, ...] = ("context", "trajectory", "session")
        return next((form for form in forms if form in roles), "plain")

    def arguments(self) -> Callable[[Case], _Arguments]:
        """Return the function that builds the arguments of a call."""
        if self.positional == _POSITIONS["plain"] and not self.keywords:
            return lambda case: ((case.output, case.sample.expected), _NO_KEYWORDS)
        values = [_VALUES[role] for role in self.positional]
        named = [(name, _VALUES[role]) for name, role in self.keywords.items()]
        return lambda case: (
            tuple([value(case) for value in values]),
            {name: value(case) for name, value in named} if named else _NO_KEYWORDS,
        )


def resolve(fn: Evaluator | Scorer) -> Scorer:
    """Determine how an evaluator is called."""
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
    """Return the options set by `@evaluator` on a callable, or on the one inside a partial."""
    while True:
        marks = getattr(fn, _MARKS, None)
        if isinstance(marks, Marks):
            return marks
        if not isinstance(fn, functools.partial):
            return Marks()
        fn = fn.func


def _bind(fn: Callable[..., Any]) -> _Binding:
    """Determine the argument of each parameter, or reject the evaluator."""
    parameters = parameters_of(fn)
    fixed = partial_keywords(fn)
    by_name = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if any(_role(p) is None for p in by_name if p.default is p.empty):
        raise _refusal(fn, "a keyword-only parameter must have a known name or a default")
    decisive = required or positional
    takes_more = len(required) < 2 and any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if decisive and not takes_more and all(_role(p) is not None for p in decisive):
        front = tuple(role for p in required if (role := _role(p)) is not None)
    else:
        front = _by_position(fn, positional, len(required), by_name, takes_more=takes_more)
        _warn_of_guess(fn, positional, front)
    taken = set(front)
    if len(taken) < len(front):
        raise _refusal(fn, "two parameters have the same meaning")
    keywords: dict[str, Role] = {}
    for parameter in (*positional[len(front) :], *by_name):
        role = _role(parameter)
        if role is None or parameter.kind is parameter.POSITIONAL_ONLY:
            continue
        if role not in taken:
            taken.add(role)
            keywords[parameter.name] = role
        elif parameter.default is parameter.empty:
            raise _refusal(fn, "two parameters have the same meaning")
    return _Binding(front, keywords)


def _by_position(
    fn: Callable[..., Any],
    positional: list[inspect.Parameter],
    required: int,
    by_name: list[inspect.Parameter],
    *,
    takes_more: bool,
) -> tuple[Role, ...]:
    """Return the roles of the first parameters by position; known names must be in the right positions."""
    form: Form = "plain"
    if any(p.name == "context" for p in by_name):
        form = "context"
    elif positional and _role(positional[0]) == "trajectory":
        form = "trajectory"
    elif required == 3:
        form = "session"
    roles = _POSITIONS[form]
    if required > len(roles) or (len(positional) < len(roles) and not takes_more):
        raise _refusal(fn, f"it must accept {len(roles)} arguments")
    for parameter, role in zip(positional, roles, strict=False):
        named = _role(parameter)
        if named is not None and named != role:
            raise _refusal(
                fn,
                f"parameter {parameter.name!r} must be in the position of the {named} (got that of the {role}), "
                "because not all names are known",
            )
    return roles


_ROLE_TEXTS: dict[Role, str] = {"output": "the output", "expected": "the expected value", "session": "the session"}


def _warn_of_guess(fn: Callable[..., Any], positional: list[inspect.Parameter], roles: tuple[Role, ...]) -> None:
    """Warn that parameters with unknown names are bound by position, because their order may be wrong."""
    pairs = list(zip(positional, roles, strict=False))
    guessed = [(p, role) for p, role in pairs if p.kind is not p.POSITIONAL_ONLY and _role(p) is None]
    if len(pairs) < 2 or roles[0] != "output":
        return
    if len(guessed) < len(pairs):
        # One unknown name beside known ones is clear enough, but few people expect a session.
        guessed = [(p, role) for p, role in guessed if role == "session"]
        why, remedy = "its name is not known", f"Give it a known name ({_LISTED_NAMES})"
    else:
        why, remedy = "no parameter has a known name", f"Name them ({', '.join(roles)}) in your order"
    if not guessed:
        return
    bound = " and ".join(f"{p.name!r} receives {_ROLE_TEXTS.get(role, f'the {role}')}" for p, role in guessed)
    form = "session" if "session" in roles else "plain"
    warn_of_binding(
        fn,
        f"evaluator {name_of(fn)!r}: {bound}, by position, because {why}. {remedy}, or confirm this one with "
        f'@evaluator(form="{form}")',
    )


_LISTED_NAMES = "output, expected, input, sample, session, trajectory, environment, context"


def warn_of_binding(fn: Callable[..., Any], text: str) -> None:
    """Log how parameters without known names are bound, once for each function and process."""
    key = (getattr(fn, "__module__", ""), text)
    if key not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add(key)
        _log.warning(text)


def _bind_form(fn: Callable[..., Any], form: Form) -> _Binding:
    """Bind the parameters by the declared form, whatever their names are."""
    if form == "context":
        return _Binding(_POSITIONS[form], {"context": "context"})
    if form == "session":
        # A session parameter that is not the third is given by name.
        parameters = parameters_of(fn)
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        later = [*positional[3:], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]
        keyword = next((p.name for p in later if _role(p) == "session"), None)
        if keyword is not None:
            return _Binding(_POSITIONS["plain"], {keyword: "session"})
    return _Binding(_POSITIONS[form])


def _role(parameter: inspect.Parameter) -> Role | None:
    """Return the role of a parameter, from its name or else its annotation."""
    if parameter.kind is not parameter.POSITIONAL_ONLY and parameter.name in KNOWN_NAMES:
        return KNOWN_NAMES[parameter.name]
    return next((role for role, kinds in _ANNOTATIONS.items() if is_annotated(parameter, kinds)), None)


_ANNOTATIONS: dict[Role, tuple[type, ...]] = {
    "session": (SessionView, Session, RecordedView),
    "trajectory": (Trajectory,),
    "sample": (Sample,),
    "context": (EvalContext,),
}


def _refusal(fn: Callable[..., Any], problem: str) -> ConfigurationError:
    try:
        signature = str(inspect.signature(fn))
    except (TypeError, ValueError):
        signature = "(...)"
    return ConfigurationError(
        f"evaluator {name_of(fn)!r} takes {signature}: {problem}\n"
        f'name all its parameters from {", ".join(KNOWN_NAMES)}; or mark its form: @evaluator(form="plain") for '
        '(output, expected), "session" for (output, expected, session), "context" for (sample, output, *, context), '
        '"trajectory" for (trajectory, sample)'
    )
