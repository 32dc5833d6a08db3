"""What the model of killed clients says about four protocols."""

from __future__ import annotations

import pytest

from tests.models.batches.recovery_model import (
    MOST_LAG,
    PROTOCOLS,
    STEPS,
    Account,
    Answer,
    Client,
    Kept,
    Protocol,
    Question,
    look_once,
    outcome,
    wait_for_the_list,
)

IN_MEMORY, STORED_LATE, LOOKS_ONCE, WAITS = PROTOCOLS

# The share of histories that pay twice: with labels and without, if the list shows a batch at once, and if it lags.
PAID_TWICE = {
    (IN_MEMORY, True): (72.8, 72.8),
    (IN_MEMORY, False): (72.8, 72.8),
    (STORED_LATE, True): (55.3, 55.3),
    (STORED_LATE, False): (55.3, 55.3),
    (LOOKS_ONCE, True): (0.0, 49.0),
    (LOOKS_ONCE, False): (0.0, 48.0),
    (WAITS, True): (0.0, 0.0),
    (WAITS, False): (0.0, 0.0),
}


@pytest.mark.parametrize(("protocol", "labelled"), PAID_TWICE, ids=lambda one: getattr(one, "name", str(one)))
def test_only_an_intent_that_waits_for_the_list_never_pays_twice(protocol: Protocol, labelled: bool) -> None:
    found = [outcome(protocol, labelled=labelled, lag=lag) for lag in (0, MOST_LAG)]
    assert tuple(round(one.paid_twice, 1) for one in found) == PAID_TWICE[protocol, labelled]
    assert [(one.histories, one.unanswered) for one in found] == [(STEPS * STEPS * 4, 0.0)] * 2


def test_the_kills_reach_every_step_of_a_client() -> None:
    for protocol in PROTOCOLS:
        client = Client(protocol, Account(labelled=True, lag=0, foreign=False), Kept(), 0, reply_is_lost=True)
        client.run()
        assert 10 < client.steps < STEPS


def test_waiting_a_step_too_little_pays_twice() -> None:
    def impatient(question: Question) -> Answer:
        answer = look_once(question)
        return "wait" if answer == "send" and question.waited < question.shown_after - 1 else answer

    kills = range(12)
    assert outcome(Protocol("", "intents", impatient), labelled=True, lag=MOST_LAG, kills=kills).paid_twice > 0
    assert outcome(Protocol("", "intents", wait_for_the_list), labelled=True, lag=MOST_LAG, kills=kills).paid_twice == 0
