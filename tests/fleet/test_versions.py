"""Clients and workers of two versions side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fairtrial import Sample, TrialKey
from fairtrial.errors import NewerFormatError
from fairtrial.fleet.message_fields import VERSION
from fairtrial.fleet.messages import EvalReply, EvalRequest, MainLoopRequest, MainLoopResult
from fairtrial.mailbox import InMemoryMailbox, Mailbox, PostgresMailbox, RedisMailbox
from fairtrial.testing import FakeClock
from tests.fleet.test_wire import MAIN_REQUEST, MAIN_RESULT, REPLY, REQUEST

BODIES = (REQUEST, REPLY, MAIN_REQUEST, MAIN_RESULT)


def changed(body: Any, **fields: Any) -> bytes:
    return json.dumps(json.loads(body.to_wire()) | fields).encode()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_fields_of_a_newer_version_are_ignored(body: Any) -> None:
    assert type(body).from_wire(changed(body, something_new={"a": [1]})) == body


@pytest.mark.parametrize("kind", [EvalRequest, EvalReply, MainLoopRequest, MainLoopResult])
def test_a_newer_format_is_distinguished_from_damage(kind: Any) -> None:
    with pytest.raises(NewerFormatError, match=f"has format {VERSION + 1}, this version reads up to {VERSION}"):
        kind.from_wire(json.dumps({"v": VERSION + 1}).encode())


class FromTheFuture:
    """A body that only a newer version can read."""

    def to_wire(self) -> bytes:
        return changed(EvalRequest(TrialKey("run", "baseline", "s1", 0), Sample("s1", "why")), v=VERSION + 1)

    @classmethod
    def from_wire(cls, data: bytes) -> FromTheFuture:
        assert json.loads(data)["v"] == VERSION + 1
        return cls()


@pytest.mark.anyio
async def test_a_message_of_a_newer_format_waits_in_memory_for_a_worker_that_can_read_it() -> None:
    clock = FakeClock()
    old: InMemoryMailbox[Any] = InMemoryMailbox("requests", EvalRequest, clock=clock)
    await old.send(FromTheFuture())  # The memory mailbox keeps what `to_wire` writes.
    for _ in range(3):
        assert await old.receive(wait_time_seconds=0) == []
        clock.advance(6)
    depth = await old.depth()
    assert (depth.delayed + depth.waiting, depth.dead) == (1, 0)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [RedisMailbox, PostgresMailbox])
async def test_a_message_of_a_newer_format_waits_on_a_server_for_a_worker_that_can_read_it(
    kind: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairtrial.mailbox.server.NEWER_FORMAT_DELAY", 0.05)
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
