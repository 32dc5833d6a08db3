"""The lease of a run: one process executes a run, and a process that lost the lease stops."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match, open_store
from fairtrial.errors import RunBusyError, StoreUnavailableError
from fairtrial.runs import run_lease
from fairtrial.store import RunStore
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import RunOwner, RunRecord
from tests.servers import PostgresServer

TRIALS = 300
SUITE = textwrap.dedent(
    """
    import os, sys, time
    from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match
    from fairtrial.runs import run_lease

    run_lease.HEARTBEAT_SECONDS = 0.2
    run_lease.STALE_SECONDS = float(os.environ.get("STALE", "3"))
    run_lease._POLL_SECONDS = 0.05
    clock = time.time
    time.time = lambda: clock() + float(os.environ.get("CLOCK", "0"))  # By how much it is wrong.
    log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def slow(number):
        os.write(log, f"{os.getpid()} {number}\\n".encode())
        time.sleep(float(os.environ.get("SLEEP", "0.05")))
        return number

    data = Dataset.of({number: number for number in range(TRIALS)}, name="numbers")
    config = EvalConfig(max_concurrent=4, grace_seconds=1)
    suite = EvalSuite("slow", data, slow, exact_match, version="1", config=config)
    if __name__ == "__main__":
        print(suite.run_sync(store=sys.argv[1]).total)
    """
).replace("TRIALS", str(TRIALS))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come and become stale in tenths of a second."""
    monkeypatch.setattr(run_lease, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(run_lease, "STALE_SECONDS", 2.0)
    monkeypatch.setattr(run_lease, "_POLL_SECONDS", 0.05)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store that several processes can open."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/runs.db"
    server: PostgresServer = request.getfixturevalue("own_postgres")
    return server.new_database()


class Processes:
    """Processes that run the suite in one folder, each with what it printed."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.all: list[subprocess.Popen[bytes]] = []
        (folder / "slow_suite.py").write_text(SUITE)

    def start(self, *prefix: str, **settings: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
        process = subprocess.Popen(
            [*prefix, sys.executable, "slow_suite.py", self.url],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.all.append(process)
        return process

    def executed(self) -> list[tuple[int, int]]:
        """(process, trial) of every execution so far."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(pid), int(number)) for pid, number in (line.split() for line in lines)]

    def twice(self) -> int:
        counts = collections.Counter(number for _, number in self.executed())
        return sum(count - 1 for count in counts.values())

    def freeze(self, process: subprocess.Popen[bytes]) -> None:
        """Stop a process where it stands, except in the middle of a commit: nobody could write to SQLite then."""
        while True:
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.2)  # PostgreSQL may still finish what it was sent.
            if not self.url.startswith("sqlite"):
                return
            with contextlib.closing(sqlite3.connect(self.folder / "runs.db", timeout=0)) as probe:
                try:
                    probe.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError:
                    process.send_signal(signal.SIGCONT)
                    time.sleep(0.1)

    def by(self, process: subprocess.Popen[bytes]) -> int:
        return sum(pid == process.pid for pid, _ in self.executed())

    def interrupted_run(self) -> None:
        """Leave a run that was interrupted after some trials."""
        first = self.start()
        wait_until(lambda: len(self.executed()) > 20)
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)
        wait_until(lambda: self.stored() > 0)

    def stored(self) -> int:
        with contextlib.closing(open_store(self.url)) as store:
            runs = store.runs(suite="slow")
            return sum(byte.bit_count() for byte in store.done(runs[0].run_id)) if runs else 0

    def end(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def processes(tmp_path: Path, database: str) -> Iterator[Processes]:
    made = Processes(tmp_path, database)
    try:
        yield made
    finally:
        made.end()


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def the_suite() -> EvalSuite:
    data = Dataset.of({number: number for number in range(TRIALS)}, name="numbers")
    return EvalSuite("slow", data, lambda number: number, exact_match, version="1")


def test_a_second_process_is_refused_while_the_first_executes_and_resumes_at_once_when_it_was_killed(
    processes: Processes, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = processes.start()
    wait_until(lambda: processes.stored() > 0)
    with pytest.raises(RunBusyError, match=rf"being executed by process {first.pid} on .*resume='never'"):
        the_suite().run_sync(store=processes.url)
    assert first.poll() is None
    store = open_store(processes.url)
    assert store.runs(suite="slow")[0].status == "running"  # It was left as it was.
    first.kill()
    first.wait(30)
    assert run_lease.current_status(store, store.runs(suite="slow")[0]) == "interrupted"
    monkeypatch.setattr(run_lease, "STALE_SECONDS", 1_000.0)  # Nobody waits for a process that has provably ended.
    report = the_suite().run_sync(store=store)
    assert (report.status, report.total) == ("finished", TRIALS)
    assert store.run_owner(report.run_id).owner is None
    assert len(store.runs(suite="slow")) == 1
    store.close()


def test_of_two_processes_started_together_on_an_interrupted_run_one_is_refused(processes: Processes) -> None:
    processes.interrupted_run()
    (processes.folder / "log").write_text("")
    both = [processes.start(), processes.start()]
    said = [process.communicate(timeout=120)[0].decode() for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes == [0, 1], said
    assert any("RunBusyError" in text and "is being executed by process" in text for text in said)
    assert processes.twice() == 0
    assert processes.stored() == TRIALS


def test_a_run_is_started_once_when_another_process_starts_it_at_the_same_moment(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(open_store(database)) as here, contextlib.closing(open_store(database)) as there:
        create = here.create_run

        def after_the_other(run: RunRecord, **rest: Any) -> RunRecord:
            monkeypatch.undo()
            there.create_run(replace(run, run_id="the-other"))
            return create(run, **rest)

        monkeypatch.setattr(here, "create_run", after_the_other)
        report = the_suite().run_sync(store=here)
        assert (report.run_id, report.status, report.total) == ("the-other", "finished", TRIALS)
        assert [run.run_id for run in here.runs()] == ["the-other"]
        assert the_suite().run_sync(store=here, resume="never").run_id != "the-other"


@pytest.mark.long
def test_a_frozen_process_that_was_taken_over_executes_nothing_more_when_it_is_thawed(processes: Processes) -> None:
    frozen = processes.start()
    wait_until(lambda: processes.stored() > 20)
    processes.freeze(frozen)
    before, stored = processes.by(frozen), processes.stored()
    second = processes.start()
    wait_until(lambda: processes.by(second) > 20)
    frozen.send_signal(signal.SIGCONT)
    text = frozen.communicate(timeout=60)[0].decode()
    assert frozen.returncode == 1
    assert "was taken over by another process" in text
    # At most the four in flight: one may have been started when it froze and not yet have written its line.
    assert processes.by(frozen) <= before + 4
    assert second.communicate(timeout=60)[0].decode().split()[-1] == str(TRIALS)
    # What was in flight or not yet stored when it froze is executed again; nothing else is.
    assert processes.twice() <= before - stored + 4
    assert processes.stored() == TRIALS


@pytest.mark.long
def test_a_process_in_another_pid_namespace_with_the_same_host_name_is_refused(processes: Processes) -> None:
    assert shutil.which("unshare"), "install util-linux"
    probe = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    prefix = ["unshare", "--pid", "--fork", "--mount-proc"]
    if probe.returncode:
        prefix = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    processes.start(SLEEP="100")
    wait_until(lambda: len(processes.executed()) == 4)
    second = processes.start(*prefix)
    text = second.communicate(timeout=60)[0].decode()
    assert second.returncode == 1
    assert "is being executed by process" in text
    assert len(processes.executed()) == 4


def test_a_clock_that_is_wrong_takes_no_run_from_a_process_that_executes_it(
    processes: Processes, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.start(SLEEP="100", CLOCK="-3600")
    wait_until(lambda: len(processes.executed()) == 4)
    real = time.time
    for error in (60.0, -60.0):
        monkeypatch.setattr(time, "time", lambda error=error: real() + error)
        with pytest.raises(RunBusyError):
            the_suite().run_sync(store=processes.url)
    assert len(processes.executed()) == 4


class Clockless(MemoryStore):
    """A store whose database, like SQLite, has no clock of its own."""

    def run_owner(self, run_id: str) -> RunOwner:
        return super().run_owner(run_id)._replace(age_seconds=None)


ELSEWHERE = json.dumps({"host": "elsewhere", "pid": 1})


def interrupted(store: RunStore) -> str:
    suite = EvalSuite(
        "slow",
        Dataset.of({number: number for number in range(TRIALS)}, name="numbers"),
        lambda number: 1 / 0,
        exact_match,
        version="1",
        config=EvalConfig(stop_on_error=True, max_concurrent=1),
    )
    return suite.run_sync(store=store).run_id


@pytest.mark.parametrize("kind", [MemoryStore, Clockless])
def test_a_heartbeat_that_is_never_renewed_becomes_stale_whatever_the_clocks_say(
    kind: type[MemoryStore], quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    store = kind()
    run_id = interrupted(store)
    assert store.acquire_run(run_id, ELSEWHERE, store.run_owner(run_id)) == 2
    began = time.monotonic()
    report = the_suite().run_sync(store=store)
    assert (report.run_id, report.total) == (run_id, TRIALS)
    assert time.monotonic() - began >= 1.9
    assert "to see whether it still is" in caplog.text


def test_a_run_that_changed_hands_while_it_was_watched_is_busy(quick: None) -> None:
    store = MemoryStore()
    run_id = interrupted(store)
    epoch = store.acquire_run(run_id, ELSEWHERE, store.run_owner(run_id))
    assert epoch is not None
    alive = threading.Event()

    def beat() -> None:
        while not alive.wait(0.1):
            store.renew_run(run_id, epoch)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunBusyError, match="process 1 on elsewhere"):
            the_suite().run_sync(store=store)
    finally:
        alive.set()
        thread.join()
    assert store.run_owner(run_id).epoch == epoch


def test_a_lease_is_renewed_while_a_lifespan_opens_and_while_no_result_comes(quick: None, tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/runs.db")
    seen: dict[str, set[Any]] = {"lifespan": set(), "task": set()}

    def look(where: str) -> None:
        deadline = time.monotonic() + 20
        while len(seen[where]) < 3 and time.monotonic() < deadline:
            seen[where].add(store.run_owner(store.runs(suite="slow")[0].run_id).heartbeat_at)
            time.sleep(0.05)

    @contextlib.asynccontextmanager
    async def lifespan() -> Any:
        await anyio.to_thread.run_sync(look, "lifespan")
        yield None

    def patient(question: str) -> str:
        look("task")
        return question

    EvalSuite("slow", Dataset.of({"1": "1"}), patient, exact_match, lifespan=lifespan).run_sync(store=store)
    assert [len(times) for times in seen.values()] == [3, 3]


def test_a_run_that_is_taken_over_ends_at_once_and_stays_as_it_is(quick: None) -> None:
    store = MemoryStore()

    async def endless(number: int) -> int:
        if number == 5:
            run = store.runs()[0]
            assert store.acquire_run(run.run_id, ELSEWHERE, store.run_owner(run.run_id)) == 2
            await anyio.sleep(60)
        return number

    suite = EvalSuite("slow", Dataset.of({n: n for n in range(20)}), endless, exact_match)
    began = time.monotonic()
    with pytest.raises(RunBusyError, match="was taken over by another process"):
        suite.run_sync(store=store)
    assert time.monotonic() - began < 20
    (run,) = store.runs()
    assert (run.status, run.finished_at, store.run_owner(run.run_id).epoch) == ("running", None, 2)
    wait_until(lambda: not any(thread.name.startswith("fairtrial writer") for thread in threading.enumerate()))


async def confirm_after(store: MemoryStore, lease: run_lease.RunLease, seconds: float) -> None:
    """Confirm a lease as a process does that stood still for some seconds."""
    lease._renewed -= seconds
    assert not lease.is_current
    await lease.confirm()


def test_a_process_that_stood_still_asks_before_it_starts_anything() -> None:
    class Away(MemoryStore):
        failures = 2

        def renew_run(self, run_id: str, epoch: int) -> None:
            if self.failures:
                self.failures -= 1
                raise StoreUnavailableError("restarting")
            super().renew_run(run_id, epoch)

    async def check() -> None:
        store = Away()
        run_id = await anyio.to_thread.run_sync(interrupted, store)
        lease = await run_lease.acquire(store, run_id)
        await confirm_after(store, lease, 29.0)
        assert lease.is_current
        assert store.failures == 0
        assert store.acquire_run(run_id, ELSEWHERE, store.run_owner(run_id)) is not None
        with pytest.raises(RunBusyError):
            await confirm_after(store, lease, 29.0)
        with pytest.raises(RunBusyError):
            await lease.confirm()
        lease.release()
        assert store.run_owner(run_id).owner == ELSEWHERE

    anyio.run(check)


def test_only_a_process_of_this_kernel_and_namespace_is_known_to_have_ended() -> None:
    here = run_lease._describe_process()
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    gone = {**here, "pid": process.pid, "started": "1"}
    assert run_lease._has_ended(json.dumps(gone))
    assert run_lease._has_ended(json.dumps({**here, "pid": os.getppid(), "started": "1"}))  # The number is used again.
    assert run_lease._has_ended(json.dumps({**here, "token": "of an earlier run of this process"}))
    unknown: Any
    for unknown in ({**gone, "boot": "another"}, {**gone, "namespace": "pid:[1]"}, {"pid": process.pid}, [], "x"):
        assert not run_lease._has_ended(json.dumps(unknown))
    assert not run_lease._has_ended("no JSON")


def test_a_run_that_only_workers_execute_is_running_although_nobody_owns_it() -> None:
    store = MemoryStore()
    run_id = interrupted(store)
    store.update_run(run_id, status="running")
    assert run_lease.current_status(store, store.get_run(run_id)) == "interrupted"
    queued = store.create_run(replace(store.get_run(run_id), run_id="queued"))
    assert run_lease.current_status(store, queued) == "running"
