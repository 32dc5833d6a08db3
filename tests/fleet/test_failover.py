"""A whole fleet while the Redis server with its queue is lost and a replica takes over.

Replication is asynchronous: messages that the old master had confirmed may be missing on the new one. The client sends
the missing requests again, so every trial is stored once; some may be executed twice.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from fairtrial.fleet.queues import requests_name
from fairtrial.mailbox.redis.receive import Keys
from tests.fleet.processes import Processes, end, said, wait_for_lines
from tests.redis_groups import RedisCluster, SentinelGroup
from tests.redis_server import RedisServer

SAMPLES = 400
STREAM = Keys.of(requests_name("fleet-test")).stream


def run_with_a_failover(folder: Path, url: str, lost: RedisServer, replica: RedisServer) -> dict[str, int]:
    """Run a suite with two workers and kill a server in mid-run; returns what became of the trials.

    Before that, the replica is cut off for a moment: what the server confirms from then on is lost with it.
    """
    log = folder / "executed"
    with Processes(folder, url, samples=SAMPLES, log=log, sleep="0.01,0.05") as fleet:
        workers = [fleet.worker("--concurrency", "20", "--lease", "5") for _ in range(2)]
        client = fleet.client(f"{folder}/runs.db")
        wait_for_lines(log, SAMPLES // 4)
        os.kill(replica.pid, signal.SIGSTOP)
        with lost.client() as master:
            master.execute_command("CLIENT", "KILL", "TYPE", "replica")
        begun = wait_for_lines(log, log.read_bytes().count(b"\n") + 40)
        lost.kill()
        os.kill(replica.pid, signal.SIGCONT)
        assert begun < SAMPLES, "killed too late to show anything"
        answer = said(client, 120)
        assert (answer["status"], answer["successful"]) == ("finished", SAMPLES), fleet.logs()
        assert [end(worker) for worker in workers] == [0, 0], fleet.logs()
        resent = sum(map(int, re.findall(r"(\d+) requests were lost or never sent", fleet.logs())))
    executed = Counter(map(int, log.read_text().split()))
    assert set(executed) == set(range(SAMPLES))
    with closing(sqlite3.connect(folder / "runs.db")) as connection:
        stored = connection.execute("SELECT sample, count(*) FROM results WHERE passed GROUP BY sample ORDER BY sample")
        assert stored.fetchall() == [(number, 1) for number in range(SAMPLES)]
    again = sum(executed.values()) - SAMPLES
    assert again > 0, "nothing that was confirmed was lost"
    return {"resent": resent, "executed again": again}


@pytest.mark.redis
@pytest.mark.long
@pytest.mark.proves("R69", "R79")
def test_every_trial_is_stored_once_when_sentinels_replace_the_master(tmp_path: Path) -> None:
    with SentinelGroup(tmp_path / "servers") as group:
        lost = group.master
        (replica,) = (server for server in group.servers if server is not lost)
        print(run_with_a_failover(tmp_path, group.url, lost, replica))
        assert group.master is not lost


@pytest.mark.redis
@pytest.mark.long
@pytest.mark.proves("R69", "R79")
def test_every_trial_is_stored_once_when_a_cluster_replaces_the_node_of_the_queue(tmp_path: Path) -> None:
    with RedisCluster(tmp_path / "servers", replicas=1) as cluster:
        lost = cluster.primary_of(STREAM)
        replica = cluster.servers[cluster.servers.index(lost) + 3]
        print(run_with_a_failover(tmp_path, cluster.url, lost, replica))
        assert cluster.primary_of(STREAM) is not lost
