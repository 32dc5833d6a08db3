"""Session stores: sessions that are kept apart from their messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import func, select

from fairtrial import Session, ToolInvoked, TrialContext, exact_match, open_store, tool_called
from fairtrial.data.session import restore_session
from fairtrial.errors import ConfigurationError, MailboxConnectionError, SessionError
from fairtrial.fleet import (
    EvalLoop,
    EvalLoopConfig,
    FolderSessionStore,
    InMemorySessionStore,
    MainLoop,
    MainLoopConfig,
    MainLoopRequest,
    MainLoopResult,
    RedisSessionStore,
    SessionStore,
    StoreSessionStore,
)
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, RedisConnection
from fairtrial.store.schema import session_snapshots
from tests.fleet.build import QUICK, request, sent, serving, take, two_hops, until


async def look_up(input: str, ctx: TrialContext) -> str:
    ctx.session.record(ToolInvoked("look"))
    return input


def rows_of(store: Any) -> int:
    """How many sessions are in a run store."""
    with store._read() as connection:
        return int(connection.execute(select(func.count()).select_from(session_snapshots)).scalar_one())


class TestSessionStores:
    @pytest.mark.proves("R74")
    async def test_every_store_keeps_what_it_is_given_by_id(
        self, redis_url: str, database: str, tmp_path: Path
    ) -> None:
        session = Session()
        session.record(ToolInvoked("search", {"q": "a" * 300}))
        async with RedisConnection(redis_url) as connection:
            stores: list[SessionStore] = [
                StoreSessionStore(open_store(database)),
                InMemorySessionStore(),
                FolderSessionStore(tmp_path / "deep" / "sessions"),
                RedisSessionStore(connection, ttl_seconds=5),
            ]
            for store in stores:
                await store.save("abc", b"one")
                await store.save("abc", b"two\0\xff")
                assert await store.load("abc") == b"two\0\xff"
                await store.save("abc", session)
                assert restore_session(await store.load("abc"))[ToolInvoked].all() == session[ToolInvoked].all()
                await store.delete("abc")
                await store.delete("abc")
                with pytest.raises(SessionError, match="no session abc"):
                    await store.load("abc")
                for wrong in ("../../etc/passwd", "", "a" * 200, "a/b", ".hidden", "a\0"):
                    with pytest.raises(SessionError, match="invalid session id"):
                        await store.load(wrong)
            assert int(await connection.command("DBSIZE")) == 0
        assert (tmp_path / "deep" / "sessions").stat().st_mode & 0o777 == 0o700

    async def test_sessions_that_nobody_deleted_are_deleted_by_age(self, database: str, tmp_path: Path) -> None:
        folder = FolderSessionStore(tmp_path / "sessions", ttl_seconds=0.2)
        stores: list[SessionStore] = [
            InMemorySessionStore(ttl_seconds=0.2),
            StoreSessionStore(open_store(database), ttl_seconds=0.2),
            folder,
        ]
        for store in stores:
            await store.save("abandoned", b"1")
        (folder.root / "half.json.123.abc").write_bytes(b"{")
        await anyio.sleep(0.3)
        for store in stores:
            await store.save("later", b"2")
            assert await store.load("later") == b"2"
            with pytest.raises(SessionError, match="no session abandoned"):
                await store.load("abandoned")
        assert [path.name for path in folder.root.iterdir()] == ["later.json"]

    def test_settings_that_cannot_work_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="ttl_seconds must be more than 0"):
            FolderSessionStore(tmp_path, ttl_seconds=0)
        with pytest.raises(ConfigurationError, match="SQLite or PostgreSQL"):
            StoreSessionStore(open_store("memory:"))

    @pytest.mark.proves("R133")
    async def test_sessions_are_sent_through_the_run_store_and_deleted(self, database: str) -> None:
        store = open_store(database)
        options = {"evaluator": tool_called("look"), "sessions": StoreSessionStore(store)}
        served = {"sessions": StoreSessionStore(open_store(database))}
        _, _, found = await two_hops(look_up, *map(request, range(20)), served=served, **options)
        assert [result.passed for result in found] == [True] * 20
        assert rows_of(store) == 0

    @pytest.mark.proves("R133")
    async def test_secrets_in_sessions_do_not_reach_the_database(self, tmp_path: Path) -> None:
        session = Session()
        session.record(ToolInvoked("login", {"key": "sk-proj-" + "a1B2c3D4" * 6}))
        await StoreSessionStore(open_store(tmp_path / "runs.db")).save("abc", session)
        snapshot = await StoreSessionStore(open_store(tmp_path / "runs.db")).load("abc")
        assert b"a1B2c3D4" not in snapshot
        assert restore_session(snapshot)[ToolInvoked].all()[0].name == "login"

    async def test_sessions_are_deleted_once_their_trial_is_scored_or_nobody_waits_for_it(self, tmp_path: Path) -> None:
        store = FolderSessionStore(tmp_path)
        slow = 0

        async def late_at_first(input: str, ctx: TrialContext) -> str:
            nonlocal slow
            ctx.session.record(ToolInvoked("look"))
            if input == "late" and not slow:
                slow += 1
                await asyncio.sleep(0.9)
            return input

        words = ["late" if number == 7 else "q" for number in range(30)]
        requests, results = await sent(*(request(number, word, word) for number, word in enumerate(words)))
        main = InMemoryMailbox("main", MainLoopRequest)
        config = EvalLoopConfig(concurrency=30, mainloop_timeout=0.6, dlq=QUICK)
        loop = EvalLoop(
            requests=requests,
            evaluator=exact_match,
            mainloop_requests=main,
            results=results,
            sessions=store,
            config=config,
        )
        async with serving(loop):
            served = MainLoop(late_at_first, requests=main, sessions=store, config=MainLoopConfig(concurrency=30))
            async with serving(served):
                found = await take(results, 30)
                assert all(result.passed for result in found)
                await until(lambda: served.counters.finished > 30 and not list(tmp_path.iterdir()))

    @pytest.mark.parametrize("gone", ["receiver", "room"])
    async def test_a_session_is_deleted_if_its_answer_cannot_be_sent(self, gone: str) -> None:
        main = InMemoryMailbox("main", MainLoopRequest, max_body_bytes=2000)
        replies = InMemoryMailbox("replies", MainLoopResult, max_body_bytes=2000)
        store = InMemorySessionStore()

        async def work(input: str, ctx: TrialContext) -> str:
            ctx.session.record(ToolInvoked("look"))
            return "x" * 10_000

        await main.send(MainLoopRequest("q"), reply_to="nowhere" if gone == "receiver" else replies)
        await MainLoop(work, requests=main, sessions=store).run(until_empty=True)
        assert not store._sessions
        if gone == "room":
            (message,) = await replies.receive(wait_time_seconds=5)
            assert "cannot be sent" in str(message.body.error)

    async def test_an_unavailable_redis_raises_a_mailbox_error_until_it_is_back(self) -> None:
        async with RedisConnection("redis://127.0.0.1:1") as connection:
            with pytest.raises(MailboxConnectionError):
                await RedisSessionStore(connection).load("abc")
            with pytest.raises(ConfigurationError):
                RedisSessionStore(connection, ttl_seconds=0)

    async def test_a_session_in_a_store_the_worker_does_not_have_is_the_trials_error(self) -> None:
        _, _, (result,) = await two_hops(look_up, request(), served={"sessions": InMemorySessionStore()})
        assert "sessions=" in str(result.error)

    async def test_a_session_store_that_is_away_for_a_moment_costs_no_trial(self) -> None:
        class Away(InMemorySessionStore):
            failures = 2

            async def load(self, session_id: str) -> bytes:
                if self.failures:
                    self.failures -= 1
                    raise MailboxConnectionError("away")
                return await super().load(session_id)

        store = Away()
        config = EvalLoopConfig(dlq=DLQPolicy(base_seconds=0.01, max_seconds=0.01))
        with anyio.fail_after(20):
            served = {"sessions": store}
            _, _, (result,) = await two_hops(look_up, request(), served=served, sessions=store, config=config)
        assert result.passed
