"""Runs under random faults: freezes, kills, resets, black holes, full disks, lost commits, clock jumps, other versions.

    python benchmarks/chaos.py [--runs 50] [--trials 2000] [--seed 1] [--first 0]

Each run is local on SQLite, local on PostgreSQL, or a fleet's on Redis and PostgreSQL, by draw. After each end of the
command: no result is missing unless the exit code says so, none is wrong, none is stored twice. Then the same command
resumes the run.
A run is repeated by its seed and number: --seed N --first NUMBER --runs 1. As root, SQLite files are on a small disk of
their own, which is filled; else the size of files is limited.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fleet.random_faults import KINDS, Broken, FaultOutcome, FaultPlan, run_with_faults


def show(outcomes: list[FaultOutcome], trials: int) -> None:
    """Print the tables."""
    print("| runs | number | trials | lost by a fault | executed beyond plan and losses | ends by exit code |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        chosen = [outcome for outcome in outcomes if outcome.kind == kind]
        planned, lost = len(chosen) * trials, sum(outcome.lost for outcome in chosen)
        extra = sum(outcome.executions for outcome in chosen) - planned - lost
        ends = sum((outcome.exit_codes for outcome in chosen), Counter[int]())
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(ends.items()))
        share = f"{extra} ({extra / planned:.2%})" if planned else "0"
        print(f"| {kind} | {len(chosen)} | {planned} | {lost} | {share} | {codes} |")
    print("\n| fault | times |\n|---|---|")
    for name, times in Counter(name for outcome in outcomes for name in outcome.faults).most_common():
        print(f"| {name} | {times} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--trials", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    options = parser.parse_args()
    # Shells ignore interrupts in what they start in the background, and those who inherit that ignore them, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what was started.
    outcomes: list[FaultOutcome] = []
    failed = 0
    for number in range(options.first, options.first + options.runs):
        with tempfile.TemporaryDirectory(prefix="fairtrial-chaos-") as folder:
            print(f"run {number} of seed {options.seed}", flush=True)
            try:
                plan = FaultPlan(options.seed, number, options.trials)
                outcome = run_with_faults(Path(folder), plan, lambda line: print(line, flush=True))
            except Broken as error:
                failed += 1
                print(f"BROKEN: {error}", flush=True)
                continue
        outcomes.append(outcome)
        ends = dict(outcome.exit_codes)
        print(f"  {outcome.kind}: {outcome.executions} executed, {outcome.seconds:.0f} s, ends {ends}", flush=True)
    print(f"\nseed {options.seed}, {options.runs} runs of {options.trials} trials, {failed} broken")
    show(outcomes, options.trials)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
