"""A long run in which workers, client, queue and store are killed again and again.

    python benchmarks/fleet_soak.py [--engine redis|postgresql|sqs] [--trials 500000] [--rounds 5] [--minutes 60]

The same as the chaos test, for longer: a worker is killed every 3 s, and in each round the queue and the store are
killed and restarted once and the client is killed twice. The emulator of SQS, which would lose everything, is paused
for 5 s instead. Prints one JSON line; fails if a trial is lost, stored twice or set aside.
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

EVENTS = 6  # Of a round.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("redis", "postgresql", "sqs"), default="redis")
    parser.add_argument("--trials", type=int, default=500_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kill-seconds", type=float, default=3.0, help="how often a worker is killed")
    options = parser.parse_args()
    steps = [step / (EVENTS * options.rounds + 1) for step in range(1, EVENTS * options.rounds + 1)]
    plan = Plan(
        trials=options.trials,
        queue=options.engine,
        workers=options.workers,
        kill_every_seconds=options.kill_seconds,
        queue_kill_at=tuple(steps[0::EVENTS]),
        client_kill_at=(*steps[1::EVENTS], *steps[4::EVENTS]),
        queue_restart_at=tuple(steps[2::EVENTS]),
        store_kill_at=tuple(steps[3::EVENTS]),
        store_restart_at=tuple(steps[5::EVENTS]),
        limit_seconds=60 * options.minutes,
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_chaos(Path(folder), plan, lambda line: print(line, file=sys.stderr, flush=True))
    extra = outcome.executions / plan.trials - 1
    print(json.dumps({"engine": plan.queue, **dataclasses.asdict(outcome), "extra_executions": round(extra, 4)}))
    if outcome.stored != plan.trials or outcome.outcomes != {"scored": plan.trials} or outcome.dead_letters:
        raise SystemExit("a trial was lost, failed or set aside")


if __name__ == "__main__":
    main()
