"""What is said about an evaluator when it is bound, and what it is given where nothing was recorded."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

from fairtrial import Sample, evaluator
from fairtrial.base.isolation import NotSendableError
from fairtrial.scoring import Case, resolve


def test_unknown_names_are_bound_by_position_with_one_warning_that_says_how(caplog: pytest.LogCaptureFixture) -> None:
    def check_totals(truth: int, answer: int) -> bool:
        return truth == answer

    resolve(check_totals)
    resolve(check_totals)
    (record,) = caplog.records
    assert record.getMessage() == (
        "evaluator 'check_totals': 'truth' receives the output and 'answer' receives the expected value, by position, "
        "because no parameter has a known name. Name them (output, expected) in your order, or confirm this one with "
        '@evaluator(form="plain")'
    )


def test_a_third_parameter_with_an_unknown_name_receives_the_session_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def on_topic(output: str, expected: str, question: str) -> bool:
        return output in question

    resolve(on_topic)
    (record,) = caplog.records
    assert record.getMessage() == (
        "evaluator 'on_topic': 'question' receives the session, by position, because its name is not known. Give it "
        "a known name (output, expected, input, sample, session, trajectory, environment, context), or confirm this "
        'one with @evaluator(form="session")'
    )


def _positional_only(one: int, other: int, /) -> bool:
    return one == other


@pytest.mark.parametrize(
    "fn",
    [
        _positional_only,
        operator.eq,
        evaluator(form="plain")(lambda made, right: made == right),
        lambda made, expected: made == expected,
        lambda output, right: output == right,
        lambda output, right, session: output == right,
        evaluator(form="session")(lambda output, expected, record: output == expected),
        lambda made, right, *, context: made == right,
    ],
)
def test_a_binding_that_the_signature_shows_is_not_warned_about(
    fn: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    resolve(fn)
    assert not caplog.records


def test_only_an_isolated_evaluator_must_be_one_that_can_be_sent_to_a_child_process() -> None:
    verdicts = (verdict for verdict in (True, False))  # A generator belongs to its process.

    def judge(output: str, expected: str) -> bool:
        return next(verdicts)

    assert resolve(judge).name == "judge"
    with pytest.raises(NotSendableError, match="evaluator 'judge'"):
        resolve(evaluator(isolate=True)(judge))


@pytest.mark.parametrize(
    ("given", "spoken"),
    [
        ("Hello", [("user", "Hello"), ("assistant", "Hi")]),
        (7, [("user", "7"), ("assistant", "Hi")]),
        (
            [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}],
            [("system", "Be brief"), ("user", "Hello"), ("assistant", "Hi")],
        ),
    ],
)
def test_without_messages_the_input_and_the_output_are_the_conversation(given: Any, spoken: list[Any]) -> None:
    messages = Case(Sample("s", given), "Hi").trajectory.messages
    assert [(message.role, message.content) for message in messages] == spoken
