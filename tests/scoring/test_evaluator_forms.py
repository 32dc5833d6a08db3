"""R12 to R16 and R23: the four forms of evaluators."""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ChatMessage, ConfigurationError, Metric, Sample, Session, SessionView, ToolInvoked, Trajectory
from fairtrial.models.judges import panel
from fairtrial.scoring import Case, EvalContext, Score, all_of, evaluator, exact_match, resolve, tool_called, weighted
from fairtrial.scoring.evaluator import KNOWN_NAMES, OffloadedCall, Scorer, _bind, marks_of
from fairtrial.testing import session_of

SAMPLE = Sample("s1", "2+2?", "4", {"level": 1})
SESSION = session_of(ToolInvoked("calc"), ChatMessage("user", "hi"), ChatMessage("assistant", "hello"))


def case(output: Any = "4", **options: Any) -> Case:
    return Case(SAMPLE, output, SESSION, adapter="adapter", run_id="run", **options)


def score_of(fn: Any, at: Case | None = None) -> Score:
    """The score by the waiting call; where the callable is not async, the direct call must agree."""
    scorer, at = resolve(fn), at or case()

    async def wait() -> Score:
        return await scorer.score(at)

    waited = anyio.run(wait)
    if not scorer.is_async:
        assert scorer.score_now(at) == waited
    return waited


def plain(output: str, expected: str) -> Score:
    return Score(1.0, output == expected, "plain")


async def plain_later(output: str, expected: str) -> Score:
    await anyio.lowlevel.checkpoint()
    return plain(output, expected)


def with_session(output: str, expected: str, session: SessionView) -> Score:
    return Score(1.0, bool(session[ToolInvoked].all()) and output == expected, "session")


async def with_session_later(output: str, expected: str, session: SessionView) -> Score:
    return with_session(output, expected, session)


def with_context(sample: Sample[str, str], output: str, *, context: EvalContext) -> tuple[Score, ...]:
    assert (context.adapter, context.run_id) == ("adapter", "run")
    assert context.session[ToolInvoked].all()
    return (Score(1.0, output == sample.expected, "first", name="a"), Score(0.5, True, "second", name="b"))


async def with_context_later(sample: Sample[str, str], output: str, *, context: EvalContext) -> tuple[Score, ...]:
    return with_context(sample, output, context=context)


def rl_scorer(trajectory: Trajectory, sample: Sample[str, str]) -> Score:
    return Score(metrics=[Metric("said", float(trajectory.last_reply == "hello"), 1.0), Metric("level", 3.0)])


async def rl_scorer_later(talk: Trajectory, sample: Sample[str, str]) -> Score:
    return rl_scorer(talk, sample)


class Judge:
    """Every way an object can be an evaluator."""

    def __call__(self, output: Any, expected: Any) -> Score:
        return Score(1.0, output == expected)

    def method(self, output: Any, expected: Any, session: SessionView) -> Score:
        return with_session(output, expected, session)

    async def later(self, output: Any, expected: Any) -> Score:
        return plain(output, expected)

    @classmethod
    def of_class(cls, output: Any, expected: Any) -> bool:
        return bool(output == expected)

    @staticmethod
    def static(trajectory: Any, sample: Any) -> float:
        return 1.0 if trajectory.messages else 0.0

    @evaluator(form="plain", name="marked")
    def marked(self, output: Any, expected: Any, third: Any = None) -> bool:
        return third is None


class AsyncJudge:
    __slots__ = ()

    async def __call__(self, output: Any, expected: Any, session: Any) -> Score:
        return with_session(output, expected, session)


def three(output: Any, expected: Any, third: Any) -> bool:
    return isinstance(third, SessionView)


def with_default(output: Any, expected: Any, threshold: Any = 0.5) -> bool:
    return bool(threshold == 0.5)


def session_last(output: Any, expected: Any, threshold: Any = 0.5, session: Any = None) -> bool:
    return threshold in (0.5, 0.7) and isinstance(session, SessionView)


def session_by_name(output: Any, expected: Any, *, threshold: Any = 0.5, session: Any = None) -> bool:
    return threshold in (0.5, 0.7) and isinstance(session, SessionView)


def many(output: Any, expected: Any, threshold: Any, session: Any) -> bool:
    return threshold == 0.7 and isinstance(session, SessionView)


def anything(*given: Any) -> bool:
    return len(given) == 2


@functools.wraps(with_session)
def wrapped(*args: Any, **kwargs: Any) -> Score:
    return with_session(*args, **kwargs)


FORMS: list[tuple[Any, str]] = [
    (plain, "plain"),
    (plain_later, "plain"),
    (lambda output, expected: output == expected, "plain"),
    (lambda *given: len(given) == 2, "plain"),
    (anything, "plain"),
    (operator.eq, "plain"),
    (with_default, "plain"),
    (functools.partial(with_default, threshold=0.5), "plain"),
    (Judge(), "plain"),
    (Judge().later, "plain"),
    (Judge.of_class, "plain"),
    (exact_match, "plain"),
    (with_session, "session"),
    (with_session_later, "session"),
    (three, "session"),
    (lambda o, e, s: isinstance(s, SessionView), "session"),
    (session_last, "session"),
    (session_by_name, "session"),
    (functools.partial(session_last, threshold=0.7), "session"),
    (functools.partial(session_by_name, threshold=0.7), "session"),
    (functools.partial(many, threshold=0.7), "session"),
    (functools.partial(functools.partial(many), threshold=0.7), "session"),
    (Judge().method, "session"),
    (AsyncJudge(), "session"),
    (functools.partial(AsyncJudge()), "session"),
    (wrapped, "session"),
    (tool_called("calc"), "session"),
    (with_context, "context"),
    (with_context_later, "context"),
    (rl_scorer, "trajectory"),
    (rl_scorer_later, "trajectory"),
    (Judge.static, "trajectory"),
]


@pytest.mark.proves("R12", "R13", "R14", "R15", "R23")
@pytest.mark.parametrize(
    ("fn", "form"),
    FORMS,
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else type(value).__name__),
)
def test_every_form_of_every_kind_of_callable_is_recognised_and_called(fn: Any, form: str) -> None:
    assert (marks_of(fn).form or _bind(fn).form) == form
    assert score_of(fn).passed
    assert resolve(fn).needs_session is (form != "plain")


@pytest.mark.proves("R23")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("renamed", "session"),
        ("unresolvable", "session"),
        ("optional", "session"),
        ("by_trajectory", "trajectory"),
        ("plain", "plain"),
    ],
)
def test_annotations_kept_as_text_are_understood(name: str, form: str) -> None:
    fn = getattr(as_text(), name)
    assert (marks_of(fn).form or _bind(fn).form) == form
    assert score_of(fn).passed


def as_text() -> ModuleType:
    spec = importlib.util.spec_from_file_location("annotated_as_text", Path(__file__).with_name("annotated_as_text.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.proves("R23")
def test_a_default_never_receives_a_session() -> None:
    seen: list[Any] = []

    def scorer(output: Any, expected: Any, threshold: float = 0.5) -> bool:
        seen.append(threshold)
        return True

    score_of(scorer)
    assert score_of(lambda output, expected, threshold=0.5: threshold == 0.5).passed
    assert set(seen) == {0.5}


@pytest.mark.proves("R23")
def test_an_explicit_marker_overrides_what_the_parameters_show() -> None:
    @evaluator(form="session")
    def optional(output: Any, expected: Any, where: Any = None) -> bool:
        return isinstance(where, SessionView)

    @evaluator(form="trajectory")
    def unnamed(a: Any, b: Any) -> bool:
        return isinstance(a, Trajectory) and isinstance(b, Sample)

    @evaluator(form="plain")
    def misleading(trajectory: Any, sample: Any) -> bool:
        return bool(trajectory == "4" and sample == "4")

    @evaluator(form="context")
    def keywords(sample: Any, output: Any, **rest: Any) -> bool:
        return isinstance(rest["context"], EvalContext)

    @evaluator(form="session")
    def by_keyword(a: Any, b: Any, limit: int = 3, *, session: Any) -> bool:
        return (a, b, limit) == ("4", "4", 3) and isinstance(session, SessionView)

    @evaluator(form="session")
    def fourth(a: Any, b: Any, limit: int = 3, session: Any = None) -> bool:
        return (a, b, limit) == ("4", "4", 3) and isinstance(session, SessionView)

    @evaluator(form="plain")
    def no_session(a: Any, b: Any, *, session: Any = None) -> bool:
        return (a, b, session) == ("4", "4", None)

    marked = (optional, unnamed, misleading, keywords, by_keyword, fourth, no_session, Judge().marked)
    for fn in (*marked, functools.partial(optional)):
        assert score_of(fn).passed
    assert resolve(Judge().marked).name == "marked"
    assert optional(1, 2, SESSION)


@pytest.mark.proves("R23")
def test_whatever_refuses_attributes_can_be_marked_all_the_same() -> None:
    for fn in (operator.eq, AsyncJudge(), Judge().of_class):
        marked = evaluator(name="named", inline=True)(fn)
        assert resolve(marked).name == "named"
        assert score_of(marked).passed
        assert score_of(functools.partial(marked)).passed
        assert marks_of(functools.partial(marked)).inline
    assert evaluator(plain) is plain
    assert marks_of(len).form is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: evaluator(form="other"),  # type: ignore[call-overload]
        lambda: evaluator(inline=True, isolate=True),
        lambda: resolve("text"),  # type: ignore[arg-type]
        lambda: resolve(lambda given: 1.0),
        lambda: resolve(lambda: 1.0),
        lambda: resolve(lambda a, b, c, d: 1.0),
        lambda: resolve(lambda given, session: 1.0),
        lambda: resolve(lambda output, expected, *, needed: 1.0),
        lambda: resolve(lambda given, *, context: 1.0),
        lambda: resolve(lambda sample, output, extra, *, context: 1.0),
        lambda: resolve(lambda output, response: 1.0),
        lambda: resolve(lambda output, *, actual: 1.0),
        lambda: resolve(lambda expected, given: 1.0),
        lambda: resolve(lambda given, output: 1.0),
        lambda: resolve(lambda traj, sample: 1.0),
        lambda: resolve(lambda inputs, answer, expected: 1.0),
        lambda: resolve(lambda expected, *rest: 1.0),
        lambda: resolve(lambda **named: 1.0),
        lambda: resolve(many),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_call(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match="evaluator"):
        make()


GIVEN: dict[str, Any] = {
    "output": "4",
    "expected": "4",
    "input": "2+2?",
    "sample": SAMPLE,
    "session": SESSION.session_id,
    "context": "run",
    "trajectory": ("hi", "hello"),
}


def shown(value: Any) -> Any:
    """A value that an evaluator was given, in a form that can be compared."""
    if isinstance(value, SessionView):
        return value.session_id
    if isinstance(value, EvalContext):
        return value.run_id
    if isinstance(value, Trajectory):
        return tuple(message.content for message in value.messages)
    return value


@st.composite
def named_parameters(draw: st.DrawFn) -> tuple[list[str], list[str], int]:
    """Known names of different roles, in any order, some with a default, some keyword-only."""
    roles = draw(st.lists(st.sampled_from(sorted(GIVEN)), min_size=1, unique=True))
    names = [draw(st.sampled_from([name for name, role in KNOWN_NAMES.items() if role == each])) for each in roles]
    split = draw(st.integers(1, len(names)))
    return names[:split], names[split:], draw(st.integers(0, split))


@pytest.mark.proves("R23")
@given(named_parameters())
def test_known_names_are_given_their_values_in_any_order(chosen: tuple[list[str], list[str], int]) -> None:
    positional, by_name, required = chosen
    texts = [name if place < required else f"{name}='default'" for place, name in enumerate(positional)]
    parameters = ", ".join([*texts, *(["*", *by_name] if by_name else [])])
    names = [*positional, *by_name]
    seen: dict[str, Any] = {}
    scope: dict[str, Any] = {"seen": seen}
    body = "".join(f"    seen[{name!r}] = {name}\n" for name in names)
    exec(f"def made({parameters}):\n{body}    return 0.25", scope)
    assert score_of(scope["made"]).value == 0.25
    assert {name: shown(value) for name, value in seen.items()} == {name: GIVEN[KNOWN_NAMES[name]] for name in names}


class Swapped:
    def __call__(self, inputs: Any, output: Any, expected: Any) -> bool:
        return (inputs, output, expected) == ("2+2?", "5", "4")

    def method(self, expected: Any, output: Any) -> bool:
        return (expected, output) == ("4", "5")

    async def later(self, reference: Any, *, prediction: Any) -> bool:
        return (reference, prediction) == ("4", "5")


@functools.wraps(Swapped.method)
def decorated(*args: Any, **kwargs: Any) -> bool:
    return Swapped.method(*args, **kwargs)


@pytest.mark.proves("R23")
@pytest.mark.parametrize(
    "fn",
    [
        lambda inputs, output, expected: (inputs, output, expected) == ("2+2?", "5", "4"),
        lambda expected, output: (expected, output) == ("4", "5"),
        lambda output: output == "5",
        lambda output, threshold=0.5: (output, threshold) == ("5", 0.5),
        lambda output, expected=None: (output, expected) == ("5", "4"),
        lambda expected=None, output=None: (output, expected) == ("5", "4"),
        lambda output, target, reference="other": (output, target, reference) == ("5", "4", "other"),
        lambda output, sample: (output, sample.id) == ("5", "s1"),
        lambda sample, output, context: (sample.id, output, context.run_id) == ("s1", "5", "run"),
        lambda output, **rest: (output, rest) == ("5", {}),
        lambda answer, expected: (answer, expected) == ("5", "4"),
        lambda answer, right=None: (answer, right) == ("5", "4"),
        functools.partial(lambda output, expected, target: (output, expected, target) == ("5", "4", 7), target=7),
        functools.partial(lambda output, expected: (output, expected) == ("5", 7), expected=7),
        Swapped(),
        Swapped().method,
        Swapped().later,
        functools.partial(decorated, Swapped()),
        operator.ne,
        evaluator(form="plain")(lambda expected, output: (expected, output) == ("5", "4")),
    ],
)
def test_parameters_mean_what_they_are_called_wherever_an_evaluator_stands(fn: Any) -> None:
    at = case("5")
    assert score_of(fn, at).passed
    assert score_of(all_of(fn, weighted((fn, 1.0))), at).passed
    assert score_of(panel(fn, fn), at).passed


def test_an_evaluator_that_cannot_be_bound_is_refused_with_the_marker_to_use() -> None:
    def score(traj, sample):  # type: ignore[no-untyped-def]
        return 1.0

    with pytest.raises(
        ConfigurationError, match=r"'sample' must be in the position of the sample \(got that of the expected\)"
    ):
        resolve(score)
    with pytest.raises(ConfigurationError, match=r'"trajectory" for \(trajectory, sample\)'):
        all_of(exact_match, score)
    assert score_of(evaluator(form="trajectory")(score)).passed


def test_a_builtin_that_hides_its_parameters_is_taken_as_plain() -> None:
    assert _bind(max).form == "plain"


@pytest.mark.proves("R12", "R9")
@pytest.mark.parametrize(
    ("result", "value", "passed", "metrics"),
    [
        (True, 1.0, True, {}),
        (False, 0.0, False, {}),
        (0.4, 0.4, False, {}),
        (1, 1.0, True, {}),
        (np.float64(0.75), 0.75, True, {}),
        (np.bool_(True), 1.0, True, {}),
        (np.float32(0.5), 0.5, True, {}),
        ({"a": True, "b": 0.5}, 0.75, True, {"a": 1.0, "b": 0.5}),
        ({"a": Score(0.9, False), "b": 1}, 0.95, False, {"a": 0.9, "b": 1.0}),
        ([Score(1.0, name="x"), Score(0.0, name="x")], 0.5, False, {"x": 1.0, "x#2": 0.0}),
        ((Score(1.0),), 1.0, True, {"given": 1.0}),
    ],
)
def test_what_an_evaluator_returns_becomes_a_score(result: Any, value: float, passed: bool, metrics: Any) -> None:
    def given(output: Any, expected: Any) -> Any:
        return result

    score = score_of(given)
    assert (score.value, score.passed) == (value, passed)
    assert {metric.name: metric.value for metric in score.metrics} == metrics


class Special(Score):
    """People subclass."""


def test_a_subclass_of_score_is_a_score() -> None:
    special = Special(0.5)
    assert score_of(lambda output, expected: special) is special


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (None, TypeError, "returned None; return a Score"),
        ("good", TypeError, "returned str"),
        ([1.0], TypeError, "must contain only Score objects"),
        ([], TypeError, "no score at all"),
        ({}, TypeError, "no score at all"),
        (3, ValueError, r"must be from 0 to 1 \(got 3"),
        (float("nan"), ValueError, "finite"),
    ],
)
def test_a_result_that_is_not_a_score_is_refused(result: Any, error: type[Exception], words: str) -> None:
    def careless(output: Any, expected: Any) -> Any:
        return result

    with pytest.raises(error, match=words):
        resolve(careless).score_now(case())


def test_an_awaitable_from_a_function_that_is_not_async_is_awaited_or_explained() -> None:
    scorer = resolve(lambda output, expected: plain_later(output, expected))

    async def wait() -> Score:
        return await scorer.score(case())

    assert anyio.run(wait).passed
    with pytest.raises(TypeError, match="evaluator 'lambda' returned an awaitable"):
        scorer.score_now(case())

    class Awaitable:
        def __await__(self) -> Any:
            yield

    with pytest.raises(TypeError, match="returned an awaitable"):
        resolve(lambda output, expected: Awaitable()).score_now(case())


@pytest.mark.proves("R15")
def test_an_rl_scorer_sees_the_recorded_messages_or_the_exchange_itself() -> None:
    def transcript(trajectory: Trajectory, sample: Any) -> Score:
        return Score(1.0, reason="|".join(f"{message.role}:{message.text}" for message in trajectory.messages))

    assert score_of(transcript).reason == "user:hi|assistant:hello"
    spoken = Trajectory((ChatMessage("assistant", "mine"),))
    assert score_of(transcript, case(spoken)).reason == "assistant:mine"
    assert score_of(transcript, Case(SAMPLE, {"a": 1})).reason == 'user:2+2?|assistant:{"a":1}'
    assert score_of(transcript, Case(SAMPLE, None)).reason == "user:2+2?"
    assert score_of(transcript, Case(SAMPLE, 1j)).reason == "user:2+2?|assistant:1j"
    reward = score_of(rl_scorer)
    assert (reward.reward, reward.metric("level")) == (1.0, 3.0)


@pytest.mark.proves("R27")
def test_an_evaluator_given_a_live_session_cannot_write_to_it() -> None:
    live = Session()
    live.record(ToolInvoked("calc"))

    def meddler(output: Any, expected: Any, session: Any) -> bool:
        session.record(ToolInvoked("forged"))
        return True

    with pytest.raises(AttributeError):
        resolve(meddler).score_now(Case(SAMPLE, "4", live))
    assert len(live) == 1
    assert resolve(three).score_now(Case(SAMPLE, "4", live)).passed


@pytest.mark.proves("R13")
def test_where_there_is_no_session_an_empty_one_is_given() -> None:
    score = resolve(tool_called("calc")).score_now(Case(SAMPLE, "4"))
    assert (score.passed, score.reason) == (False, "tool 'calc' was called 0 times")


def test_blocking_functions_are_run_elsewhere_and_quick_ones_are_not() -> None:
    where: list[tuple[str, bool, Any]] = []

    async def offload(call: OffloadedCall) -> Any:
        where.append((call.fn.__name__, call.wrapper is not None, call.kind))
        if call.wrapper is not None:
            return call.wrapper(call.fn, call.name, *call.args, **call.kwargs)
        return call.fn(*call.args, **call.kwargs)

    @evaluator(isolate=True)
    def heavy(output: Any, expected: Any) -> bool:
        return True

    for fn in (plain, heavy, exact_match, plain_later, with_context):
        score_of(fn, case(offload=offload))
    # What runs in a child process comes back as a score; what runs in a thread, as whatever it returned.
    assert where == [("plain", False, object), ("heavy", True, Score), ("with_context", False, object)]


@pytest.mark.proves("R16")
def test_evaluators_are_plain_functions() -> None:
    assert exact_match("a", "a") == Score(1.0, True)
    assert plain("a", "b").passed is False
    assert tool_called("calc")(None, None, SESSION).passed


def test_the_base_of_scorers_scores_nothing() -> None:
    base = Scorer()
    assert (base.needs_adapter, base.needs_expected, base.function) == (False, False, None)
    with pytest.raises(NotImplementedError):
        Scorer().score_now(case())
    with pytest.raises(NotImplementedError):
        anyio.run(Scorer().score, case())
