"""Clients and workers of two versions side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Sample, TrialKey
from fairtrial.errors import NewerFormatError
from fairtrial.fleet.message_fields import VERSION
from fairtrial.fleet.messages import EvalReply, EvalRequest, MainLoopRequest, MainLoopResult
from fairtrial.mailbox import InMemoryMailbox, Mailbox, PostgresMailbox, RedisMailbox
from fairtrial.testing import FakeClock
from tests.fleet.test_wire import MAIN_REQUEST, MAIN_RESULT, REPLY, REQUEST

FIRST: dict[str, list[str]] = json.loads(Path(__file__).with_name("first_messages.json").read_text())
KINDS = {kind.__name__: kind for kind in (EvalRequest, EvalReply, MainLoopRequest, MainLoopResult)}
BODIES = (REQUEST, REPLY, MAIN_REQUEST, MAIN_RESULT)


def changed(body: Any, **fields: Any) -> bytes:
    return json.dumps(json.loads(body.to_wire()) | fields).encode()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_fields_of_a_newer_version_are_ignored(body: Any) -> None:
    assert type(body).from_wire(changed(body, something_new={"a": [1]})) == body


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_newer_format_is_distinguished_from_damage(kind: Any) -> None:
    with pytest.raises(NewerFormatError, match=f"has format {VERSION + 1}, this version reads up to {VERSION}"):
        kind.from_wire(json.dumps({"v": VERSION + 1}).encode())


@pytest.mark.parametrize("name", KINDS)
def test_messages_of_the_first_format_are_read(name: str) -> None:
    for text in FIRST[name]:
        assert KINDS[name].from_wire(text.encode()).to_wire() == text.encode()  # Older readers understand it, too.


def test_what_the_first_messages_say_is_understood() -> None:
    request = EvalRequest.from_wire(FIRST["EvalRequest"][0].encode())
    assert (request.key.sample_id, request.ordinal, request.attempt) == ("s1", 7, 2)
    reply = EvalReply.from_wire(FIRST["EvalReply"][0].encode())
    assert reply.result.score is not None
    assert (reply.result.score.value, reply.result.score.passed) == (0.75, True)
    failed = EvalReply.from_wire(FIRST["EvalReply"][1].encode())
    assert (failed.result.outcome, failed.result.error) == ("task_error", "RuntimeError: no")


class FromTheFuture:
    """A body that only a newer version can read."""

    def to_wire(self) -> bytes:
        return changed(EvalRequest(TrialKey("run", "baseline", "s1", 0), Sample("s1", "why")), v=VERSION + 1)

    @classmethod
    def from_wire(cls, data: bytes) -> FromTheFuture:
        assert json.loads(data)["v"] == VERSION + 1
        return cls()


async def test_a_message_of_a_newer_format_waits_in_memory_for_a_worker_that_can_read_it() -> None:
    clock = FakeClock()
    old: InMemoryMailbox[Any] = InMemoryMailbox("requests", EvalRequest, clock=clock)
    await old.send(FromTheFuture())  # The memory mailbox keeps what `to_wire` writes.
    for _ in range(3):
        assert await old.receive(wait_time_seconds=0) == []
        clock.advance(6)
    depth = await old.depth()
    assert (depth.delayed + depth.waiting, depth.dead) == (1, 0)


@pytest.mark.parametrize("kind", [RedisMailbox, PostgresMailbox])
async def test_a_message_of_a_newer_format_waits_on_a_server_for_a_worker_that_can_read_it(
    kind: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairtrial.mailbox.receive.NEWER_FORMAT_DELAY", 0.05)
    url = request.getfixturevalue("redis_url" if kind is RedisMailbox else "mailbox_database")
    old: Mailbox[Any] = kind("versions", EvalRequest, url)
    new: Mailbox[Any] = kind("versions", FromTheFuture, url)
    async with old, new:
        await new.send(FromTheFuture())
        for _ in range(3):
            assert await old.receive(wait_time_seconds=0.2) == []
        assert (await old.depth()).dead == 0
        messages = await new.receive(wait_time_seconds=5)
        assert [message.delivery_count for message in messages] == [1]
        await messages[0].acknowledge()
