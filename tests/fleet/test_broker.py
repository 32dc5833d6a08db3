"""The mailboxes of suites and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairtrial import ConfigurationError, Dataset, EvalResult, EvalSuite, Sample, TrialKey, exact_match
from fairtrial.errors import MailboxConnectionError, ReplyNotAvailableError
from fairtrial.fleet import Broker, EvalReply, MemoryBroker, RedisBroker, connect_broker
from fairtrial.fleet.queues import requests_name, results_name
from fairtrial.mailbox.body import ClaimCheck
from fairtrial.mailbox.protocol import validate_name
from tests.fleet.fake_worker import FakeWorker, answer
from tests.redis_server import RedisServer, free_port


def test_names_are_readable_where_they_can_be_and_never_the_same_for_two_suites() -> None:
    assert requests_name("support") == "support.requests"
    assert results_name("support", "0a1b") == "support.results.0a1b"
    awkward = ["Größe", "a b", "a-b", "a.b", "", "..", "x" * 300, "x" * 301, "-a", "\ud800"]
    names = {requests_name(name) for name in awkward} | {results_name(name, name) for name in awkward}
    assert len(names) == 2 * len(awkward)
    assert all(validate_name(name) for name in names)


async def test_a_client_that_is_killed_leaves_no_mailbox_behind_forever(
    redis_url: str, redis_server: RedisServer
) -> None:
    broker: Broker = connect_broker(redis_url)
    results = await broker.results("suite", "run")
    await results.send(EvalReply(EvalResult(key=TrialKey("run", "baseline", "s"), ordinal=0, outcome="timeout")))
    with redis_server.client() as raw:
        keys = [key.decode() for key in raw.keys("*results*")]
        assert any(key.endswith(":stream") for key in keys)
        assert all(0 < raw.ttl(key) <= 30 * 24 * 3600 for key in keys)
    await broker.close()


async def test_a_run_on_redis_leaves_no_mailbox_behind_that_stays(redis_url: str, redis_server: RedisServer) -> None:
    broker: Broker = connect_broker(redis_url)
    data = Dataset([Sample(f"s{i}", i, i) for i in range(50)])
    suite = EvalSuite("two words", data, str, exact_match)
    async with FakeWorker(broker, "two words").at_work():
        report = await suite.run(store="memory:", mailbox=redis_url)
    assert (report.status, report.total) == ("finished", 50)
    with redis_server.client() as raw:
        keys = [key.decode() for key in raw.keys("*results*")]
        assert keys
        assert all(0 < raw.ttl(key) <= 3600 for key in keys)
    results = await broker.results("two words", report.run_id)  # The run goes on.
    with redis_server.client() as raw:
        assert all(3600 < raw.ttl(key) <= 30 * 24 * 3600 for key in keys if key.endswith(":stream"))
    await broker.leave(results)
    await broker.close()


@pytest.mark.parametrize("said", ["in code", "in the environment"])
async def test_large_bodies_are_stored_outside_the_mailbox(
    redis_url: str, tmp_path: Path, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said == "in code":
        broker: Broker = RedisBroker(redis_url, claim_check=ClaimCheck(tmp_path))
    else:
        monkeypatch.setenv("FAIRTRIAL_CLAIM_CHECK", str(tmp_path))
        broker = connect_broker(redis_url)
    assert redis_url.rpartition("/")[0].removeprefix("redis://") in repr(broker)
    data = Dataset([Sample("large", "x" * 3_000_000, "x")])
    async with FakeWorker(broker, "large", lambda request: answer(request, output="y" * 2_000_000)).at_work():
        report = await EvalSuite("large", data, str, exact_match).run(store="memory:", mailbox=broker)
    assert len(report.results[0].output) == 2_000_000
    await broker.close()


async def test_an_unreachable_server_is_reported_and_the_run_can_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fairtrial import open_store
    from fairtrial.fleet.client import dispatch

    whole = dispatch.DispatchConfig
    monkeypatch.setattr(dispatch, "DispatchConfig", lambda: whole(open_seconds=0.1))
    store = open_store("memory:")
    suite = EvalSuite("away", Dataset([Sample("a", "a", "a")]), str, exact_match)
    with pytest.raises(MailboxConnectionError):
        await suite.run(store=store, mailbox=f"redis://127.0.0.1:{free_port()}")
    assert [run.status for run in store.runs()] == ["interrupted"]


async def test_mailboxes_in_memory_are_shared_by_name() -> None:
    broker = MemoryBroker()
    results = await broker.results("s", "r")
    assert broker.resolve("s.results.r") is results
    await broker.leave(results)
    assert await broker.results("s", "r") is results
    await broker.retire(results)
    with pytest.raises(ReplyNotAvailableError):
        broker.resolve("s.results.r")
    requests = await broker.requests("s")
    await broker.close()
    with pytest.raises(Exception, match="closed"):
        await requests.approximate_count()


@pytest.mark.parametrize("url", ["memory:", "amqp://user:secret@host", "host:6379", ""])
def test_other_addresses_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(ConfigurationError, match="must start with redis://") as caught:
        connect_broker(url)
    assert "secret" not in str(caught.value)
