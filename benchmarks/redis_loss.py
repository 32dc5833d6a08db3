"""How many confirmed messages a killed Redis loses while the disk is busy, by its `appendfsync`.

    python benchmarks/redis_loss.py [--rounds 40]

Fails if `appendfsync always`, the durable mode, loses one. For `everysec`, the default, it prints what was lost: while
an earlier flush is under way, Redis confirms messages up to two seconds before it writes them to its file.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import figure
from tests.mailbox.kill_under_load import busy_disk, kill_under_load
from tests.redis_server import RedisServer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    lost = {}
    for policy in ("always", "everysec"):
        outcomes = []
        for _ in range(rounds):
            with (
                tempfile.TemporaryDirectory() as folder,
                busy_disk(Path(folder)),
                RedisServer(Path(folder) / "redis", "--appendfsync", policy) as server,
            ):
                url = server.url + ("?durable=yes" if policy == "always" else "")
                outcomes.append(
                    asyncio.run(kill_under_load(server, url, sends=4_000 if policy == "always" else 16_000))
                )
        lost[policy] = sum(outcome.lost for outcome in outcomes)
        confirmed = sum(len(outcome.confirmed) for outcome in outcomes)
        hit = sum(outcome.lost > 0 for outcome in outcomes)
        print(f"appendfsync {policy:8}  {rounds} kills, {confirmed:,} confirmed, {lost[policy]:,} lost in {hit} kills")
        what = f"messages confirmed by Redis and lost in {rounds} kills, `appendfsync {policy}`"
        figure(what, lost[policy], f"of {confirmed:,}", at_most=0 if policy == "always" else None)
    return 1 if lost["always"] else 0


if __name__ == "__main__":
    sys.exit(main())
