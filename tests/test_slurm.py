"""The array of `deploy/slurm.sbatch` on a real Slurm: one of its tasks is terminated in mid-run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.processes import SUITE, Processes, environment, said, wait_for_lines
from tests.redis_server import RedisServer
from tests.slurm import Slurm

SCRIPT = Path(__file__).resolve().parent.parent / "deploy" / "slurm.sbatch"
SAMPLES = 400


@pytest.mark.slurm
@pytest.mark.redis
@pytest.mark.long
@pytest.mark.proves("R61", "R83")
def test_a_run_is_complete_although_a_task_of_the_array_is_terminated(tmp_path: Path) -> None:
    log = tmp_path / "executed"
    settings: dict[str, Any] = {"samples": SAMPLES, "log": log, "sleep": "0.2,0.3"}
    with (
        RedisServer(tmp_path / "redis") as server,
        Slurm() as slurm,
        Processes(tmp_path, server.url, **settings) as fleet,
    ):
        client = fleet.client(f"{tmp_path}/runs.db")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        told = {**environment(**settings), "PATH": path, "FAIRTRIAL_MAILBOX": server.url}
        submit = ("sbatch", "--parsable", "--array=0-1", "--mem=100", "--time=5", str(SCRIPT), str(SUITE))
        job = slurm.command(*submit, "--concurrency", "8", "--empty-seconds", "1", **told)
        assert job.isdecimal(), job + slurm.logs()
        wait_for_lines(log, SAMPLES // 4)
        assert slurm.command("scancel", "--batch", "--signal=TERM", f"{job}_1") == ""
        assert said(client)["successful"] == SAMPLES, fleet.logs() + slurm.logs()
        for _ in range(200):
            if not slurm.command("squeue", "--noheader"):
                break
            time.sleep(0.1)
        left, terminated = ((slurm.folder / f"fairtrial-worker-{job}_{task}.log").read_text() for task in (0, 1))
    assert f"worker slurm-{job}-1 ended" in terminated
    assert "draining" in terminated
    assert f"worker slurm-{job}-0 ended" in left
    assert "SIGTERM" not in left  # It ended by itself, when the queue was empty.
    assert sorted(map(int, log.read_text().split())) == list(range(SAMPLES))  # Nothing was begun twice.
