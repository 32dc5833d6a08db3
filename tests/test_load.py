"""Many or large inputs at once. Run by scripts/attacks --soak: each takes minutes or gigabytes."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match, open_store
from fairtrial.fleet import LoopGroup, connect_broker
from fairtrial.mailbox import RedisConnection, RedisMailbox
from fairtrial.suites.worker import make_loop
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

OUTPUT = 2_600_000
OUTPUTS = 450
SUITES = 50
READERS = 1000
THREADS = 3000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(20_000, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def numbers(count: int) -> Dataset[int, int]:
    return Dataset([Sample(f"s{number}", number, 2 * number) for number in range(count)], name="numbers")


async def double(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_hundreds_of_outputs_of_megabytes_at_once_are_all_stored(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db" if database == "sqlite" else request.getfixturevalue("pg_url")
    ready = asyncio.Barrier(OUTPUTS)

    async def large(number: int) -> str:
        await ready.wait()
        return f"{number} ".ljust(OUTPUT, "x")

    suite = EvalSuite(
        "large",
        numbers(OUTPUTS),
        large,
        lambda output: len(output) == OUTPUT,
        config=EvalConfig(max_concurrent=OUTPUTS),
    )
    with closing(open_store(url)) as store:
        report = suite.run_sync(store=store)
        assert (report.status, report.total, report.pass_rate_all) == ("finished", OUTPUTS, 1.0)


async def test_fifty_runs_share_one_redis_and_two_groups_of_workers(tmp_path: Path) -> None:
    config = EvalConfig(max_concurrent=10)
    suites = [EvalSuite(f"many{place}", numbers(400), double, exact_match, config=config) for place in range(SUITES)]
    async with AsyncExitStack() as stack:
        redis_url = stack.enter_context(RedisServer(tmp_path / "redis")).url
        store = stack.enter_context(closing(open_store(f"sqlite:///{tmp_path}/runs.db")))
        groups = []
        for _ in range(2):
            broker = connect_broker(redis_url)
            stack.push_async_callback(broker.close)
            groups.append(
                LoopGroup({suite.name: make_loop(suite, await broker.requests(suite.name)) for suite in suites})
            )
        serving = [asyncio.create_task(group.run()) for group in groups]
        reports = await asyncio.gather(*(suite.run(store=store, mailbox=redis_url) for suite in suites))
        for group in groups:
            group.stop()
        await asyncio.gather(*serving)
        assert [(report.status, report.total, report.pass_rate_all) for report in reports] == [
            ("finished", 400, 1.0)
        ] * SUITES


async def test_a_thousand_waiting_readers_leave_redis_idle_and_delivery_quick(
    tmp_path: Path, many_descriptors: None
) -> None:
    delays: list[float] = []

    async def read(connection: RedisConnection) -> None:
        mailbox = RedisMailbox("idle.requests", float, connection)
        while True:
            for message in await mailbox.receive(1, 60, 20):
                delays.append(time.time() - message.body)
                await message.acknowledge()

    with RedisServer(tmp_path, "--maxclients", "10000") as redis:
        connections = [RedisConnection(redis.url) for _ in range(READERS)]
        readers = []
        for connection in connections:
            readers.append(asyncio.create_task(read(connection)))
            await asyncio.sleep(0.003)
        try:
            await asyncio.sleep(5)
            with redis.client() as client:
                before = client.info("cpu")
                await asyncio.sleep(10)
                after = client.info("cpu")
            used = sum(after[name] - before[name] for name in ("used_cpu_sys", "used_cpu_user"))
            assert used / 10 < 0.2
            sender = RedisMailbox("idle.requests", float, connections[0])
            for _ in range(50):
                await sender.send(time.time())
                await asyncio.sleep(0.02)
            async with asyncio.timeout(30):
                while len(delays) < 50:  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.05)
            assert sorted(delays)[25] < 0.5
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            for connection in connections:
                await connection.close()


def test_three_thousand_blocking_tasks_at_once_all_end() -> None:
    def block(number: int) -> int:
        time.sleep(5)
        return 2 * number

    config = EvalConfig(max_concurrent=THREADS, timeout_seconds=120)
    report = EvalSuite("threads", numbers(THREADS), block, exact_match, config=config).run_sync(store="memory:")
    assert (report.status, report.total) == ("finished", THREADS)
    assert report.pass_rate_all == 1.0


def test_a_line_of_a_gigabyte_is_read_lazily(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    size = 1_000_000_000
    with path.open("w") as file:
        file.write('{"id": "a", "input": "')
        for _ in range(size // 1_000_000):
            file.write("x" * 1_000_000)
        file.write('"}\n{"id": "b", "input": "short"}\n')
    dataset = Dataset.load(path, lazy=True)
    lengths = {sample.id: len(sample.input) for sample in dataset}
    assert lengths == {"a": size, "b": 5}
