"""The second specification, block by block, as far as no loops are concerned.

The blocks about loops and leases (43, 44 and 48) are tested with the fleet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from fairtrial import ConfigurationError, Dataset, Session, ToolInvoked, tool_called
from fairtrial.data.session import restore_session
from fairtrial.errors import SessionError
from fairtrial.fleet import FolderSessionStore, MainLoopResult
from fairtrial.mailbox import CompositeResolver, RedisConnection, RedisMailbox, RedisMailboxFactory
from fairtrial.scoring import SessionEvaluator
from fairtrial.sync import SessionStore
from tests.redis_server import RedisServer


def test_block_42_a_jsonl_file_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"id": "1", "input": "What is 3+4?", "expected": "7"}\n')
    assert Dataset.load(path, str, str)[0].expected == "7"


@pytest.mark.proves("R154")
async def test_block_45_mailboxes_and_factories_take_a_client_of_redis_and_a_reply_resolver(
    redis_server: RedisServer,
) -> None:
    with redis_server.client() as client:
        factory = RedisMailboxFactory(client=client, body_type=MainLoopResult)
        resolver = CompositeResolver(registry={}, factory=factory)
        replies: RedisMailbox[MainLoopResult[str]] = RedisMailbox(
            name="replies", body_type=MainLoopResult, client=client
        )
        requests: RedisMailbox[Any] = RedisMailbox(name="mainloop-requests", client=client, reply_resolver=resolver)
        async with replies, requests:
            await replies.receive(wait_time_seconds=0)  # It exists once its owner has looked.
            await requests.send({"input": "3+4"}, reply_to="replies")
            (message,) = await requests.receive(wait_time_seconds=5)
            assert message.body == {"input": "3+4"}
            await message.reply(MainLoopResult(request_id="r", output="7"))
            await message.acknowledge()
            (answer,) = await replies.receive(wait_time_seconds=5)
            assert answer.body.output == "7"
            await answer.acknowledge()
        await factory.close()


def test_block_45_a_clients_address_credentials_and_tls_are_taken_over(tmp_path: Path) -> None:
    def shown(client: Any) -> str:
        return RedisConnection.of(client)._url

    assert shown(redis.Redis(host="queue.test", port=7000, db=3)) == "redis://queue.test:7000/3"
    assert shown(redis.Redis(host="::1", username="me", password="a/b@c")) == "redis://me:a%2Fb%40c@[::1]:6379/0"
    assert shown(redis.asyncio.Redis(host="queue.test", ssl=True)) == "rediss://queue.test:6379/0"
    assert shown(redis.Redis(unix_socket_path="/run/redis.sock")) == "unix:///run/redis.sock?db=0"
    tls = RedisConnection.of(redis.Redis(host="queue.test", ssl=True, ssl_ca_certs=str(tmp_path / "ca.pem")))
    assert tls._options["ssl_ca_certs"] == str(tmp_path / "ca.pem")


def test_block_45_a_mailbox_needs_one_way_to_redis() -> None:
    with pytest.raises(ConfigurationError, match="requires a connection"):
        RedisMailbox(name="requests")
    with pytest.raises(ConfigurationError, match="a client of redis-py"):
        RedisMailbox(name="requests", client=object())  # type: ignore[arg-type]


@pytest.mark.proves("R65", "R73")
def test_block_46_a_result_of_a_main_loop_carries_the_snapshot_of_its_session() -> None:
    session = Session()
    session.record(ToolInvoked("search"))
    result = MainLoopResult[str](request_id="r", output="7", session_snapshot=session.snapshot())
    travelled = MainLoopResult.from_wire(result.to_wire())
    assert travelled.session_snapshot is not None
    assert restore_session(travelled.session_snapshot)[ToolInvoked].all() == (ToolInvoked("search"),)


@pytest.mark.proves("R65")
def test_block_47_a_session_is_saved_by_one_side_and_loaded_for_an_evaluator_by_the_other(tmp_path: Path) -> None:
    evaluator: SessionEvaluator[str, str] = tool_called("search")
    session_store = SessionStore(FolderSessionStore(tmp_path))
    session = Session()
    session.record(ToolInvoked("search"))
    session_store.save("s1", session)
    result = MainLoopResult[str](request_id="r", output="7", session_id="s1")

    session_store = SessionStore(FolderSessionStore(tmp_path))
    assert result.session_id is not None
    loaded = session_store.load(result.session_id)
    assert evaluator(result.output, "7", loaded).passed
    session_store.delete("s1")
    with pytest.raises(SessionError, match="no session s1"):
        session_store.load("s1")
