"""A long run in which workers, client, Redis and PostgreSQL are killed again and again.

python benchmarks/fleet_soak.py [--trials 500000] [--minutes 60]

The same as the chaos test, for longer: a worker is killed every 3 s, Redis and PostgreSQL are restarted and the client
is killed at every twentieth of the way. Prints one JSON line; fails if a trial is lost, stored twice or set aside.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fleet.chaos import Plan, run_chaos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    steps = [step / 20 for step in range(1, 20)]
    plan = Plan(
        trials=options.trials,
        workers=options.workers,
        queue_kill_at=tuple(steps[0::4]),
        queue_restart_at=tuple(steps[2::4]),
        client_kill_at=tuple(steps[1::2]),
        postgres_restart_at=tuple(step + 0.025 for step in steps[3::4]),
        limit_seconds=60 * options.minutes,
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_chaos(Path(folder), plan, lambda line: print(line, file=sys.stderr))
    extra = outcome.executions / plan.trials - 1
    print(json.dumps({**dataclasses.asdict(outcome), "extra_executions": round(extra, 4)}))
    if outcome.stored != plan.trials or outcome.outcomes != {"scored": plan.trials} or outcome.dead_letters:
        raise SystemExit("a trial was lost, failed or set aside")


if __name__ == "__main__":
    main()
