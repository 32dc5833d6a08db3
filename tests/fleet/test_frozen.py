"""Fleets whose processes are frozen, disconnected or have wrong clocks. Run by scripts/attacks --soak."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from fairtrial import open_store
from tests.fleet.chaos import Plan, run_chaos
from tests.fleet.processes import Processes, said, wait_for_lines
from tests.proxy import Proxy
from tests.redis_server import RedisServer, free_port
from tests.servers import PostgresServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

TRIALS = 3000
LEASE = 5


@dataclass
class Fleet:
    folder: Path
    redis: RedisServer
    proxy: Proxy
    store: str
    processes: Processes
    workers: list[subprocess.Popen[str]] = field(default_factory=list)
    clients: list[subprocess.Popen[str]] = field(default_factory=list)

    def wait_for(self, trials: int) -> int:
        return wait_for_lines(self.folder / "executed", trials, timeout=120)

    @property
    def executed(self) -> int:
        return (self.folder / "executed").read_bytes().count(b"\n")


def freeze(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def freeze_workers(fleet: Fleet) -> None:
    for begun in (TRIALS // 5, TRIALS // 2):
        fleet.wait_for(begun)
        freeze([worker.pid for worker in fleet.workers[:2]], 2.5 * LEASE)


def freeze_redis(fleet: Fleet) -> None:
    fleet.wait_for(TRIALS // 3)
    freeze([fleet.redis.pid], 4 * LEASE)


def freeze_client(fleet: Fleet) -> None:
    fleet.wait_for(TRIALS // 5)
    freeze([fleet.clients[0].pid], 30)


def replace_frozen_client(fleet: Fleet) -> None:
    fleet.wait_for(TRIALS // 5)
    os.kill(fleet.clients[0].pid, signal.SIGSTOP)
    fleet.clients.append(fleet.processes.client(fleet.store))
    try:
        assert said(fleet.clients[1], timeout=240)["status"] == "finished"
    finally:
        os.kill(fleet.clients[0].pid, signal.SIGCONT)


def kill_redis_without_a_log(fleet: Fleet) -> None:
    fleet.wait_for(TRIALS // 3)
    fleet.redis.kill()
    shutil.rmtree(fleet.folder / "redis" / "appendonlydir")
    time.sleep(1)
    fleet.redis.start()


def fail_over(fleet: Fleet) -> None:
    """Promote a replica that is seconds behind, behind the same address."""
    port = free_port()
    folder = fleet.folder / "replica"
    folder.mkdir()
    replica = subprocess.Popen(
        [
            *("redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)),
            *("--replicaof", "127.0.0.1", str(fleet.redis.port), "--logfile", str(folder / "log")),
        ]
    )
    try:
        with redis_py.Redis(port=port) as client:
            while not in_step(client):
                time.sleep(0.1)
            fleet.wait_for(TRIALS // 4)
            os.kill(replica.pid, signal.SIGSTOP)
            time.sleep(4)
            fleet.redis.kill()
            os.kill(replica.pid, signal.SIGCONT)
            time.sleep(0.5)
            client.replicaof("NO", "ONE")
            fleet.proxy.target = port
            fleet.proxy.cut()
            fleet.clients[0].wait(240)
    finally:
        replica.kill()
        replica.wait()


def in_step(client: Any) -> bool:
    try:
        return bool(client.info("replication").get("master_link_status") == "up")
    except redis_py.RedisError:
        return False


def nothing(fleet: Fleet) -> None:
    """The clocks of the processes are wrong from the beginning."""


DAY = 86_400
# What happens, by how much the clocks of three workers and of the client are wrong, and how many trials may be
# executed twice: those whose lease ended, or what the queue lost.
FAULTS: dict[str, tuple[Callable[[Fleet], None], tuple[float, ...], int]] = {
    "workers frozen beyond their leases": (freeze_workers, (), 4 * 40),
    "Redis frozen": (freeze_redis, (), 3 * 40),
    "client frozen": (freeze_client, (), 0),
    "client frozen and replaced": (replace_frozen_client, (), 500),  # The batch that was being sent.
    "Redis killed without a log": (kill_redis_without_a_log, (), TRIALS // 4),
    "failover to a replica that is behind": (fail_over, (), TRIALS // 2),
    "clocks wrong by a day and a year": (nothing, (DAY, -365 * DAY, 0, -365 * DAY), 0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_trial_is_stored_once(name: str, tmp_path: Path, own_postgres: PostgresServer) -> None:
    happen, clocks, allowed = FAULTS[name]
    clocks = clocks or (0, 0, 0, 0)
    settings: dict[str, Any] = {"samples": TRIALS, "log": tmp_path / "executed", "sleep": "0.1,0.5", "concurrency": 40}
    with RedisServer(tmp_path / "redis") as redis, Proxy(redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with Processes(tmp_path, url, **settings) as processes:
            fleet = Fleet(tmp_path, redis, proxy, own_postgres.new_database(), processes)
            fleet.workers = [processes.worker("--lease", str(LEASE), clock=clock) for clock in clocks[:3]]
            fleet.clients = [processes.client(fleet.store, clock=clocks[3])]
            happen(fleet)
            answer = said(fleet.clients[0], timeout=300)
            assert (answer["status"], answer["successful"]) == ("finished", TRIALS), processes.logs()
    store = open_store(fleet.store)
    try:
        (run,) = store.runs()
        results = list(store.results(run.run_id, outputs=True))
    finally:
        store.close()
    assert [result.ordinal for result in results] == list(range(TRIALS))
    assert all(result.output == 2 * result.ordinal for result in results)
    assert 0 <= fleet.executed - TRIALS <= allowed


def test_sixty_thousand_trials_are_stored_once_while_everything_is_killed(tmp_path: Path) -> None:
    steps = [step / 10 for step in range(1, 10)]
    plan = Plan(
        trials=60_000,
        queue_kill_at=tuple(steps[0::2]),
        queue_restart_at=tuple(steps[1::2]),
        client_kill_at=tuple(step + 0.03 for step in steps),
        store_restart_at=tuple(step + 0.06 for step in steps[0::3]),
    )
    outcome = run_chaos(tmp_path, plan)
    assert (outcome.status, outcome.runs, outcome.stored, outcome.missing) == ("finished", 1, plan.trials, 0)
    assert outcome.outcomes == {"scored": plan.trials}
    assert outcome.executions - plan.trials < plan.trials / 4
