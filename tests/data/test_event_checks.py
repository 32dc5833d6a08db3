"""Values from SDKs are normalised when an event is created; values that cannot be read back are refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from fairtrial import ChatMessage, PromptExecuted, Session, TokenUsage, ToolCall, ToolInvoked
from fairtrial.data.session.session import restore_session

# Untyped names: these tests hand over what the types do not allow.
usage_of: Any = TokenUsage
executed: Any = PromptExecuted
invoked: Any = ToolInvoked
message: Any = ChatMessage
call: Any = ToolCall


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (usage_of(None, 5), (0, 5, 0, None)),
        (usage_of(3.0, np.int64(4), None), (3, 4, 0, None)),
        (usage_of(1, 2, 0, Decimal("0.25")), (1, 2, 0, 0.25)),
        (usage_of(1, 2, 0, np.float32(0.5)), (1, 2, 0, 0.5)),
        (usage_of(1, 2, 0, 3), (1, 2, 0, 3.0)),
    ],
)
def test_usage_as_providers_report_it_becomes_plain_numbers(given: TokenUsage, kept: tuple[Any, ...]) -> None:
    found = (given.input_tokens, given.output_tokens, given.cached_tokens, given.cost_usd)
    assert found == kept
    assert [type(count) for count in found[:3]] == [int, int, int]
    assert found[3] is None or type(found[3]) is float
    assert (given + usage_of(1, 1)).input_tokens == kept[0] + 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: usage_of(1.5, 2), r"TokenUsage.input_tokens must be a whole number \(got 1.5\)"),
        (lambda: usage_of(1, "2"), r"TokenUsage.output_tokens must be a whole number \(got '2'\)"),
        (lambda: usage_of(1, -2), r"TokenUsage.output_tokens must be at least 0 \(got -2\)"),
        (lambda: usage_of(float("nan")), r"TokenUsage.input_tokens must be a whole number \(got nan\)"),
        (lambda: usage_of(cost_usd=float("inf")), r"TokenUsage.cost_usd must be a finite number of at least 0"),
        (lambda: usage_of(cost_usd=float("nan")), r"TokenUsage.cost_usd must be a finite number of at least 0"),
        (lambda: usage_of(cost_usd=-0.5), r"TokenUsage.cost_usd must be a finite number of at least 0"),
        (lambda: usage_of(cost_usd="1"), r"TokenUsage.cost_usd must be a number \(got '1'\)"),
        (lambda: usage_of(cost_usd=10**400), r"TokenUsage.cost_usd must be a finite number"),
        (lambda: executed(usage={"input_tokens": 3}), "PromptExecuted.usage must be a TokenUsage or None"),
        (lambda: executed(usage=usage_of(2**31)), "usage.input_tokens must be at most 2,147,483,647"),
        (lambda: executed(model=3), "PromptExecuted.model must be text"),
        (lambda: invoked(None), "ToolInvoked.name must be text"),
        (lambda: invoked("t", ["a"]), "ToolInvoked.params must be a mapping"),
        (lambda: invoked("t", success="yes"), "ToolInvoked.success must be True, False or None"),
        (lambda: message(None, "a"), "ChatMessage.role must be text"),
        (lambda: message("user", 3), "ChatMessage.content must be text, or a sequence"),
        (lambda: message("user", [{"type": "text"}]), "ChatMessage.content must be text, or a sequence"),
        (lambda: message("assistant", "", "call"), "ChatMessage.tool_calls must be a sequence of ToolCall"),
        (lambda: call("t", "{}"), "ToolCall.arguments must be a mapping"),
    ],
)
def test_an_event_that_could_not_be_read_back_is_refused_when_it_is_made(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_many_large_calls_add_up_without_a_limit() -> None:
    total = usage_of(2**31 - 1) + usage_of(2**31 - 1)
    assert total.input_tokens == 2**32 - 2


@pytest.mark.parametrize(
    "event",
    [
        message("assistant", None, [call("search", None, None)], None),
        message("user", ["a", "b"], None),
        invoked("search", None),
        executed(usage=usage_of(None, None, None)),
    ],
)
def test_what_an_sdk_leaves_out_is_recorded_and_read_back(event: Any) -> None:
    session = Session()
    session.record(event)
    assert session[type(event)].all() == (event,)
    assert restore_session(session.snapshot())[type(event)].all() == (event,)
