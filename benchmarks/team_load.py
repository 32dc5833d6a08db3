"""People at the pages of `fairtrial serve`: ten projects, two hundred people, ten million trials, and a slow store.

    python benchmarks/team_load.py [--projects 10] [--trials 1000000] [--people 200] [--seconds 60]

Makes one store in SQLite and copies it for each project but the last, whose small store is on a PostgreSQL server
behind a proxy. Each person asks for a page every 30 seconds: lists, reports, tables, filters, trials. After a first
visit of each project, the pages are timed twice: as they are, and while every packet of the last project's store is
late by 0.3 seconds. Prints the p95 of the pages of the other projects, the ratio of the two, and the memory of the
server with its children. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp

from benchmarks.figures import figure
from benchmarks.viewer import make_run
from fairtrial import open_store
from fairtrial.viewer.team.database import TeamDatabase
from tests.proxy import Proxy
from tests.servers import PostgresServer, free_port

EVERY_SECONDS = 30.0
LATE_SECONDS = 0.3
PAGES = (
    "", "bench@1", "bench@1/trials", "bench@1/trials?outcome=failed", "bench@1/trials?m.kind=refund&sort=-score",
    "bench@1/t/baseline/q{:07}", "bench@1/t/careful/q{:07}", "history?suite=bench",
)  # fmt: skip


class Visits:
    """What people waited for, by whether the project is the slow one."""

    def __init__(self, base: str, projects: int, trials: int, small: int, secrets: list[str]) -> None:
        self._base = base
        self._projects = projects
        self._samples = trials // 2, small // 2
        self._secrets = secrets
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self.refused = 0

    async def ask(self, client: aiohttp.ClientSession, secret: str, project: int, page: str) -> None:
        """Ask for a page and note the time."""
        slow = project == self._projects - 1
        place = page.format(random.randrange(self._samples[slow]))
        began = time.perf_counter()
        headers = {"cookie": f"fairtrial={secret}"}
        async with client.get(f"{self._base}/p/project{project}/{place}", headers=headers) as answer:
            await answer.read()
            self.refused += answer.status != 200 and not slow
        self.times[slow].append(time.perf_counter() - began)

    async def warm(self) -> None:
        """Ask for each page of each project once."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as client:
            for project in range(self._projects):
                for page in PAGES:
                    await self.ask(client, self._secrets[0], project, page)

    async def run(self, seconds: float) -> None:
        """Let all people ask for pages."""
        self.times, self.refused = {False: [], True: []}, 0
        end = time.monotonic() + seconds
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
        ) as client:
            await asyncio.gather(*(self._person(client, secret, end) for secret in self._secrets))

    async def _person(self, client: aiohttp.ClientSession, secret: str, end: float) -> None:
        await asyncio.sleep(random.uniform(0, EVERY_SECONDS))
        while time.monotonic() < end:
            await self.ask(client, secret, random.randrange(self._projects), random.choice(PAGES))
            await asyncio.sleep(random.uniform(0.5, 1.5) * EVERY_SECONDS)

    def p95(self) -> float:
        """The p95 of the pages of the other projects."""
        return statistics.quantiles(self.times[False], n=20)[-1]


def memory_mb(pid: int) -> float:
    """Return the memory of a process and its children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    pids = [str(pid), *(child for task in tasks for child in (task / "children").read_text().split())]
    total = 0
    for one in pids:
        status = Path(f"/proc/{one}/status").read_text()
        total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return total / 1024


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--projects", type=int, default=10)
    parser.add_argument("--trials", type=int, default=1_000_000, help="of each project but the last")
    parser.add_argument("--people", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    random.seed(7)
    small = min(asked.trials, 2_000)
    with tempfile.TemporaryDirectory() as name, PostgresServer() as server, Proxy(server.port) as proxy:
        folder, port = Path(name), free_port()
        store = open_store(folder / "project0.db")
        make_run(store, asked.trials)
        store.close()
        for project in range(1, asked.projects - 1):
            shutil.copy(folder / "project0.db", folder / f"project{project}.db")
        address = server.new_database()
        store = open_store(address)
        make_run(store, small)
        store.close()
        parts = urlsplit(address)
        slow = parts._replace(netloc=parts.netloc.replace(f":{server.port}", f":{proxy.port}")).geturl()
        url = f"http://127.0.0.1:{port}"
        lines = [
            f'url = "{url}"', f'listen = "127.0.0.1:{port}"', "[identity]", 'kind = "oidc"',
            'issuer = "https://login.example.org"', 'client_id = "fairtrial"',
        ]  # fmt: skip
        for project in range(asked.projects):
            where = slow if project == asked.projects - 1 else f"project{project}.db"
            lines += [f"[projects.project{project}]", f'store = "{where}"', 'viewer = ["all"]']
        (folder / "team.toml").write_text("\n".join(lines))
        database = TeamDatabase(f"sqlite:///{folder}/team.db")
        secrets = []
        for person in range(asked.people):
            database.meet(f"person-{person}", f"Person {person}")
            secrets.append(database.open_session(f"person-{person}", ["all"]))
        database.close()
        process = subprocess.Popen(
            [sys.executable, "-m", "fairtrial.cli", "serve", "--config", "team.toml", "--json"],
            cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "FAIRTRIAL_CACHE_DIR": str(folder)},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("}"):
                assert process.poll() is None
            visits = Visits(url, asked.projects, asked.trials, small, secrets)
            asyncio.run(visits.warm())
            asyncio.run(visits.run(asked.seconds))
            calm, answered, refused = visits.p95(), len(visits.times[False]), visits.refused
            proxy.delay = LATE_SECONDS
            asyncio.run(visits.run(asked.seconds))
            beside, slowest = visits.p95(), statistics.median(visits.times[True] or [0.0])
            refused += visits.refused
            held = memory_mb(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    met = [
        figure("pages that were asked for", answered, at_least=1),
        figure("pages that were not answered", refused, at_most=0),
        figure("p95 of a page", calm, "s", at_most=1.0),
        figure("p95 of the other projects while one store is slow", beside, "s", at_most=1.0),
        figure("ratio of the two", beside / calm, at_most=1.5),
        figure("median of the slow project's pages", slowest, "s"),
        figure("memory of the server and its children", held, "MB"),
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
