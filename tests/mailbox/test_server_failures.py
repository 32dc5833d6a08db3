"""Workers, servers and event loops that are lost, on mailboxes of Redis and PostgreSQL alike."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from typing import Any

import anyio
import pytest

from fairtrial.errors import MailboxConnectionError, MailboxError
from fairtrial.mailbox import PostgresMailbox, RedisMailbox
from tests.servers import free_port

KINDS: dict[str, tuple[Any, str]] = {
    "redis": (RedisMailbox, "redis_url"),
    "postgresql": (PostgresMailbox, "mailbox_database"),
}
WORKER = """
import asyncio, sys
from fairtrial import mailbox
async def main():
    async with getattr(mailbox, sys.argv[1])(sys.argv[3], int, sys.argv[2]) as box:
        messages = await box.receive(int(sys.argv[4]), 1.0, 20)
        print(len(messages), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A kind of mailbox, and the address of its server."""
    made, fixture = KINDS[request.param]
    return made, str(request.getfixturevalue(fixture))


@pytest.mark.proves("R61")
@pytest.mark.parametrize("taken", [30, 12])
async def test_a_worker_killed_with_its_messages_loses_none_of_them(kind: tuple[Any, str], taken: int) -> None:
    (made, url), name = kind, f"kill-{uuid.uuid4().hex}"
    options = {"sweep_seconds": 0.05} if made is RedisMailbox else {}
    async with made(name, int, url, **options) as mailbox:
        await asyncio.gather(*(mailbox.send(number) for number in range(30)))
        command = [sys.executable, "-c", WORKER, made.__name__, url, name, str(taken)]
        async with await anyio.open_process(command) as worker:
            try:
                assert worker.stdout is not None
                assert int(await worker.stdout.receive()) == taken
            finally:
                os.kill(worker.pid, signal.SIGKILL)
        seen: dict[int, tuple[int, int]] = {}
        with anyio.fail_after(20):
            while len(seen) < 30:
                for message in await mailbox.receive(30, 60, 5):
                    assert message.body not in seen
                    seen[message.body] = (message.delivery_count, message.expiries)
                    await message.acknowledge()
        assert sorted(seen.values()) == [(1, 0)] * (30 - taken) + [(2, 1)] * taken
        assert await mailbox.approximate_count() == 0


@pytest.mark.parametrize("scheme", KINDS)
async def test_an_unreachable_server_is_a_connection_error_without_the_password(scheme: str) -> None:
    mailbox = KINDS[scheme][0]("nobody", int, f"{scheme}://me:very-secret@127.0.0.1:{free_port()}/0")
    for method, args in ((mailbox.receive, (1, 60, 0)), (mailbox.send, (1,))):
        with pytest.raises(MailboxConnectionError) as caught:
            await method(*args)
        assert "very-secret" not in f"{caught.value} {mailbox!r} {mailbox.connection!r}"
    await mailbox.close()


def test_use_in_another_event_loop_is_refused_with_a_message(kind: tuple[Any, str]) -> None:
    made, url = kind
    mailbox = made("loops", int, url)

    async def use() -> None:
        await mailbox.send(1)

    with asyncio.Runner() as first:
        first.run(use())
        with asyncio.Runner() as second, pytest.raises(MailboxError, match="event loop"):
            second.run(use())
        first.run(mailbox.close())
