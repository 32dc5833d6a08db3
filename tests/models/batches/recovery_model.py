"""A model of batches whose client dies: which protocol answers every request, and pays for it once.

A provider accepts a batch when `create` reaches it, whatever becomes of the reply; its list shows the batch some steps
later. A client has four requests for batches of two. It is killed at every pair of its steps, its first reply may be
lost, and what survives it is its store. A `Protocol` says what it stores, and how it decides about an intent whose
batch it does not know: send, wait, read the results of a batch, or adopt one. A step is a unit of time.

`python recovery_model.py`, in this folder, prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal, cast

REQUESTS, SIZE = 4, 2
LIFE = 3  # How many steps a batch takes.
MOST_LAG = 2  # A list shows every batch that is older than this.
STEPS = 26  # A client that is not killed takes fewer steps.


class KilledError(Exception):
    """The client's process dies here."""


@dataclass(frozen=True, slots=True)
class ShownBatch:
    """A batch in the provider's list.

    `label` is the intent's id, from providers that show it. `first_id` is the first `custom_id` of its results, once
    the client has read them.
    """

    id: str
    created_at: int
    requests: int
    ended: bool
    label: str | None = None
    first_id: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """An intent whose batch may exist, and all that the client can know about it.

    `waited` counts the steps from the start of the search to the request of the list; a batch that existed then is
    shown when they are `shown_after`. `known` are the batches of other intents.
    """

    intent: str
    requests: int
    created_at: int
    shown: tuple[ShownBatch, ...]
    waited: int
    shown_after: int
    labelled: bool
    known: frozenset[str]


@dataclass(frozen=True, slots=True)
class AdoptBatch:
    """The intent's batch is this one."""

    id: str


@dataclass(frozen=True, slots=True)
class ReadResults:
    """The results of these batches decide, as soon as they have ended; the list is not read again before."""

    ids: tuple[str, ...]


type Answer = AdoptBatch | ReadResults | Literal["wait", "send"]
type Decide = Callable[[Question], Answer]


def look_once(question: Question) -> Answer:
    """Adopt the batch if the list shows it, and send it if it does not."""
    open_candidates: list[str] = []
    for batch in question.shown:
        if question.labelled:
            if batch.label == question.intent:
                return AdoptBatch(batch.id)
            continue
        if batch.id in question.known or batch.created_at < question.created_at or batch.requests != question.requests:
            continue
        if batch.first_id is None:
            open_candidates.append(batch.id)
        elif batch.first_id.startswith(f"{question.intent}."):
            return AdoptBatch(batch.id)
    return ReadResults(tuple(open_candidates)) if open_candidates else "send"


def wait_for_the_list(question: Question) -> Answer:
    """As `look_once`, but send only when the list had the time to show the batch."""
    answer = look_once(question)
    return "wait" if answer == "send" and question.waited < question.shown_after else answer


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a client stores, and how it looks for batches. Without `decide`, it sends without looking."""

    name: str
    stores: Literal["nothing", "ids", "intents"]
    decide: Decide | None = None


PROTOCOLS = (
    Protocol("ids in memory", "nothing"),
    Protocol("ids stored after create", "ids"),
    Protocol("intent stored, looked for once", "intents", look_once),
    Protocol("intent stored, waits for the list", "intents", wait_for_the_list),
)


@dataclass(slots=True)
class Account:
    """The provider: batches, their list, their results. Every request to it takes a step of time."""

    labelled: bool
    lag: int
    foreign: bool
    now: int = 0
    batches: dict[str, tuple[ShownBatch, tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.foreign:  # Another party's batch of the same size, made when the client starts, and always listed.
            self.batches["other"] = (ShownBatch("other", 1, SIZE, False), ("x.1", "x.2"))

    def create(self, intent: str, custom_ids: tuple[str, ...]) -> str:
        """Accept a batch; returns its id."""
        self.now += 1
        label = intent if self.labelled else None
        batch = ShownBatch(f"batch-{len(self.batches)}", self.now, len(custom_ids), False, label)
        self.batches[batch.id] = (batch, custom_ids)
        return batch.id

    def listed(self) -> list[ShownBatch]:
        """The list of batches."""
        self.now += 1
        return [
            replace(batch, ended=self._ended(batch))
            for batch, _ in self.batches.values()
            if batch.id == "other" or self.now - batch.created_at > self.lag
        ]

    def results(self, batch_id: str) -> tuple[str, ...] | None:
        """The custom_ids of the results of a batch; None if it has not ended."""
        self.now += 1
        batch, custom_ids = self.batches[batch_id]
        return custom_ids if self._ended(batch) else None

    def _ended(self, batch: ShownBatch) -> bool:
        return self.now >= batch.created_at + LIFE

    def paid(self) -> list[str]:
        """The keys of all requests of the client that were executed, each as often as it was paid for."""
        sent = [custom_ids for batch, custom_ids in self.batches.values() if batch.id != "other"]
        return [custom_id.partition(".")[2] for custom_ids in sent for custom_id in custom_ids]


@dataclass(slots=True)
class Intent:
    """A batch as the client knows it."""

    id: str
    keys: tuple[int, ...]
    created_at: int
    batch_id: str | None = None


@dataclass(slots=True)
class Kept:
    """What survives the client."""

    intents: list[Intent] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)


class Client:
    """One process of the client, which is killed at one of its steps, or at none (0)."""

    def __init__(self, protocol: Protocol, account: Account, kept: Kept, kill_at: int, *, reply_is_lost: bool) -> None:
        self._protocol, self._account, self._kept = protocol, account, kept
        self._kill_at, self._reply_is_lost = kill_at, reply_is_lost
        self._intents = [] if protocol.stores == "nothing" else kept.intents
        self.steps = 0

    def run(self) -> None:
        """Answer all requests."""
        for intent in self._intents:
            if intent.batch_id is None:
                batch_id = self._search(intent)
                self._step()
                intent.batch_id = batch_id or self._send(intent)
        while True:
            self._step()
            if new := self._next_keys():
                self._submit(Intent(f"i{len(self._account.batches)}-{len(self._intents)}", new, self._account.now))
                continue
            waiting = [intent for intent in self._intents if not self._kept.answered.issuperset(intent.keys)]
            if not waiting:
                return
            for intent in waiting:
                self._step()
                assert intent.batch_id is not None
                if self._account.results(intent.batch_id) is not None:
                    self._kept.answered.update(intent.keys)

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self._kill_at:
            raise KilledError

    def _next_keys(self) -> tuple[int, ...]:
        planned = self._kept.answered.union(*(intent.keys for intent in self._intents))
        return tuple(key for key in range(REQUESTS) if key not in planned)[:SIZE]

    def _submit(self, intent: Intent) -> None:
        if self._protocol.stores == "intents":
            self._intents.append(intent)
            self._step()
            intent.batch_id = self._send(intent)
        else:
            batch_id = self._send(intent)
            self._step()
            self._intents.append(replace(intent, batch_id=batch_id))

    def _send(self, intent: Intent) -> str:
        while True:
            self._step()
            batch_id = self._account.create(intent.id, tuple(f"{intent.id}.{key}" for key in intent.keys))
            self._step()
            if not self._reply_is_lost:
                return batch_id
            self._reply_is_lost = False
            if (batch := self._search(intent)) is not None:
                return batch

    def _search(self, intent: Intent) -> str | None:
        """Return the id of the intent's batch; None if it is to be sent."""
        if self._protocol.decide is None:
            return None
        account, began = self._account, self._account.now
        known = frozenset(one.batch_id for one in self._intents if one.batch_id is not None)
        shown, waited, answer = list[ShownBatch](), 0, cast("Answer", "wait")
        while answer != "send":
            if answer == "wait":
                shown = account.listed()
                waited = account.now - began
            elif isinstance(answer, AdoptBatch):
                return answer.id
            else:
                read = {batch_id: self._first_id(batch_id) for batch_id in answer.ids}
                shown = [replace(batch, first_id=read.get(batch.id, batch.first_id)) for batch in shown]
            answer = self._protocol.decide(
                Question(
                    intent.id,
                    len(intent.keys),
                    intent.created_at,
                    tuple(shown),
                    waited,
                    shown_after=MOST_LAG + 1,
                    labelled=account.labelled,
                    known=known,
                )
            )
        return None

    def _first_id(self, batch_id: str) -> str:
        while (custom_ids := self._account.results(batch_id)) is None:
            pass
        return custom_ids[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The share of histories in which a request was not answered, or was paid for more than once, in percent."""

    histories: int
    unanswered: float
    paid_twice: float


def outcome(protocol: Protocol, *, labelled: bool, lag: int, kills: Iterable[int] = range(STEPS)) -> Outcome:
    """Play all histories: two kills at every pair of steps, a lost reply or none, foreign batches or none."""
    histories = unanswered = paid_twice = 0
    for first, second, lost, foreign in product(kills, kills, (False, True), (False, True)):
        account, kept = Account(labelled, lag, foreign), Kept()
        for place, kill_at in enumerate((first, second, 0)):
            try:
                Client(protocol, account, kept, kill_at, reply_is_lost=lost and place == 0).run()
                break
            except KilledError:
                pass
        histories += 1
        unanswered += len(kept.answered) < REQUESTS
        paid_twice += len(account.paid()) > len(set(account.paid()))
    return Outcome(histories, 100 * unanswered / histories, 100 * paid_twice / histories)


if __name__ == "__main__":
    for one, has_labels, list_lag in product(PROTOCOLS, (True, False), (0, MOST_LAG)):
        found = outcome(one, labelled=has_labels, lag=list_lag)
        where = "labels" if has_labels else "none"
        print(
            f"{one.name:34} {where:7} lag {list_lag}  {found.histories} histories  {found.paid_twice:5.1f}% paid twice"
        )
