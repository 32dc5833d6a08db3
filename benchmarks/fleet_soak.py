"""A fleet under load in which something fails every six seconds, for an hour; its store is then judged in plain SQL.

    python benchmarks/fleet_soak.py [--engine one-transaction|redis|postgresql|sqs] [--minutes 60]
                                    [--fault-seconds 6] [--trials 10000] [--workers 2]

Workers are killed and frozen beyond their lease, clients killed and started again, the database killed with all its
children, its connections terminated, and the queue killed where it is a server of its own: in `one-transaction` it is
in the database of the store. The emulator of SQS, which would lose everything, is paused for 5 s instead. Runs follow
one another until the time is over. The memory of a worker that is never killed, and of the client, is printed each
minute.

Prints one JSON line; fails if a trial of a run is missing, stored twice or wrong, if its sample or its details are, if
a message was set aside, or if the worker's memory grew by more than 1.1 times after the first third of the time.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fleet.load import LoadOutcome, LoadPlan, run_load

FLAT = 1.1


def grown(outcome: LoadOutcome) -> float:
    """How many times the worker's memory at the end is that after a third of the time."""
    sizes = [look["worker_mb"] for look in outcome.memory]
    return round(sizes[-1] / sizes[len(sizes) // 3], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engine", choices=("one-transaction", "redis", "postgresql", "sqs"), default="one-transaction"
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--fault-seconds", type=float, default=6.0, help="how often something fails")
    parser.add_argument("--trials", type=int, default=10_000, help="of each run")
    parser.add_argument("--workers", type=int, default=2, help="that are killed, beside one that is not")
    parser.add_argument("--seed", type=int, default=20261117)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what was started.
    plan = LoadPlan(**vars(options))
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_load(Path(folder), plan, lambda line: print(line, file=sys.stderr, flush=True))
    extra = outcome.executions - outcome.stored
    figures = {
        "extra_executions": extra,
        "extra_share": round(extra / outcome.stored, 4),
        "worker_grown": grown(outcome),
    }
    print(json.dumps({"engine": plan.engine, **vars(outcome), **figures}))
    if outcome.broken:
        raise SystemExit("broken: " + ", ".join(outcome.broken))
    if grown(outcome) > FLAT:
        raise SystemExit(f"the memory of the worker grew by {grown(outcome)} times")


if __name__ == "__main__":
    main()
