"""Runs of the `fairtrial` command under faults that are drawn at random: used by a test and by benchmarks/chaos.py.

A run is carried out locally on SQLite, locally on PostgreSQL, or by a fleet on Redis and PostgreSQL. When so
many trials have begun, faults happen to it. Whenever the command ends, its exit code is compared with what is in the
store, and while trials are missing the same command is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from fairtrial import Sample, TrialKey, open_store
from fairtrial.errors import StoreError
from fairtrial.fleet import EvalRequest, connect_broker
from fairtrial.fleet.message_fields import VERSION
from tests.fleet.processes import SUITE, Processes
from tests.proxy import Proxy
from tests.redis_server import RedisServer
from tests.servers import PostgresServer

KINDS = ("sqlite", "postgresql", "fleet")
_DISK_BYTES = 16 * 1024 * 1024
_FILE_BYTES = 128 * 1024
_MAX_STARTS = 25
_DEAD = "{fairtrial:fleet-test.requests}:dead"


@dataclass(frozen=True)
class FaultPlan:
    """What one run is put through; everything else follows from the seed."""

    seed: int
    number: int
    trials: int = 2_000
    faults: tuple[str, ...] = ()  # Drawn unless given.
    kind: str = ""  # Drawn unless given.
    seconds: float = 3.0  # The longest a fault lasts.
    workers: int = 3
    limit_seconds: float = 300.0


@dataclass
class FaultOutcome:
    """What came of one run."""

    kind: str
    faults: list[str] = field(default_factory=list)
    exit_codes: Counter[int] = field(default_factory=Counter)
    executions: int = 0
    lost: int = 0  # Results that a fault took out of the store.
    seconds: float = 0.0


@dataclass(frozen=True)
class Stored:
    """What a store says about the run."""

    status: str = "none"
    trials: int = 0
    runs: int = 0


class Broken(AssertionError):
    """The run did what it must never do."""


@dataclass
class _Scene:
    """A run and everything around it."""

    plan: FaultPlan
    chance: random.Random
    folder: Path
    outcome: FaultOutcome
    tell: Callable[[str], None]
    store: str = ""  # As the command knows it.
    direct: str = ""  # The same, beside the proxy.
    fleet: Processes | None = None
    redis: RedisServer | None = None
    postgres: PostgresServer | None = None
    proxies: list[Proxy] = field(default_factory=list)
    client: subprocess.Popen[str] | None = None
    workers: list[subprocess.Popen[str]] = field(default_factory=list)
    strangers: list[subprocess.Popen[str]] = field(default_factory=list)
    clocks: list[Path] = field(default_factory=list)
    expected_ends: set[int] = field(default_factory=set)
    """Exit codes that faults justify, beside 0: 2 is for a command that had not begun when its servers were away."""

    # Starting and ending

    def _clock(self) -> Path:
        path = self.folder / f"clock-{len(self.clocks)}"
        path.write_text("0")
        self.clocks.append(path)
        return path

    def start_client(self) -> None:
        assert self.fleet is not None
        queue = ("--mailbox", self.fleet.mailbox) if self.redis is not None else ()
        words = ("run", str(SUITE), "--store", self.store, *queue, "--quiet")
        self.client = self.fleet.command(*words, clock_file=self._clock())
        self.expected_ends = set()

    def start_worker(self, **settings: object) -> subprocess.Popen[str]:
        assert self.fleet is not None
        return self.fleet.worker("--lease", "3", clock_file=self._clock(), **settings)

    @property
    def running_client(self) -> subprocess.Popen[str]:
        assert self.client is not None
        return self.client

    @property
    def executions(self) -> int:
        log = self.folder / "executed"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    # What the store says

    def look(self) -> Stored:
        """Read the store and check every result in it."""
        if self.direct.startswith("sqlite") and not Path(self.direct.removeprefix("sqlite:///")).exists():
            return Stored()
        store = open_store(self.direct)
        try:
            runs = store.runs()
            if not runs:
                return Stored()
            seen: set[int] = set()
            for result in store.results(runs[0].run_id, outputs=True):
                if result.ordinal in seen:
                    raise Broken(f"trial {result.ordinal} is stored twice")
                if result.outcome != "scored" or result.output != 2 * result.ordinal or not result.passed:
                    raise Broken(
                        f"trial {result.ordinal} is stored as {result.outcome}: {result.output} {result.error}"
                    )
                seen.add(result.ordinal)
            inputs = {place: sample.input for place, sample in store.samples(runs[0].run_id)}
            if wrong := [place for place in seen if inputs.get(place) != place]:
                raise Broken(f"the samples of trials {wrong[:5]} are not stored as they were")
            return Stored(runs[0].status, len(seen), len(runs))
        except StoreError as error:
            raise Broken(f"the store cannot be read: {error}") from None
        finally:
            store.close()

    def check_end(self, code: int) -> bool:
        """Compare an exit code with the store; True if the run is complete."""
        self.outcome.exit_codes[code] += 1
        found = self.look()
        complete = found.trials == self.plan.trials
        if found.runs > 1:
            raise Broken(f"{found.runs} runs were made of one")
        if (found.status == "finished") > complete:
            raise Broken(f"the run is said to be finished with {found.trials} of {self.plan.trials} trials stored")
        right = {0: found.status == "finished", 4: found.status == "incomplete"}.get(code, found.status != "finished")
        if not right or code not in self.expected_ends | {0}:
            raise Broken(f"exit code {code} with {found}, expected one of {sorted(self.expected_ends | {0})}")
        return code == 0

    # Faults. Each returns when it is over.

    def pause(self, *, least: float = 0.2) -> None:
        time.sleep(self.chance.uniform(least, self.plan.seconds))

    def _freeze(self, *pids: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self.pause()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def freeze_client(self) -> None:
        self._freeze(self.running_client.pid)

    def freeze_worker(self) -> None:
        self._freeze(self.chance.choice(self.workers).pid)

    def freeze_redis(self) -> None:
        self.expected_ends.add(2)
        assert self.redis is not None
        self._freeze(self.redis.pid)

    def freeze_postgresql(self) -> None:
        self.expected_ends.add(2)
        assert self.postgres is not None
        self._freeze(*self.postgres.pids())

    def kill_client(self) -> None:
        self.running_client.kill()
        self.expected_ends.add(-signal.SIGKILL)

    def interrupt_client(self) -> None:
        self.running_client.send_signal(signal.SIGINT)
        # Before Python runs, the signal ends it.
        self.expected_ends |= {130, -signal.SIGINT}
        self.running_client.wait(60)

    def kill_worker(self) -> None:
        which = self.chance.randrange(len(self.workers))
        self.workers[which].kill()
        self.workers[which].wait()
        self.workers[which] = self.start_worker()

    def kill_redis(self) -> None:
        self.expected_ends.add(2)
        assert self.redis is not None
        self.redis.kill()
        self.pause(least=0.0)
        self.redis.start()

    def kill_postgresql(self) -> None:
        self.expected_ends.add(2)
        assert self.postgres is not None
        if self.chance.random() < 0.5:
            self.postgres.restart(crash=True)
        else:  # One connection's process: the server then ends all the others, and recovers.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(self.postgres.pids()[1:]), signal.SIGKILL)

    def reset_connections(self) -> None:
        self.expected_ends.add(2)
        proxy = self.chance.choice(self.proxies)
        proxy.reset_share = self.chance.uniform(0.05, 0.3)
        self.pause()
        proxy.calm()

    def black_hole(self) -> None:
        self.expected_ends.add(2)
        proxy = self.chance.choice(self.proxies)
        proxy.dropped = self.chance.choice((frozenset({"up"}), frozenset({"down"}), frozenset({"up", "down"})))
        self.pause()
        proxy.calm()

    def fill_disk(self) -> None:
        if self.postgres is None:
            ballast = self.folder / "disk" / "ballast"
            self.expected_ends |= {2, 3}
            if not ballast.parent.is_mount():
                self._limit_files()
                return
            with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            self.pause()
            ballast.unlink()
            return
        with psycopg.connect(self.direct, autocommit=True) as admin:
            admin.execute(
                "CREATE OR REPLACE FUNCTION full_disk() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION "
                "'no space left on device' USING ERRCODE = 'disk_full'; END $$ LANGUAGE plpgsql"
            )
            admin.execute("CREATE TRIGGER full_disk BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION full_disk()")
            self.pause()
            admin.execute("DROP TRIGGER full_disk ON results")

    def _limit_files(self) -> None:
        """Where no small disk can be mounted: the client may write no file beyond a size."""
        pid = self.running_client.pid
        with contextlib.suppress(ProcessLookupError):
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_BYTES, before[1]))
            self.pause()
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    def lose_commits(self) -> None:
        assert self.postgres is not None
        self.postgres.back_up()
        before, until = self.executions, time.monotonic() + 5
        while self.executions < before + self.plan.trials // 20 and time.monotonic() < until:
            time.sleep(0.02)
        self.expected_ends |= {2, 3, 4}
        network = self.proxies[0]
        network.held = True  # What is lost is counted: nothing is committed meanwhile.
        had = self.look().trials
        self.postgres.fail_over()
        self.outcome.lost += had - self.look().trials
        network.cut()
        network.held = False

    def lose_queue(self) -> None:
        assert self.redis is not None
        with self.redis.client() as raw:
            raw.flushall()

    def jump_clock(self) -> None:
        self.chance.choice(self.clocks).write_text(str(self.chance.choice((-86_400, -60, 60, 3_600, 86_400))))

    def delete_file(self) -> None:
        with contextlib.suppress(StoreError):
            self.outcome.lost += self.look().trials
        for path in (self.folder / "disk").glob("runs.db*"):
            path.unlink(missing_ok=True)
        self.expected_ends |= {2, 3}

    def other_code(self) -> None:
        self.strangers.append(self.start_worker(version="2"))

    def older_format(self) -> None:
        self.strangers.append(self.start_worker(format=VERSION - 1))

    def newer_format(self) -> None:
        assert self.redis is not None
        asyncio.run(_send_newer(self.redis.url))


class _Newer:
    """A request in a format that no worker here reads."""

    def to_wire(self) -> bytes:
        request = EvalRequest(TrialKey("run", "baseline", "s1", 0), Sample("s1", "why"))
        return json.dumps(json.loads(request.to_wire()) | {"v": VERSION + 1}).encode()

    @classmethod
    def from_wire(cls, data: bytes) -> _Newer:
        return cls()


async def _send_newer(url: str) -> None:
    broker = connect_broker(url)
    try:
        requests: Any = await broker.requests("fleet-test")
        await requests.send(_Newer())
    finally:
        await broker.close()


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[_Scene], None]]] = {
    "freeze the client": (KINDS, _Scene.freeze_client),
    "kill the client": (KINDS, _Scene.kill_client),
    "interrupt the client": (KINDS, _Scene.interrupt_client),
    "clock jump": (KINDS, _Scene.jump_clock),
    "disk full": (KINDS, _Scene.fill_disk),
    "delete the database file": (("sqlite",), _Scene.delete_file),
    "freeze PostgreSQL": (("postgresql", "fleet"), _Scene.freeze_postgresql),
    "kill PostgreSQL": (("postgresql", "fleet"), _Scene.kill_postgresql),
    "failover with lost commits": (("postgresql", "fleet"), _Scene.lose_commits),
    "connections reset": (("postgresql", "fleet"), _Scene.reset_connections),
    "black hole": (("postgresql", "fleet"), _Scene.black_hole),
    "freeze a worker": (("fleet",), _Scene.freeze_worker),
    "kill a worker": (("fleet",), _Scene.kill_worker),
    "freeze Redis": (("fleet",), _Scene.freeze_redis),
    "kill Redis": (("fleet",), _Scene.kill_redis),
    "queue lost": (("fleet",), _Scene.lose_queue),
    "worker with other code": (("fleet",), _Scene.other_code),
    "worker of an older format": (("fleet",), _Scene.older_format),
    "request of a newer format": (("fleet",), _Scene.newer_format),
}
"""Every fault, with the kinds of runs it can happen to."""


def run_with_faults(folder: Path, plan: FaultPlan, tell: Callable[[str], None] = lambda line: None) -> FaultOutcome:
    """Carry out one run under faults.

    Raises:
        Broken: a result is missing, wrong or stored twice, or an exit code does not say what is stored.
    """
    chance = random.Random(f"{plan.seed}:{plan.number}")
    kind = plan.kind or chance.choice(KINDS)
    possible = [name for name, (kinds, _) in FAULTS.items() if kind in kinds]
    names = plan.faults or tuple(chance.sample(possible, chance.randint(2, 5)))
    schedule = [(chance.uniform(0.05, 0.85), name) for name in names]
    _open_gate(folder, plan, sorted(schedule))
    scene = _Scene(plan, chance, folder, FaultOutcome(kind), tell)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_servers(scene))
        try:
            _inject_faults(scene, sorted(schedule), began)
        except (Broken, subprocess.TimeoutExpired) as error:
            assert scene.fleet is not None
            done = ", ".join(scene.outcome.faults)
            raise Broken(
                f"run {plan.number} of seed {plan.seed} ({kind}; {done}): {error}\n{scene.fleet.logs()}"
            ) from None
    scene.outcome.seconds = time.monotonic() - began
    scene.outcome.executions = scene.executions
    return scene.outcome


@contextlib.contextmanager
def _servers(scene: _Scene) -> Iterator[None]:
    """Start what the run needs, with a proxy before each server."""
    folder, kind = scene.folder, scene.outcome.kind
    with contextlib.ExitStack() as stack:
        mailbox = ""
        if kind == "sqlite":
            disk = folder / "disk"
            disk.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)]
            if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
                stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
            scene.store = scene.direct = f"sqlite:///{disk}/runs.db"
        else:
            scene.postgres = PostgresServer()
            stack.callback(scene.postgres.close)
            scene.postgres.start()
            scene.direct = scene.postgres.new_database()
            proxy = stack.enter_context(Proxy(scene.postgres.port))
            scene.proxies.append(proxy)
            scene.store = scene.direct.replace(f":{scene.postgres.port}/", f":{proxy.port}/")
        if kind == "fleet":
            scene.redis = stack.enter_context(RedisServer(folder / "redis"))
            proxy = stack.enter_context(Proxy(scene.redis.port))
            scene.proxies.append(proxy)
            mailbox = f"redis://127.0.0.1:{proxy.port}/0"
        settings: dict[str, Any] = {
            "samples": scene.plan.trials,
            "log": folder / "executed",
            "sleep": "0.05,0.3" if kind == "fleet" else "0.01,0.1",
            "concurrency": 20,
            "gate": folder / "gate",
            "timeout": 120,  # Trials wait at the gate, for no fault of theirs.
        }
        scene.fleet = stack.enter_context(Processes(folder, mailbox, **settings))
        yield


def _open_gate(folder: Path, plan: FaultPlan, schedule: list[tuple[float, str]]) -> None:
    """Let trials begin up to a little beyond the next fault, so that each fault happens to a run under way."""
    limit = int(schedule[0][0] * plan.trials) + 100 if schedule else plan.trials
    (folder / "next-gate").write_text(str(limit))
    (folder / "next-gate").replace(folder / "gate")


def _inject_faults(scene: _Scene, schedule: list[tuple[float, str]], began: float) -> None:
    plan = scene.plan
    scene.start_client()
    if scene.redis is not None:
        scene.workers = [scene.start_worker() for _ in range(plan.workers)]
    complete = False
    starts, begun, moved = 1, 0, began
    while not complete:
        if scene.executions != begun:
            begun, moved = scene.executions, time.monotonic()
        if time.monotonic() - began > plan.limit_seconds:
            raise Broken(f"not done after {plan.limit_seconds:g} s with {scene.look()}")
        code = scene.running_client.poll()
        if code is not None:
            complete = scene.check_end(code)
            if not complete:
                starts += 1
                if starts > _MAX_STARTS:
                    raise Broken(f"not done after {_MAX_STARTS} starts")
                time.sleep(0.2)
                scene.start_client()
        # Lost requests are sent again when all others are done: trials that wait at the gate must not wait for them.
        elif schedule and (begun >= schedule[0][0] * plan.trials or (begun and time.monotonic() - moved > 5)):
            _, name = schedule.pop(0)
            scene.tell(f"  {time.monotonic() - began:5.1f} s, {scene.executions:5d} begun: {name}")
            scene.outcome.faults.append(name)
            FAULTS[name][1](scene)
            _open_gate(scene.folder, plan, schedule)
        else:
            time.sleep(0.03)
            if not schedule and scene.executions >= plan.trials:  # Every trial has begun: the last upgrade is done.
                for stranger in scene.strangers:
                    stranger.terminate()
    if scene.redis is not None:
        with scene.redis.client() as raw:
            if dead := raw.xlen(_DEAD):
                raise Broken(f"{dead} requests were set aside")
