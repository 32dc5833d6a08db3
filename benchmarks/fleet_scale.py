"""Many trials through a fleet: the queue and the client stay small, however many there are.

python benchmarks/fleet_scale.py [--trials 1000000] [--workers 2]

Starts its own redis-server and keeps results in SQLite. Looks at the memory of Redis and of the client (which submits
and collects) ten times a second. Prints one JSON line; fails if Redis used 60 MB or more, or if the client grew by more
than a quarter and 16 MB (modules that only the summary needs) after a tenth of the trials had been stored.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fleet.processes import Processes, end, said
from tests.redis_server import RedisServer

MB = 1024 * 1024


def measure(folder: Path, trials: int, workers: int) -> dict[str, Any]:
    """One run, watched."""
    most_redis = 0
    resident: list[tuple[int, float]] = []  # Stored trials and MB.
    with (
        RedisServer(folder / "redis", "--auto-aof-rewrite-min-size", "32mb") as redis,
        Processes(folder, redis.url, samples=trials, concurrency=500) as fleet,
        redis.client() as raw,
    ):
        started = [fleet.worker() for _ in range(workers)]
        store = folder / "runs.db"
        client = fleet.client(str(store))
        began = time.monotonic()
        while client.poll() is None:
            info: Any = raw.info("memory")
            most_redis = max(most_redis, info["used_memory"])
            if (now := _resident(client.pid)) is not None:
                resident.append((_stored(store), now))
            time.sleep(0.1)
        answer = said(client)
        seconds = time.monotonic() - began
        for worker in started:
            end(worker)
        logs = fleet.logs()
    if answer["successful"] != trials:
        raise SystemExit(f"{answer['successful']} of {trials} were scored\n{logs}")
    early = max(mb for stored, mb in resident if stored <= trials / 10)
    return {
        "trials": trials,
        "seconds": round(seconds, 1),
        "per_second": round(trials / answer["seconds"]),
        "redis_peak_mb": round(most_redis / MB, 1),
        "client_mb_after_a_tenth": round(early, 1),
        "client_peak_mb": round(max(mb for _, mb in resident), 1),
    }


def _resident(pid: int) -> float | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None  # It has just ended.
    return pages * 4096 / MB


def _stored(store: Path) -> int:
    """How many trials are stored; at the start of the run the file or its table may not be there yet."""
    if not store.exists():
        return 0
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        try:
            found = connection.execute(
                "SELECT ordinal + 1 FROM results ORDER BY run DESC, ordinal DESC LIMIT 1"
            ).fetchone()
        except sqlite3.OperationalError:
            return 0
    return found[0] if found else 0


def problems(figures: dict[str, Any]) -> list[str]:
    """Which targets were missed."""
    missed = []
    if figures["redis_peak_mb"] >= 60:
        missed.append(f"Redis used {figures['redis_peak_mb']} MB")
    if figures["client_peak_mb"] > 1.25 * figures["client_mb_after_a_tenth"] + 16:
        missed.append(f"the client grew from {figures['client_mb_after_a_tenth']} to {figures['client_peak_mb']} MB")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.trials, options.workers)
    print(json.dumps(figures))
    if missed := problems(figures):
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    main()
