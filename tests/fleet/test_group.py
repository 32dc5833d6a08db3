"""Several loops in a process: restarted, drained, watched."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fairtrial import ConfigurationError, exact_match
from fairtrial.errors import LoopCrashedError, MailboxAccessError
from fairtrial.fleet import EvalLoop, EvalLoopConfig, LoopGroup
from fairtrial.fleet.ops import group as group_module
from fairtrial.fleet.ops.supervise import Bound, RestartPolicy
from fairtrial.fleet.ops.watchdog import EXIT_STALLED
from tests.fleet.build import boxes, take, until
from tests.fleet.build import request as trial_request
from tests.fleet.grouping import Steady, ask, running

pytestmark = pytest.mark.proves("R83", "R84", "R109")


QUICK = RestartPolicy(base_seconds=0.001, max_seconds=0.01, draw=lambda: 1.0)


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
        assert critical == ["crashing crashes repeatedly (3 times in a row): RuntimeError: broken"]

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
        with pytest.raises(ConfigurationError, match="can run only once"):
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

    @pytest.mark.parametrize("given", ["", None, 7])
    async def test_a_loop_without_a_name_of_its_own_is_named_by_its_class_and_place(self, given: Any) -> None:
        assert [one.name for one in LoopGroup([Steady("a"), Steady(given)]).loops] == ["a", "Steady-2"]


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
        assert "waiting up to 0.2 s for 2 jobs in flight" in caplog.text
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
        assert "abandoned tasks that ignored their cancellation: fairtrial stubborn" in caplog.text
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
        assert "stopping bad failed" in caplog.text
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
from fairtrial.fleet.ops.group import LoopGroup

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
