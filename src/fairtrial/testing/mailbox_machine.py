"""Test a mailbox with random operations, and compare it with a simple model after each step (Hypothesis).

    machine = mailbox_machine(world)                      # a class for Hypothesis
    run_state_machine_as_test(machine, settings=settings(max_examples=500, stateful_step_count=40))

A world may have `retention_seconds`, the time for which its server keeps a message; without it, messages are kept for
ever. The machine lets less time pass than that.

The operations send, receive, settle in time and too late, extend leases, crash (forget what was received), hand
messages back, dead-letter them, and let time pass in small and large steps. The mailbox must agree with the model: no
message is lost, none is delivered while it is leased or delayed or after it was settled, and all counts are right.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from fairtrial.errors import LeaseLostError
from fairtrial.mailbox.protocol import Mailbox, Message


class MailboxWorld(Protocol):
    """Opens mailboxes of ints, runs their coroutines and controls their time."""

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end on the event loop of the mailbox."""
        ...

    def open(self) -> Mailbox[int]:
        """Open a new, empty mailbox."""
        ...

    def pass_time(self, mailbox: Mailbox[int], seconds: float) -> None:
        """Age leases and delays by `seconds`, then make messages available whose lease or delay has ended."""
        ...

    def close(self, mailbox: Mailbox[int]) -> None:
        """Close the mailbox at the end of a test."""
        ...


@dataclass(slots=True)
class _KnownMessage:
    """The state of one message in the model."""

    id: str
    number: int
    state: Literal["waiting", "delayed", "leased", "dead", "gone"] = "waiting"
    until: float = 0.0
    delivery: int = 0
    deliveries: int = 0
    expiries: int = 0


@dataclass(frozen=True, slots=True)
class _Delivery:
    message: Message[int]
    known: _KnownMessage
    number: int


_SECONDS = st.sampled_from([1.0, 10.0, 40.0, 61.0, 300.0])
_LONGEST = 10 * 365 * 24 * 3600.0 / 11
_JUMPS = st.sampled_from([0.5, 5.0, 12.0, 41.0, 62.0, 400.0, 100_000.0])


def mailbox_machine(make_world: Callable[[], MailboxWorld]) -> type[RuleBasedStateMachine]:
    """Return the Hypothesis state machine for mailboxes of this kind."""

    class MailboxMachine(RuleBasedStateMachine):
        """A mailbox, a model of it, and rules that compare them."""

        deliveries = Bundle("deliveries")

        def __init__(self) -> None:
            super().__init__()
            self.world = make_world()
            self.mailbox = self.world.open()
            self.now = 0.0
            self.horizon: float = getattr(self.world, "retention_seconds", 1000 * _LONGEST) / 2
            self.known: dict[str, _KnownMessage] = {}
            self.numbers = 0

        def teardown(self) -> None:
            """Check that exactly the messages that were not settled are still delivered."""
            try:
                self.drain()
            finally:
                self.world.close(self.mailbox)

        def drain(self) -> None:
            """Let every lease and delay end, then receive all messages."""
            self.advance(min(_LONGEST, self.horizon / 2))
            expected = {known.id for known in self.known.values() if known.state == "waiting"}
            seen: set[str] = set()
            while messages := self.world.run(self.mailbox.receive(50, 60, 0)):
                for message in messages:
                    self.check_delivery(message, 60.0)
                    seen.add(message.id)
                    self.world.run(message.acknowledge())
                    self.known[message.id].state = "gone"
            assert seen == expected, f"lost: {expected - seen}; unexpected: {seen - expected}"
            assert self.world.run(self.mailbox.approximate_count()) == 0

        def advance(self, seconds: float) -> None:
            """Let time pass in the model and in the mailbox."""
            self.now += seconds
            self.world.pass_time(self.mailbox, seconds)
            for known in self.known.values():
                if known.state in ("delayed", "leased") and known.until <= self.now:
                    known.expiries += known.state == "leased"
                    known.state = "waiting"

        def check_delivery(self, message: Message[int], lease: float) -> _Delivery:
            """Check that a delivered message was available, and record its delivery."""
            known = self.known.get(message.id)
            assert known is not None, f"{message} was never sent"
            assert known.state == "waiting", f"{message} was delivered while it was {known.state}"
            known.deliveries += 1
            known.delivery += 1
            assert message.body == known.number
            assert message.delivery_count == known.deliveries
            assert message.expiries == known.expiries
            known.state = "leased"
            known.until = self.now + lease
            return _Delivery(message, known, known.delivery)

        def settle(self, delivery: _Delivery, call: Coroutine[Any, Any, None]) -> bool:
            """Settle one delivery; the mailbox must agree with the model whether its lease is still valid."""
            ours = delivery.known.state == "leased" and delivery.known.delivery == delivery.number
            try:
                self.world.run(call)
            except LeaseLostError:
                assert not ours, f"{delivery.message} is leased, but the mailbox reports a lost lease"
                return False
            assert ours, f"{delivery.message} was {delivery.known.state}, but could be settled"
            return True

        @initialize()
        def begin(self) -> None:
            """Send a first message, because most rules need one."""
            self.send(2)

        @rule(count=st.integers(1, 4))
        def send(self, count: int) -> None:
            for _ in range(count):
                self.numbers += 1
                id = self.world.run(self.mailbox.send(self.numbers))
                assert id not in self.known
                self.known[id] = _KnownMessage(id, self.numbers)

        @rule(target=deliveries, count=st.integers(1, 6), lease=_SECONDS)
        def receive(self, count: int, lease: float) -> Any:
            available = sum(known.state == "waiting" for known in self.known.values())
            messages = self.world.run(self.mailbox.receive(count, lease, 0))
            assert len(messages) == min(count, available), f"{available} were waiting, {len(messages)} came"
            return multiple(*(self.check_delivery(message, lease) for message in messages))

        @rule(delivery=deliveries)
        def acknowledge(self, delivery: _Delivery) -> None:
            if self.settle(delivery, delivery.message.acknowledge()):
                delivery.known.state = "gone"

        @rule(delivery=deliveries, delay=st.sampled_from([0.0, 0.0, 5.0, 45.0, 600.0]))
        def nack(self, delivery: _Delivery, delay: float) -> None:
            if self.settle(delivery, delivery.message.nack(delay)):
                delivery.known.state = "delayed" if delay else "waiting"
                delivery.known.until = self.now + delay

        @rule(delivery=deliveries, delay=st.sampled_from([0.0, 0.0, 5.0, 45.0]))
        def hand_back(self, delivery: _Delivery, delay: float) -> None:
            if self.settle(delivery, delivery.message.hand_back(delay)):
                delivery.known.deliveries -= 1
                delivery.known.state = "delayed" if delay else "waiting"
                delivery.known.until = self.now + delay

        @rule(delivery=deliveries, seconds=_SECONDS)
        def extend(self, delivery: _Delivery, seconds: float) -> None:
            if self.settle(delivery, delivery.message.extend_visibility(seconds)):
                delivery.known.until = self.now + seconds

        @rule(delivery=deliveries, seconds=_SECONDS)
        def renew_from_a_thread(self, delivery: _Delivery, seconds: float) -> None:
            ours = delivery.known.state == "leased" and delivery.known.delivery == delivery.number
            receipt = delivery.message.receipt
            assert list(receipt.renewer.renew([receipt], seconds)) == [ours]
            if ours:
                delivery.known.until = self.now + seconds

        @rule(delivery=consumes(deliveries))
        def crash(self, delivery: _Delivery) -> None:
            """Forget a delivery, as a killed worker does: the message returns when its lease ends."""

        @rule(delivery=deliveries)
        def dead_letter(self, delivery: _Delivery) -> None:
            if self.settle(delivery, delivery.message.dead_letter("no use")):
                delivery.known.state = "dead"

        @precondition(lambda self: any(known.state == "dead" for known in self.known.values()))
        @rule(retry=st.booleans())
        def empty_the_dead_letters(self, retry: bool) -> None:
            letters = self.world.run(self.mailbox.dead_letters.page())
            ids = [letter.id for letter in letters]
            box = self.mailbox.dead_letters
            assert self.world.run(box.retry(*ids) if retry else box.drop(*ids)) == len(ids)
            for letter in letters:
                known = self.known[letter.message_id]
                known.state = "waiting" if retry else "gone"
                known.deliveries = 0

        @rule(seconds=_JUMPS)
        def time_passes(self, seconds: float) -> None:
            if self.now + seconds < self.horizon:
                self.advance(seconds)

        @invariant()
        def every_message_is_where_the_model_says(self) -> None:
            depth = self.world.run(self.mailbox.depth())
            states = [known.state for known in self.known.values()]
            assert depth.waiting == states.count("waiting")
            assert depth.delayed == states.count("delayed")
            assert depth.in_flight == states.count("leased")
            assert depth.dead == states.count("dead")

    return MailboxMachine
