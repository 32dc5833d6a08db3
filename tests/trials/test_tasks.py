"""How a task is called, depending on its parameters and options."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fairtrial import ConfigurationError, TrialContext, task
from fairtrial.trials.task import resolve_task


def plain(given: str) -> int:
    return 1


def with_context(given: str, ctx: TrialContext) -> str:
    return "x"


def annotated(given: str, where: TrialContext | None = None) -> str:
    return "x"


def optional(given: str, ctx: Any = None) -> str:
    return "x"


def flag(given: str, loud: bool = False) -> str:
    return "x"


async def waits(given: str) -> None:
    return None


class Agent:
    def __call__(self, given: str) -> float:
        return 1.0

    async def reply(self, given: str, ctx: TrialContext) -> list[str]:
        return []


class Broken:
    def __call__(self, given: NoSuchType) -> NoSuchType:  # type: ignore[name-defined]  # noqa: F821
        return given


class NoSignature:
    """Callable as some functions written in C are: without a signature that can be read."""

    __signature__ = "unknown"

    def __call__(self, given: str) -> str:
        return given


@pytest.mark.parametrize(
    ("fn", "takes_context", "is_async", "output_type"),
    [
        (plain, False, False, int),
        (with_context, True, False, str),
        (optional, True, False, str),
        (flag, False, False, str),
        (waits, False, True, object),
        (Agent(), False, False, float),
        (Agent().reply, True, True, list[str]),
        (partial(optional, ctx=None), False, False, str),
        (Broken(), False, False, object),
        (len, False, False, object),
        (lambda *args: 1, False, False, object),
        (lambda given, *, loud=False: 1, False, False, object),
        (NoSignature(), False, False, str),
    ],
)
def test_a_task_is_understood_from_its_parameters(
    fn: Any, takes_context: bool, is_async: bool, output_type: Any
) -> None:
    found = resolve_task(fn)
    assert (found.takes_context, found.is_async, found.output_type) == (takes_context, is_async, output_type)


def test_what_is_said_about_a_task_is_kept_for_functions_and_for_methods() -> None:
    @task(inline=True, name="quick")
    def marked(given: str) -> int:
        return 1

    assert resolve_task(marked).name == "quick"
    assert resolve_task(task(Agent().reply)).is_async
    assert resolve_task(task(isolate=True)(Agent().__call__)).isolate


def test_invalid_labels_and_weights_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="mutually exclusive"):
        task(inline=True, isolate=True)

    @task(isolate=True)
    async def marked(given: str) -> None:
        return None

    with pytest.raises(ConfigurationError, match="is async"):
        resolve_task(marked)


@pytest.mark.parametrize("fn", [lambda given, *, key: key, lambda a, b, c: a, lambda: 1, lambda *, loud=False: 1])
def test_a_function_that_cannot_be_called_with_input_and_context_is_refused(fn: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"must take \(input\) or \(input, ctx\)"):
        resolve_task(fn)


def test_whatever_knows_how_to_be_a_task_is_one() -> None:
    class Loop:
        def as_task(self) -> Any:
            return with_context

    assert resolve_task(Loop()).takes_context


def test_a_second_parameter_that_is_not_named_as_a_context_is_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reply(question: str, style: str) -> str:
        return question

    assert resolve_task(reply).takes_context
    resolve_task(reply)
    (record,) = caplog.records
    assert record.getMessage() == (
        "task 'reply': 'style' receives the context of the trial (a TrialContext). Name it ctx or annotate it as "
        "TrialContext if that is meant; parameters of experiments are in ctx.experiment.params"
    )


def test_a_second_parameter_that_shows_that_it_is_the_context_is_not_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def by_annotation(question: str, trial: TrialContext) -> str:
        return question

    def positional_only(question: str, trial: object, /) -> str:
        return question

    for fn in (
        by_annotation,
        positional_only,
        lambda a, ctx: a,
        lambda a, context: a,
        lambda a, _: a,
        lambda a, _ctx: a,
    ):
        assert resolve_task(fn).takes_context
    assert not caplog.records
