"""Health pages and metrics of a worker process, and clients that misuse them."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from fairtrial.base.metrics import Histogram
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.ops import health as health_module
from fairtrial.fleet.ops import health as metrics
from fairtrial.fleet.ops.group import LoopGroup
from fairtrial.fleet.ops.health import Family, HealthServer, Page, Reading, exposition
from fairtrial.fleet.ops.supervise import Bound
from fairtrial.mailbox import InMemoryMailbox
from tests.fleet.build import until
from tests.fleet.grouping import Steady, ask, request, running

pytestmark = pytest.mark.proves("R83", "R84", "R109")


class TestPages:
    async def test_metrics_have_every_loops_own_numbers_and_mailboxes_depths(self) -> None:
        mailbox: InMemoryMailbox[int] = InMemoryMailbox("jobs", int)
        await mailbox.send(1)
        group = LoopGroup({'a "b"\\\n': Steady(), "plain": Steady()}, health_port=0, watch={"jobs": mailbox})
        async with running(group):
            await until(lambda: bool(group._depths.depths))
            status, text = await ask(group, "/metrics")
        assert status == 200
        assert 'fairtrial_trials_total{loop="a \\"b\\"\\\\\\n"} 3.0\n' in text
        assert 'fairtrial_odd_name__total{loop="plain"} 1.5\n' in text
        assert 'fairtrial_in_flight{loop="plain"} 2.0\n' in text
        assert "words" not in text
        assert 'fairtrial_mailbox_messages{mailbox="jobs",state="waiting"} 1.0\n' in text
        assert "process_resident_memory_bytes" in text
        names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert len(names) == len(set(names))
        for line in text.splitlines():
            assert re.fullmatch(r'# (HELP|TYPE) .*|[a-z_]+(\{([a-z_]+="([^"\\]|\\.)*",?)+\})? [-+.\dInfNae]+', line), (
                line
            )

    async def test_counters_may_be_a_record_with_a_mapping_in_it(self) -> None:
        @dataclass
        class Counts:
            received: int = 7
            in_flight: int = 2
            outcomes: Mapping[str, int] = field(default_factory=lambda: {"scored": 5, "timeout": 1})

        steady = Steady()
        steady.gauges = dict
        steady.counters = Counts()  # type: ignore[assignment]  # a loop may do it this way
        group = LoopGroup({"worker": Bound(steady, steady.run)}, health_port=0)
        async with running(group):
            _, text = await ask(group, "/metrics")
            assert 'fairtrial_received_total{loop="worker"} 7.0\n' in text
            assert "# TYPE fairtrial_in_flight gauge\n" in text
            assert 'fairtrial_outcomes_total{loop="worker",outcome="timeout"} 1.0\n' in text
        assert steady.runs == 1

    async def test_a_mailbox_that_cannot_be_asked_shows_no_depth(self) -> None:
        class Away(InMemoryMailbox[int]):
            asked = 0

            async def depth(self) -> Any:
                self.asked += 1
                raise OSError("away")

        away = Away("away", int)
        group = LoopGroup([Steady()], health_port=0, watch={"away": away})
        async with running(group):
            await until(lambda: away.asked > 0)
            assert "fairtrial_mailbox_messages" not in (await ask(group, "/metrics"))[1]

    async def test_a_loop_whose_numbers_cannot_be_read_shows_none(self, caplog: pytest.LogCaptureFixture) -> None:
        steady = Steady()
        steady.counters = {}
        steady.gauges = lambda: {"x": 1 // 0}
        group = LoopGroup([steady], health_port=0)
        async with running(group):
            status, text = await ask(group, "/metrics")
        assert (status, "fairtrial_x" in text) == (200, False)
        assert "gauges could not be read" in caplog.text

    def test_numbers_are_written_as_prometheus_reads_them(self) -> None:
        readings = tuple(Reading(value) for value in (1.0, 0.5, float("nan"), float("inf"), float("-inf"), 1e20))
        text = exposition([Family("2 fast", "gauge", "back\\slash\nline", readings)])
        assert text.splitlines() == [
            "# HELP _2_fast back\\\\slash\\nline",
            "# TYPE _2_fast gauge",
            *(f"_2_fast {value}" for value in ("1.0", "0.5", "NaN", "+Inf", "-Inf", "1e+20")),
        ]

    async def test_the_port_is_off_unless_asked_for_and_on_loopback_unless_told(self) -> None:
        group = LoopGroup([Steady()])
        async with running(group):
            assert group.health_address is None
        group = LoopGroup([Steady()], health_port=0)
        async with running(group):
            assert group.health_address is not None
            assert group.health_address[0] == "127.0.0.1"
        assert group.health_address is None

    async def test_a_port_that_is_taken_is_said_before_any_loop_starts(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            steady = Steady()
            with pytest.raises(ConfigurationError, match=f"the health port 127.0.0.1:{port} cannot be used"):
                await LoopGroup([steady], health_port=port).run()
            assert steady.runs == 0


class TestRudeClients:
    @pytest.fixture
    async def address(self) -> AsyncIterator[tuple[str, int]]:
        async def page() -> Page:
            return Page("fine\n")

        async def broken() -> Page:
            raise RuntimeError("secret")

        server = HealthServer("127.0.0.1", 0, {"/live": page, "/broken": broken}, timeout_seconds=1.0)
        server.start()
        assert server.address is not None
        yield server.address
        server.close()
        server.close()

    @pytest.mark.parametrize(
        ("data", "status"),
        [
            (b"GET /live HTTP/1.1\r\n\r\n", 200),
            (b"GET /live?verbose HTTP/1.0\r\nhost: x\r\n\r\n", 200),
            (b"GET /live HTTP/1.1\r\nhost: 10.2.3.4:8080\r\n\r\n", 200),
            (b"HEAD /live HTTP/1.1\r\n\r\n", 200),
            (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
            (b"POST /live HTTP/1.1\r\n\r\n", 405),
            (b"GET /live\r\n\r\n", 400),
            (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
            (b"\x16\x03\x01\x02\x00\x01\xff\xfe\r\n\r\n", 400),
            (b"\r\n\r\n", 400),
            (b"GET /broken HTTP/1.1\r\n\r\n", 500),
            (b"GET /live HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", 431),
        ],
    )
    async def test_any_request_gets_its_answer(self, address: tuple[str, int], data: bytes, status: int) -> None:
        got, body = await request(address, data)
        assert got == status
        assert "secret" not in body
        assert (body == "") == data.startswith(b"HEAD")

    async def test_a_client_that_disconnects_early_does_not_disturb_the_server(self, address: tuple[str, int]) -> None:
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /li")
        writer.close()
        assert (await request(address, b"GET /live HTTP/1.1\r\n\r\n"))[0] == 200

    async def test_slow_clients_are_disconnected_and_do_not_delay_others(self, address: tuple[str, int]) -> None:
        slow = [await asyncio.open_connection(*address) for _ in range(20)]
        for _, writer in slow:
            writer.write(b"GET /live HTTP/1.1\r\n")
        assert (await request(address, b"GET /live HTTP/1.1\r\n\r\n"))[0] == 200
        async with asyncio.timeout(10):
            for reader, writer in slow:
                try:
                    assert await reader.read() == b""
                except ConnectionError:
                    pass  # Cut off without a goodbye.
                writer.close()

    async def test_a_client_that_sends_byte_after_byte_is_cut_off_all_the_same(self, address: tuple[str, int]) -> None:
        _, writer = await asyncio.open_connection(*address)

        async def drip() -> None:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.1)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(drip(), 15)
        writer.close()

    async def test_probes_are_answered_beside_a_crowd_of_slow_clients(
        self, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health_module, "MAX_CONNECTIONS", 3)
        crowd = [await asyncio.open_connection(*address) for _ in range(6)]
        for _, writer in crowd:
            writer.write(b"GET ")
        async with asyncio.timeout(10):
            for _ in range(20):
                assert (await request(address, b"GET /live HTTP/1.1\r\n\r\n"))[0] == 200
        for _, writer in crowd:
            writer.close()


def test_histograms_count_what_is_at_most_their_bound() -> None:
    histogram = Histogram("wait_seconds", "Waiting.", "queue", buckets=(0.5, 2.0))
    for seconds in (0.1, 0.5, 1.0, 9.0):
        histogram.observe(seconds, "a")
    histogram.observe(0.0, "b\ud800")
    lines = exposition([metrics._histogram(histogram)]).splitlines()
    assert lines[:7] == [
        "# HELP wait_seconds Waiting.",
        "# TYPE wait_seconds histogram",
        'wait_seconds_bucket{le="0.5",queue="a"} 2.0',
        'wait_seconds_bucket{le="2",queue="a"} 3.0',
        'wait_seconds_bucket{le="+Inf",queue="a"} 4.0',
        'wait_seconds_count{queue="a"} 4.0',
        'wait_seconds_sum{queue="a"} 10.6',
    ]
