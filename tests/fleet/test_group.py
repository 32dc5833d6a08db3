"""Several loops in a process: restarted, drained, watched."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from fairtrial import exact_match
from fairtrial.errors import ConfigurationError, LoopCrashedError, MailboxAccessError
from fairtrial.fleet import EvalLoop, EvalLoopConfig, metrics
from fairtrial.fleet import group as group_module
from fairtrial.fleet import health as health_module
from fairtrial.fleet.group import LoopGroup
from fairtrial.fleet.health import HealthServer, Page
from fairtrial.fleet.metrics import Family, Reading, exposition
from fairtrial.fleet.supervise import Bound, RestartPolicy
from fairtrial.fleet.watchdog import EXIT_STALLED, Watchdog
from fairtrial.mailbox import InMemoryMailbox
from fairtrial.metrics import Histogram
from tests.fleet.build import boxes, take
from tests.fleet.build import request as trial_request

pytestmark = [pytest.mark.anyio, pytest.mark.proves("R83", "R84", "R109")]

QUICK = RestartPolicy(base_seconds=0.001, max_seconds=0.01, draw=lambda: 1.0)


class Steady:
    """A loop that works until it is told to stop."""

    def __init__(self, name: str = "steady") -> None:
        self.name = name
        self.runs = 0
        self.cancelled = False
        self.counters: Mapping[str, Any] = {"trials": 3, "odd name!": 1.5, "words": "no number"}
        self.gauges = lambda: {"in_flight": 2}
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        self.runs += 1
        try:
            await self._stopping.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def stop(self) -> None:
        self._stopping.set()


class Crashing(Steady):
    """A loop that fails the first times it runs."""

    def __init__(self, times: int, error: Callable[[], BaseException] = lambda: RuntimeError("broken")) -> None:
        super().__init__("crashing")
        self.times = times
        self.error = error

    async def run(self) -> None:
        if self.runs < self.times:
            self.runs += 1
            raise self.error()
        await super().run()


class Deaf(Steady):
    """A loop that does not heed `stop`."""

    def stop(self) -> None:
        pass


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(group: LoopGroup) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(group.run())
    try:
        await until(lambda: group.state != "new" or task.done())
        yield task
    finally:
        group.hurry()
        await asyncio.wait([task])


async def ask(group: LoopGroup, path: str) -> tuple[int, str]:
    assert group.health_address is not None
    return await request(group.health_address, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def request(address: tuple[str, int], data: bytes) -> tuple[int, str]:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(data)
        answer = (await reader.read()).decode()
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body


class TestRestarts:
    async def test_a_crashed_loop_starts_again_and_its_neighbour_does_not_notice(self) -> None:
        steady, crashing = Steady(), Crashing(2)
        group = LoopGroup([steady, crashing], restart=QUICK)
        async with running(group) as task:
            await until(lambda: crashing.runs == 3)
            assert steady.runs == 1
            assert [one.crashes for one in group.loops] == [0, 2]
            group.stop()
            await task
        assert [one.state for one in group.loops] == ["stopped", "stopped"]

    async def test_pauses_double_up_to_a_limit(self) -> None:
        policy = RestartPolicy(base_seconds=1, max_seconds=30, draw=lambda: 1.0)
        assert [policy.pause(crashes) for crashes in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
        assert policy.pause(10_000) == 30
        assert RestartPolicy(base_seconds=1, draw=lambda: 0.0).pause(1) == 0.5

    async def test_a_loop_that_crashes_at_once_again_and_again_is_reported(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        crashing = Crashing(5)
        group = LoopGroup([crashing], restart=QUICK, health_port=0)
        async with running(group):
            await until(lambda: crashing.runs == 6)
            status, said = await ask(group, "/ready")
            assert (status, "crashing has crashed 5 times in a row" in said) == (503, True)
            assert "broken" not in said  # Errors may quote anything; they are for the log.
            assert (await ask(group, "/live"))[0] == 200
            assert 'fairtrial_loop_failing{loop="crashing"} 1' in (await ask(group, "/metrics"))[1]
        critical = [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]
        assert critical == ["crashing crashes again and again (3 times in a row): RuntimeError: broken"]

    async def test_a_loop_that_ran_for_a_while_has_recovered(self) -> None:
        policy = RestartPolicy(base_seconds=0.001, max_seconds=0.01, settled_seconds=0.05)
        crashing = Crashing(4)
        group = LoopGroup([crashing], restart=policy, health_port=0)
        async with running(group):
            await until(lambda: crashing.runs == 5)
            await until(lambda: not group.loops[0].failing)
            assert (await ask(group, "/ready"))[0] == 200

    async def test_giving_up_drains_the_others_and_raises(self) -> None:
        steady = Steady()
        policy = RestartPolicy(base_seconds=0.001, max_seconds=0.01, give_up_after=4)
        group = LoopGroup([steady, Crashing(99)], restart=policy)
        with pytest.raises(LoopCrashedError, match=r"crashing crashed 4 times in a row; last: RuntimeError: broken"):
            await group.run()
        assert not steady.cancelled
        assert [one.state for one in group.loops] == ["stopped", "failed"]

    @pytest.mark.parametrize("kind", [ConfigurationError, MailboxAccessError])
    async def test_a_loop_that_is_set_up_wrongly_is_not_started_again(self, kind: type[Exception]) -> None:
        crashing = Crashing(9, lambda: kind("no such suite"))
        with pytest.raises(kind, match="no such suite"):
            await LoopGroup([Steady(), crashing], restart=QUICK).run()
        assert crashing.runs == 1

    async def test_a_loop_that_cancels_itself_has_crashed(self) -> None:
        crashing = Crashing(1, asyncio.CancelledError)
        group = LoopGroup([crashing], restart=QUICK)
        async with running(group):
            await until(lambda: crashing.runs == 2)
            assert group.loops[0].crashes == 1

    async def test_a_function_makes_a_fresh_loop_for_every_start(self) -> None:
        made: list[Crashing] = []

        def make() -> Crashing:
            made.append(Crashing(1 if len(made) < 2 else 0))
            return made[-1]

        group = LoopGroup({"fresh": make}, restart=QUICK)
        async with running(group):
            await until(lambda: len(made) == 3 and made[2].runs == 1)
        assert [loop.runs for loop in made] == [1, 1, 1]

    async def test_a_pause_before_a_restart_does_not_hold_up_the_end(self) -> None:
        group = LoopGroup([Crashing(1)], restart=RestartPolicy(base_seconds=60, max_seconds=60))
        async with running(group) as task:
            await until(lambda: group.loops[0].state == "crashed")
            group.stop()
            await asyncio.wait_for(task, 5)

    async def test_the_group_ends_when_all_loops_have_ended(self) -> None:
        steady = Steady()
        steady.stop()
        group = LoopGroup([steady])
        await group.run()
        assert group.loops[0].state == "finished"
        with pytest.raises(ConfigurationError, match="runs once"):
            await group.run()

    def test_run_sync_runs_to_the_end_and_in_other_threads_too(self) -> None:
        group = LoopGroup([Crashing(0)])
        thread = threading.Thread(target=group.run_sync)
        thread.start()
        while group.loops[0].state != "running":
            time.sleep(0.002)
        group.stop()
        thread.join(20)
        assert not thread.is_alive()
        assert group.state == "over"
        group.stop()  # Too late, and harmless.

    @pytest.mark.parametrize(
        "make",
        [
            lambda: LoopGroup([]),
            lambda: LoopGroup([Steady()], health_port=70_000),
            lambda: LoopGroup([Steady()], drain_seconds=-1),
            lambda: LoopGroup([Steady()], stall_seconds=0),
            lambda: LoopGroup([Steady()], stall_seconds=None, exit_on_stall=True),
            lambda: RestartPolicy(base_seconds=0),
            lambda: RestartPolicy(alarm_after=0),
            lambda: RestartPolicy(give_up_after=0),
        ],
    )
    async def test_settings_that_cannot_work_are_refused(self, make: Callable[[], object]) -> None:
        with pytest.raises(ConfigurationError):
            make()

    async def test_names_are_unique(self) -> None:
        group = LoopGroup([Steady("a"), Steady("a"), Crashing(0), lambda: Steady("x")])
        assert [one.name for one in group.loops] == ["a", "a#2", "crashing", "function-4"]


class TestDraining:
    async def test_a_stop_lets_work_finish(self) -> None:
        steady = Steady()
        group = LoopGroup([steady], health_port=0)
        async with running(group) as task:
            group.stop()
            await task
        assert not steady.cancelled
        assert not group.hurried

    async def test_a_drain_has_an_end(self) -> None:
        deaf = Deaf()
        group = LoopGroup([deaf], drain_seconds=0.05)
        async with running(group) as task:
            group.stop()
            await asyncio.wait_for(task, 10)
        assert deaf.cancelled
        assert group.hurried

    async def test_while_draining_it_is_live_and_not_ready(self) -> None:
        group = LoopGroup([Deaf()], health_port=0)
        async with running(group):
            assert (await ask(group, "/ready"))[0] == 200
            group.stop()
            await until(lambda: group.state == "draining")
            assert (await ask(group, "/ready")) == (503, '{"ready": false, "why": "the group is draining"}\n')
            assert (await ask(group, "/live"))[0] == 200
            assert "fairtrial_group_draining 1" in (await ask(group, "/metrics"))[1]

    async def test_a_loop_that_has_not_reached_its_mailbox_is_not_ready(self) -> None:
        class Slow(Steady):
            ready = False

        slow = Slow()
        group = LoopGroup({"slow": Bound(slow, slow.run)}, health_port=0)
        async with running(group):
            await until(lambda: slow.runs == 1)
            assert await ask(group, "/ready") == (503, '{"ready": false, "why": "slow does not take work yet"}\n')
            slow.ready = True
            assert (await ask(group, "/ready"))[0] == 200

    async def test_it_is_ready_when_all_loops_take_work_and_not_before(self) -> None:
        class Slow(Steady):
            ready = False

        slow, short = Slow("slow"), Steady("short")
        group = LoopGroup([Steady(), slow, short], health_port=0)
        async with running(group):
            await until(lambda: slow.runs == 1)
            assert await ask(group, "/ready") == (503, '{"ready": false, "why": "slow does not take work yet"}\n')
            assert "fairtrial_group_ready 0" in (await ask(group, "/metrics"))[1]
            slow.ready = True
            short.stop()  # A loop that has ended by itself is not waited for.
            await until(lambda: group.loops[2].state == "finished")
            assert (await ask(group, "/ready"))[0] == 200
            assert "fairtrial_group_ready 1" in (await ask(group, "/metrics"))[1]

    async def test_a_real_loop_is_probed_drained_and_hands_back_what_it_does_not_finish(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, logger="fairtrial")
        requests, results = boxes()
        for number in range(4):
            await requests.send(trial_request(number, "quick" if number < 2 else "stuck"))
        stuck = 0

        async def work(input: str) -> str:
            nonlocal stuck
            if input == "stuck":
                stuck += 1
                await asyncio.sleep(3600)
            return input

        config = EvalLoopConfig(concurrency=4, drain_seconds=0.2)
        loop = EvalLoop(
            requests=requests, loop=work, evaluator=exact_match, results=results, config=config, name="real"
        )
        group = LoopGroup([loop], health_port=0, watch={"requests": requests})
        async with running(group) as task:
            await until(lambda: stuck == 2 and loop.counters.finished == 2)
            assert (await ask(group, "/ready"))[0] == 200
            metrics = (await ask(group, "/metrics"))[1]
            assert 'fairtrial_in_flight{loop="real"} 2' in metrics
            assert 'fairtrial_outcomes_total{loop="real",outcome="scored"} 2' in metrics
            group.stop()
            await asyncio.wait_for(task, 20)
        assert not group.hurried
        assert len(await take(results)) == 2
        assert (loop.counters.handed_back, (await requests.depth()).waiting) == (2, 2)
        assert "what is in flight (2) may take 0.2 s to finish" in caplog.text
        assert "600" not in caplog.text

    async def test_an_outer_cancellation_hands_back_and_is_passed_on(self) -> None:
        deaf = Deaf()
        task = asyncio.create_task(LoopGroup([deaf]).run())
        await until(lambda: deaf.runs == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert deaf.cancelled

    async def test_a_loop_that_cannot_even_be_cancelled_is_left_behind_by_name(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(group_module, "HURRY_SECONDS", 0.05)
        release = asyncio.Event()

        class Stubborn(Deaf):
            async def run(self) -> None:
                while not release.is_set():
                    try:
                        await release.wait()
                    except asyncio.CancelledError:
                        pass

        group = LoopGroup([Stubborn("stubborn")])
        async with running(group) as task:
            await until(lambda: group.loops[0].state == "running")
            group.hurry()
            await asyncio.wait_for(task, 10)
        assert "left behind, although cancelled: fairtrial stubborn" in caplog.text
        release.set()
        await asyncio.sleep(0)

    async def test_a_stop_that_is_async_is_awaited_and_one_that_fails_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Async(Steady):
            async def stop(self) -> None:  # type: ignore[override]  # a loop may do it this way
                await asyncio.sleep(0)
                self._stopping.set()

        class AsyncBad(Steady):
            async def stop(self) -> None:  # type: ignore[override]  # a loop may do it this way
                raise RuntimeError("no async stop")

        class Bad(Steady):
            def stop(self) -> None:
                raise RuntimeError("no stop")

        group = LoopGroup([Async("async"), Bad("bad"), AsyncBad("async bad")], drain_seconds=0.2)
        async with running(group) as task:
            await until(lambda: all(one.state == "running" for one in group.loops))
            group.stop()
            await task
        assert "bad could not be told to stop" in caplog.text
        assert "no async stop" in caplog.text

    async def test_a_stop_before_the_start_ends_at_once(self) -> None:
        steady = Steady()
        group = LoopGroup([steady])
        group.stop()
        await asyncio.wait_for(group.run(), 5)
        assert group.loops[0].state == "stopped"

    async def test_a_crash_while_stopping_is_the_end_of_that_loop(self) -> None:
        class Last(Steady):
            async def run(self) -> None:
                await super().run()
                raise RuntimeError("on the way out")

        group = LoopGroup([Last()])
        async with running(group) as task:
            await until(lambda: group.loops[0].state == "running")
            group.stop()
            await asyncio.wait_for(task, 5)
        assert group.loops[0].crashes == 1


CHILD = """
import asyncio, logging, sys, time
logging.basicConfig(level=logging.INFO, format="%(message)s")
from fairtrial.fleet.group import LoopGroup

class Work:
    name = "work"
    stopping = False
    async def run(self):
        print("started", flush=True)
        try:
            while not self.stopping:
                await asyncio.sleep(0.01)
            if "deaf" in sys.argv:
                await asyncio.sleep(600)
            print("finished", flush=True)
        except asyncio.CancelledError:
            print("handed back", flush=True)
            if "stubborn" in sys.argv:
                await asyncio.sleep(600)
            raise
    def stop(self):
        self.stopping = True
        print("stopping", flush=True)
        if "blocked" in sys.argv:
            time.sleep(600)

group = LoopGroup([Work()], stall_seconds=0.5 if "blocked" in sys.argv else 20, exit_on_stall=True, health_port=0)
group.run_sync()
print("over", flush=True)
"""


class TestSignals:
    @pytest.fixture
    def start(self) -> Iterator[Callable[..., subprocess.Popen[str]]]:
        started: list[subprocess.Popen[str]] = []

        def run(*args: str) -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            process = subprocess.Popen([sys.executable, "-c", CHILD, *args], stdout=pipe, stderr=pipe, text=True)
            started.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            return process

        yield run
        for process in started:
            process.kill()
            process.communicate()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_drains(self, start: Callable[..., subprocess.Popen[str]], number: signal.Signals) -> None:
        process = start()
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
        assert (out.split("\n"), process.returncode) == (["stopping", "finished", "over", ""], 0)

    def test_a_second_signal_hurries(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        process = start("deaf")
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
        assert (out.split("\n"), process.returncode) == (["handed back", "over", ""], 0)

    def test_a_third_signal_kills(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        process = start("deaf", "stubborn")
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "handed back\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == -signal.SIGTERM

    def test_a_stuck_process_ends_itself_when_told_to_and_says_where_it_was_stuck(
        self, start: Callable[..., subprocess.Popen[str]]
    ) -> None:
        process = start("blocked")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == EXIT_STALLED
        assert "time.sleep(600)" in errors or ", in stop" in errors


class TestWatchdog:
    async def test_a_blocked_event_loop_is_not_live_and_is_live_again(self, caplog: pytest.LogCaptureFixture) -> None:
        group = LoopGroup([Steady()], health_port=0, stall_seconds=0.6)
        answers: list[tuple[int, bytes]] = []

        def probe(address: tuple[str, int]) -> None:
            for path in (b"/live", b"/ready", b"/health", b"/metrics"):
                with socket.create_connection(address, 10) as link:
                    link.sendall(b"GET " + path + b" HTTP/1.0\r\n\r\n")
                    said = b"".join(iter(lambda: link.recv(65536), b""))
                answers.append((int(said.split(b" ")[1]), said))

        async with running(group):
            await until(lambda: group.loops[0].state == "running")
            assert (await ask(group, "/metrics"))[0] == 200
            assert group.health_address is not None
            prober = threading.Thread(target=probe, args=(group.health_address,))
            a_wrong_turn(1.5, prober.start)
            await asyncio.to_thread(prober.join)
            assert [status for status, _ in answers] == [503, 503, 503, 200]
            assert b"has been stuck for" in answers[0][1]
            assert b'"live": false, "ready": false, "why": "the event loop has been stuck for' in answers[2][1]
            assert b"fairtrial_event_loop_stalls_total 0" not in answers[3][1]
            assert b'fairtrial_trials_total{loop="steady"} 3' in answers[3][1]  # As it was before.
            await until(lambda: "alive again" in caplog.text)
            assert (await ask(group, "/live"))[0] == 200
            assert (await ask(group, "/health"))[0] == 200
        assert "in a_wrong_turn" in caplog.text

    async def test_a_loop_that_is_only_busy_is_live(self) -> None:
        dog = Watchdog(5.0)
        assert (dog.silence, dog.stalled) == (0.0, False)
        dog.start()
        try:
            time.sleep(0.05)  # noqa: ASYNC251 - busy, for less than it takes
            assert not dog.stalled
        finally:
            dog.stop()
        dog.stop()


def a_wrong_turn(seconds: float, then: Callable[[], None]) -> None:
    """Blocks the event loop, as user code does; `then` happens when that has been noticed."""
    time.sleep(seconds)
    then()
    time.sleep(seconds)


class TestPages:
    async def test_metrics_have_every_loops_own_numbers_and_mailboxes_depths(self) -> None:
        mailbox: InMemoryMailbox[int] = InMemoryMailbox("jobs", int)
        await mailbox.send(1)
        group = LoopGroup({'a "b"\\\n': Steady(), "plain": Steady()}, health_port=0, watch={"jobs": mailbox})
        async with running(group):
            await until(lambda: bool(group._depths))
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
        class Away:
            asked = 0

            async def depth(self) -> Any:
                self.asked += 1
                raise OSError("away")

        away = Away()
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

    async def test_a_client_that_hangs_up_early_is_told_or_forgotten(self, address: tuple[str, int]) -> None:
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /li")
        writer.close()
        assert (await request(address, b"GET /live HTTP/1.1\r\n\r\n"))[0] == 200

    async def test_slow_clients_are_cut_off_and_keep_nobody_waiting(self, address: tuple[str, int]) -> None:
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


def test_a_health_port_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r'a health port needs .*pip install "fairtrial\[metrics\]"'):
        LoopGroup([Steady()], health_port=0)


STALLING = """
import ctypes, sys, time
from fairtrial.fleet.watchdog import InterpreterWatchdog

class Contained(InterpreterWatchdog):
    def __enter__(self):
        import os
        os.getpid = lambda: 1
        return super().__enter__()

with (Contained if "contained" in sys.argv else InterpreterWatchdog)(1.5):
    print("watched", flush=True)
    if "stalled" in sys.argv:
        ctypes.PyDLL(None).sleep(100)
    time.sleep(4)
print("ended", flush=True)
"""


@pytest.mark.parametrize("how", ["watched", "contained"])
def test_a_process_whose_interpreter_is_stalled_is_killed_from_outside_and_shows_where(how: str) -> None:
    run = [sys.executable, "-c", STALLING, "stalled", how]
    done = subprocess.run(run, capture_output=True, text=True, timeout=15, check=False)
    assert (done.returncode, done.stdout) == (1 if how == "contained" else -signal.SIGABRT, "watched\n")
    assert 'File "<string>", line 14 in <module>' in done.stderr
    assert how == "contained" or "its interpreter has been stalled for" in done.stderr


def test_a_process_that_waits_or_was_suspended_is_not_taken_for_stalled() -> None:
    with subprocess.Popen([sys.executable, "-c", STALLING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watched\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "ended\n")
