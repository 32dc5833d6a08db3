"""How many confirmed messages a killed Redis loses while the disk is busy, and how fast it takes them, by durability.

    python benchmarks/redis_loss.py [--rounds 40] [--server /path/to/redis-server]

Fails if a durable mode loses one: `always`, and from Redis 7.2 on `everysec` with WAITAOF. For `everysec` alone, the
default, it prints what was lost: while an earlier flush is under way, Redis confirms messages up to two seconds before
it writes them to its file.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import figure
from tests.mailbox.kill_under_load import Outcome, busy_disk, kill_under_load
from tests.redis_server import RedisServer

SENDERS = 400  # Tasks of one process that send at once.
# The name of each mode, its settings, and how many messages: a fifth of them are sent before the kill.
MODES = (
    ("always", "always", "?durable=yes", 2_000),
    ("everysec, WAITAOF", "everysec", "?durable=yes", 2_000),
    ("everysec", "everysec", "", 8_000),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--server", default="redis-server")
    options = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {name: [] for name, *_ in MODES}
    for _ in range(options.rounds):
        for name, policy, query, sends in MODES:  # In turns: the machine is the same for all.
            with (
                tempfile.TemporaryDirectory() as folder,
                busy_disk(Path(folder)),
                RedisServer(Path(folder) / "redis", "--appendfsync", policy, binary=options.server) as server,
            ):
                with server.client() as client:
                    version = tuple(map(int, client.info()["redis_version"].split(".")[:2]))
                if query and policy == "everysec" and version < (7, 2):
                    continue
                load = kill_under_load(server, server.url + query, sends=sends, senders=SENDERS)
                outcomes[name].append(asyncio.run(load))
    kept = True
    for name, _, query, _ in MODES:
        if not (found := outcomes[name]):
            continue
        confirmed, lost = sum(len(outcome.confirmed) for outcome in found), sum(outcome.lost for outcome in found)
        what = f"`appendfsync {name}`, {len(found)} kills of Redis under load"
        limit = 0 if query else None
        kept &= figure(f"{what}: confirmed messages lost", lost, f"of {confirmed:,}", at_most=limit)
        figure(f"{what}: confirmed per second", statistics.median(one.per_second for one in found))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
