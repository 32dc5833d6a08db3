"""The decision about a batch whose answer was lost, alone and in all histories of the model of killed clients."""

from __future__ import annotations

import pytest

from fairtrial.models.batches.recovery import MARGIN_SECONDS, Adopt, Candidate, Read, SendAgain, Wait, decide
from tests.models.batches.recovery_model import (
    MOST_LAG,
    STEPS,
    AdoptBatch,
    Answer,
    Protocol,
    Question,
    ReadResults,
    outcome,
)


def as_implemented(question: Question) -> Answer:
    """Answer a question of the model with the decision of the sender."""
    decision = decide(
        question.intent,
        question.requests,
        question.created_at,
        [Candidate(one.id, one.created_at, one.label, one.requests, one.ended, one.first_id) for one in question.shown],
        waited_seconds=question.waited,
        lag_seconds=question.shown_after,
        labelled=question.labelled,
        known=question.known,
    )
    match decision:
        case Adopt(batch_id):
            return AdoptBatch(batch_id)
        case Read(batch_ids):
            return ReadResults(batch_ids)
        case Wait():
            return "wait"
        case SendAgain():
            return "send"


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("lag", [0, MOST_LAG])
def test_in_every_history_of_the_model_each_request_is_answered_and_paid_for_once(labelled: bool, lag: int) -> None:
    found = outcome(Protocol("the sender", "intents", as_implemented), labelled=labelled, lag=lag)
    assert (found.histories, found.unanswered, found.paid_twice) == (STEPS * STEPS * 4, 0.0, 0.0)


MINE = Candidate("b1", 1000.0, requests=3, ended=True, first_id="aaaaaaaaaaaa0123")
OTHER = Candidate("b2", 1000.0, requests=3, ended=True, first_id="bbbbbbbbbbbb0123")


@pytest.mark.parametrize(
    ("candidates", "waited", "expected"),
    [
        ([], 5.0, Wait(5.0)),
        ([], 10.0, SendAgain()),
        ([MINE], 0.0, Adopt("b1")),
        ([OTHER], 10.0, SendAgain()),
        ([Candidate("b3", 1000.0, "aaaaaaaaaaaa")], 0.0, Adopt("b3")),
        ([Candidate("b3", 1000.0, "cccccccccccc")], 10.0, SendAgain()),
        ([Candidate("b3", 1000.0, requests=4)], 10.0, SendAgain()),
        ([Candidate("b3", 1000.0, requests=None)], 10.0, Wait(None)),
        ([Candidate("b3", 1000.0, requests=3)], 10.0, Wait(None)),
        ([Candidate("b3", 1000.0, requests=3, ended=True)], 10.0, Read(("b3",))),
        ([Candidate("known", 1000.0, requests=3)], 10.0, SendAgain()),
        ([Candidate("b3", 1000.0 - MARGIN_SECONDS - 1, requests=3)], 10.0, SendAgain()),
        ([Candidate("b3", 1000.0 - MARGIN_SECONDS + 1, requests=3)], 10.0, Wait(None)),
    ],
)
def test_decisions_without_labels(candidates: list[Candidate], waited: float, expected: object) -> None:
    found = decide(
        "aaaaaaaaaaaa",
        3,
        1000.0,
        candidates,
        waited_seconds=waited,
        lag_seconds=10.0,
        labelled=False,
        known={"known"},
    )
    assert found == expected
