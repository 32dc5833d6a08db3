"""What becomes of a batch whose answer was lost, or whose process died before it came: a pure decision.

The provider may have made the batch or not, and its list may show it late. Batches are never sent again before the list
had the time to show them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MARGIN_SECONDS = 600.0
"""How far the clocks of the provider and of this machine may differ."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A batch in the provider's list.

    Attributes:
        id: The provider's id.
        created_at: When the provider made it, by its clock.
        label: The intent that the provider shows with it; None if it shows none.
        requests: The number of its requests; None if the provider does not say.
        ended: Whether its results can be read.
        first_id: The `custom_id` of its first result, once that was read; "" if it has none.
    """

    id: str
    created_at: float
    label: str | None = None
    requests: int | None = None
    ended: bool = False
    first_id: str | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """The batch with this id is the one that was sent."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class Read:
    """The first result of these batches decides."""

    batch_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Look at the list again, after at most this time; None if it depends on the end of other batches."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class SendAgain:
    """The provider has not made the batch."""


type Decision = Adopt | Read | Wait | SendAgain


def decide(
    intent: str,
    requests: int,
    created_at: float,
    candidates: Sequence[Candidate],
    *,
    waited_seconds: float,
    lag_seconds: float,
    labelled: bool,
    known: Collection[str] = (),
) -> Decision:
    """Decide about a batch of which it is not known whether the provider has made it.

    Args:
        intent: The intent's id.
        requests: The number of its requests.
        created_at: When the intent was stored, by the clock of this machine.
        candidates: The provider's list, back to a margin before that.
        waited_seconds: How long the list has been watched, since the last moment at which the request was under way.
        lag_seconds: How long the list may take to show a batch.
        labelled: Whether the list shows the intent of each batch.
        known: The ids of batches that belong to other intents.
    """
    undecided: list[Candidate] = []
    for one in candidates:
        if one.label == intent:
            return Adopt(one.id)
        if labelled or one.label is not None or one.id in known or one.created_at < created_at - MARGIN_SECONDS:
            continue
        if one.requests is not None and one.requests != requests:
            continue
        if one.first_id is None:
            undecided.append(one)
        elif one.first_id.startswith(intent):
            return Adopt(one.id)
    if readable := tuple(one.id for one in undecided if one.ended):
        return Read(readable)
    if waited_seconds < lag_seconds:
        return Wait(lag_seconds - waited_seconds)
    return Wait(None) if undecided else SendAgain()
