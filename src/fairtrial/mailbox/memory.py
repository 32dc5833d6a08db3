"""A mailbox in memory, for tests and single-process fleets."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self

from typing_extensions import TypeVar

from fairtrial import errors
from fairtrial.base.backoff import SYSTEM_CLOCK, Clock
from fairtrial.base.codec import dumps
from fairtrial.base.offload import require_asyncio
from fairtrial.mailbox import protocol
from fairtrial.mailbox.body import NEWER_FORMAT_DELAY, check_body_type, decode_body, encode_body

MAX_BODY_BYTES = 1024 * 1024


class _Item:
    """One message in any state."""

    __slots__ = ("body", "deliveries", "expiries", "id", "lease", "reply_to", "route", "until")

    def __init__(self, id: str, body: Any, reply_to: str | None, route: protocol.Mailbox[Any] | None) -> None:
        self.id = id
        self.body = body
        self.reply_to = reply_to
        self.route = route
        self.deliveries = 0
        self.expiries = 0
        self.lease = 0  # The number of the delivery that has leased it; 0 if none.
        self.until = 0.0


class _Receipt[T]:
    """One delivery of one message, with a unique number, so that an old delivery never settles a new one."""

    __slots__ = ("item", "lease", "mailbox")

    def __init__(self, mailbox: InMemoryMailbox[T], item: _Item, lease: int) -> None:
        self.mailbox = mailbox
        self.item = item
        self.lease = lease

    @property
    def renewer(self) -> InMemoryMailbox[T]:
        return self.mailbox

    async def acknowledge(self) -> None:
        self.mailbox._settle(self)

    async def nack(self, delay: float, *, counted: bool) -> None:
        self.mailbox._give_back(self, delay, counted)

    async def extend(self, seconds: float) -> None:
        if not self.mailbox.renew([self], seconds)[0]:
            raise _lost(self.item.id)

    async def dead_letter(self, reason: str, error: str) -> None:
        self.mailbox._dead_letter(self, reason, error)

    async def reply(self, address: str | None, body: Any) -> str:
        return await self.mailbox._reply(self.item, address, body)


def _lost(id: str) -> errors.LeaseLostError:
    return errors.LeaseLostError(f"the lease of message {id} was lost: it expired, or the message was settled before")


T = TypeVar("T", default=Any)  # A mailbox without a body type accepts any body.


class InMemoryMailbox(Generic[T]):
    """A mailbox in this process's memory. Works under asyncio and trio; one event loop at a time.

    Args:
        name: Its reply address.
        body_type: If given, bodies are serialized by the codec as for a server: bodies that cannot be serialized are
            refused, and the receiver gets a copy. Without it the receiver gets the object that was sent.
        reply_resolver: Finds the mailbox for a reply address given by name.
        clock: The clock for leases and delays.
        max_body_bytes: The size limit of serialized bodies.
    """

    def __init__(
        self,
        name: str = "memory",
        body_type: type[T] | None = None,
        *,
        reply_resolver: protocol.MailboxResolver | None = None,
        clock: Clock = SYSTEM_CLOCK,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.name = protocol.validate_name(name)
        self.dead_letters = _DeadLetters(self)
        self._kind = body_type
        self._resolver = reply_resolver
        self._clock = clock
        self._limit = max_body_bytes
        self._ids = itertools.count(1)
        self._leases = itertools.count(1)
        self._waiting: deque[_Item] = deque()
        self._delayed: list[tuple[float, int, _Item]] = []
        self._leased: dict[str, _Item] = {}
        self._expiry: list[tuple[float, int, _Item]] = []  # Lazy: entries that are no longer valid are skipped.
        self._dead: dict[str, tuple[protocol.DeadLetter, _Item]] = {}
        self._workers: dict[str, tuple[str, float]] = {}  # By id: fingerprint, and when the announcement expires.
        self._changed: asyncio.Event | None = None
        self._closed = False
        self._lock = threading.Lock()  # Leases are renewed from a thread; everything else runs on the event loop.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"InMemoryMailbox({self.name!r})"

    async def send(self, body: T, *, reply_to: str | protocol.Mailbox[Any] | None = None) -> str:
        """Send a message; returns its id."""
        self._check_open()
        address = reply_to if isinstance(reply_to, str) or reply_to is None else reply_to.name
        route = None if isinstance(reply_to, str) else reply_to
        wire: Any = body
        if self._kind is not None:
            try:
                wire = encode_body(body)
            except errors.CodecError as error:
                raise errors.BodyError(f"the body cannot be sent to {self.name}: {error}") from None
            if len(wire) > self._limit:
                limit = f"must have at most {self._limit} bytes (got {len(wire)})"
                raise errors.MessageTooLargeError(f"{self.name}: the body {limit}")
        item = _Item(f"{self.name}-{next(self._ids)}", wire, address, route)
        with self._lock:
            self._waiting.append(item)
        self._wake()
        return item.id

    async def receive(
        self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
    ) -> Sequence[protocol.Message[T]]:
        """Receive up to `max_messages`; see `Mailbox.receive`."""
        self._check_open()
        protocol.validate_receive(max_messages, visibility_timeout, wait_time_seconds)
        require_asyncio("a mailbox", "use it in a program that runs under it")
        await asyncio.sleep(0)
        # Two deadlines, because the injected clock may stand still or jump while the event loop's clock advances.
        clock_end = self._clock.monotonic() + wait_time_seconds
        loop_time = asyncio.get_running_loop().time
        loop_end = loop_time() + wait_time_seconds
        while True:
            self._check_open()
            if messages := self._take(max_messages, visibility_timeout):
                return messages
            now = self._clock.monotonic()
            left = min(clock_end - now, loop_end - loop_time())
            if left <= 0:
                return []
            if self._changed is None:
                self._changed = asyncio.Event()
            try:
                async with asyncio.timeout(max(0.0, min(left, self._next_due() - now))):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def approximate_count(self) -> int:
        """Return the number of messages that have not been settled."""
        self._check_open()
        with self._lock:
            return len(self._waiting) + len(self._delayed) + len(self._leased)

    async def depth(self) -> protocol.MailboxDepth:
        """Return the number of messages by state."""
        self._check_open()
        with self._lock:
            self._collect()
            return protocol.MailboxDepth(len(self._waiting), len(self._delayed), len(self._leased), len(self._dead))

    async def asked_from(self, address: str) -> bool:
        """Return whether a message that has not been settled has this reply address."""
        self._check_open()
        with self._lock:
            delayed = (item for _, _, item in self._delayed)
            items = itertools.chain(self._waiting, self._leased.values(), delayed)
            return any(item.reply_to == address for item in items)

    async def announce(self, worker: str, fingerprint: str, seconds: float) -> None:
        """Announce for this many seconds that a worker with this fingerprint serves the mailbox; 0 withdraws it."""
        self._workers[worker] = (fingerprint, self._clock.monotonic() + seconds)

    async def announced(self) -> Sequence[str]:
        """Return the fingerprint of each worker of this mailbox; empty if it accepts any code."""
        now = self._clock.monotonic()
        self._workers = {worker: known for worker, known in self._workers.items() if known[1] > now}
        return [fingerprint for fingerprint, _ in self._workers.values()]

    async def purge(self) -> int:
        """Remove everything except the dead letters; returns the number of messages."""
        self._check_open()
        with self._lock:
            removed = len(self._waiting) + len(self._delayed) + len(self._leased)
            for item in self._leased.values():
                item.lease = 0
            for holder in (self._waiting, self._delayed, self._leased, self._expiry):
                holder.clear()
        return removed

    async def close(self) -> None:
        """End every wait and discard all messages."""
        self._closed = True
        self._wake()

    def bind_body_type(self, kind: type[Any]) -> None:
        """Check that the body type, if any, is `kind`; without one, bodies are passed by reference."""
        if self._kind is not None:
            check_body_type(self.name, self._kind, kind)

    def for_replies[R](self, name: str, body_type: type[R], ttl_seconds: float) -> InMemoryMailbox[R]:
        """Create a mailbox for replies to messages of this one, with the same kind of serialization."""
        return InMemoryMailbox(
            name, None if self._kind is None else body_type, clock=self._clock, max_body_bytes=self._limit
        )

    def renew(self, receipts: Sequence[_Receipt[T]], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; may be called from any thread."""
        with self._lock:
            self._collect()
            kept = [self._holds(receipt) for receipt in receipts]
            until = self._clock.monotonic() + seconds
            for receipt, ours in zip(receipts, kept, strict=True):
                if ours:
                    self._lease(receipt.item, receipt.lease, until)
        return kept

    def _check_open(self) -> None:
        if self._closed:
            raise errors.MailboxClosedError(f"mailbox {self.name} is closed")

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _take(self, count: int, seconds: float) -> list[protocol.Message[T]]:
        messages: list[protocol.Message[T]] = []
        with self._lock:
            self._collect()
            until = self._clock.monotonic() + seconds
            while self._waiting and len(messages) < count:
                item = self._waiting.popleft()
                try:
                    body = item.body if self._kind is None else decode_body(self._kind, item.body)
                except errors.NewerFormatError:
                    heapq.heappush(
                        self._delayed, (self._clock.monotonic() + NEWER_FORMAT_DELAY, next(self._leases), item)
                    )
                    continue
                except errors.CodecError as error:
                    item.deliveries += 1
                    self._add_dead_letter(item, f"the body cannot be read: {error}", "BodyError")
                    continue
                item.deliveries += 1
                lease = next(self._leases)
                self._leased[item.id] = item
                self._lease(item, lease, until)
                messages.append(
                    protocol.Message(
                        item.id,
                        body,
                        _Receipt(self, item, lease),
                        delivery_count=item.deliveries,
                        expiries=item.expiries,
                        reply_to=item.reply_to,
                    )
                )
        return messages

    def _lease(self, item: _Item, lease: int, until: float) -> None:
        item.lease = lease
        item.until = until
        heapq.heappush(self._expiry, (until, lease, item))
        if len(self._expiry) > 2 * len(self._leased) + 64:  # Mostly settled by now: release their bodies.
            self._expiry = [(held.until, held.lease, held) for held in self._leased.values()]
            heapq.heapify(self._expiry)

    def _collect(self) -> None:
        """Return due messages to the queue: delays that have passed, leases that have expired."""
        now = self._clock.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            self._waiting.append(heapq.heappop(self._delayed)[2])
        while self._expiry and self._expiry[0][0] <= now:
            until, lease, item = heapq.heappop(self._expiry)
            if item.lease == lease and item.until == until:
                del self._leased[item.id]
                item.lease = 0
                item.expiries += 1
                self._waiting.append(item)

    def _next_due(self) -> float:
        with self._lock:
            return min(
                self._delayed[0][0] if self._delayed else float("inf"),
                self._expiry[0][0] if self._expiry else float("inf"),
            )

    def _holds(self, receipt: _Receipt[T]) -> bool:
        return receipt.item.lease == receipt.lease

    def _settle(self, receipt: _Receipt[T], then: Callable[[_Item], None] = lambda item: None) -> None:
        self._check_open()
        with self._lock:
            # An expired lease stays valid until the next receive: refusing it would only repeat finished work.
            if not self._holds(receipt):
                raise _lost(receipt.item.id)
            receipt.item.lease = 0
            del self._leased[receipt.item.id]
            then(receipt.item)

    def _give_back(self, receipt: _Receipt[T], delay: float, counted: bool) -> None:
        def back(item: _Item) -> None:
            if not counted:
                item.deliveries -= 1
            if delay > 0:
                heapq.heappush(self._delayed, (self._clock.monotonic() + delay, receipt.lease, item))
            else:
                self._waiting.append(item)

        self._settle(receipt, back)
        self._wake()

    def _dead_letter(self, receipt: _Receipt[T], reason: str, error: str) -> None:
        self._settle(receipt, lambda item: self._add_dead_letter(item, reason, error))

    def _add_dead_letter(self, item: _Item, reason: str, error: str) -> None:
        if isinstance(item.body, bytes):
            text = item.body.decode("utf-8", "replace")
        else:
            try:
                text = dumps(item.body)
            except errors.CodecError:
                text = dumps(repr(item.body))
        id = f"dead-{next(self._ids):012d}"
        letter = protocol.DeadLetter(
            id, item.id, text, item.deliveries, reason, error, item.reply_to, died_at=self._clock.time()
        )
        self._dead[id] = (letter, item)

    async def _reply(self, item: _Item, address: str | None, body: Any) -> str:
        self._check_open()
        if address is None:
            raise errors.ReplyNotAvailableError(f"message {item.id} has no reply address")
        mailbox = item.route
        if mailbox is None:
            if self._resolver is None:
                raise errors.ReplyNotAvailableError(
                    f"no mailbox for the reply address {address!r} of message {item.id}: give {self.name} a resolver"
                )
            mailbox = self._resolver.resolve(address)
        try:
            return await mailbox.send(body)
        except errors.MailboxClosedError as error:
            raise errors.ReplyNotAvailableError(str(error)) from None


class _DeadLetters:
    """The dead letters of one mailbox in memory."""

    def __init__(self, mailbox: InMemoryMailbox[Any]) -> None:
        self._mailbox = mailbox

    async def count(self) -> int:
        return len(self._mailbox._dead)

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[protocol.DeadLetter]:
        letters = (letter for id, (letter, _) in self._mailbox._dead.items() if after is None or id > after)
        return list(itertools.islice(letters, limit))

    async def retry(self, *ids: str) -> int:
        found = [self._mailbox._dead.pop(id)[1] for id in dict.fromkeys(ids) if id in self._mailbox._dead]
        for item in found:
            item.deliveries = 0  # The expired leases still count: it may be a poison message.
            self._mailbox._waiting.append(item)
        if found:
            self._mailbox._wake()
        return len(found)

    async def drop(self, *ids: str) -> int:
        return sum(self._mailbox._dead.pop(id, None) is not None for id in dict.fromkeys(ids))
