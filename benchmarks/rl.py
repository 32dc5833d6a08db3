"""What reinforcement learning costs: scoring through a reward function, and grouping rollouts from SQLite.

    .venv/bin/python benchmarks/rl.py [--completions 2000] [--rollouts 10000] [--rounds 5]

Each figure is compared with a bare equivalent in the same process, in turns; the smallest CPU time of all rounds
counts.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairtrial import Dataset, EvalSuite, Metric, Sample, Score, open_store
from fairtrial.reports import EvalReport
from fairtrial.rl import groups, reward
from fairtrial.store.protocol import RunRecord
from fairtrial.trials import EvalResult, TrialKey

SCORING_FACTOR, SCORING_SECONDS = 3.0, 0.0002
GROUPING_FACTOR = 3.0


def letters(output: str, expected: str) -> Score:
    """A small evaluator with three metrics."""
    share = sum(map(str.islower, output)) / max(len(output), 1)
    return Score(
        metrics=(Metric("letters", share, 2.0), Metric("right", float(output == expected), 1.0), Metric("n", 3))
    )


data = Dataset([Sample(f"s{i}", f"say {i}", str(i)) for i in range(100)], name="words")
suite = EvalSuite("words", data, str, letters)


def smallest(rounds: int, *actions: Callable[[], Any]) -> list[float]:
    """The smallest CPU time of each action, which take turns."""
    best = [float("inf")] * len(actions)
    for _ in range(rounds):
        for place, action in enumerate(actions):
            began = time.process_time()
            action()
            best[place] = min(best[place], time.process_time() - began)
    return best


def scoring(count: int, rounds: int) -> dict[str, float]:
    """Score completions by the bare evaluator, and through the reward function as a trainer calls it."""
    function = reward(suite)
    said = [f"some words of an answer {i}" for i in range(count)]
    samples = [data[i % len(data)] for i in range(count)]
    columns = {
        "sample_id": [sample.id for sample in samples],
        "sample": [
            json.dumps({"id": sample.id, "input": sample.input, "expected": sample.expected}) for sample in samples
        ],
    }
    conversations = [[{"role": "assistant", "content": text}] for text in said]
    prompts = [[{"role": "user", "content": sample.input}] for sample in samples]

    def bare() -> list[float]:
        return [letters(text, sample.expected or "").reward for text, sample in zip(said, samples, strict=True)]

    def rewarded() -> list[float | None]:
        return function(prompts=prompts, completions=conversations, **columns)

    assert bare() == rewarded()
    alone, through = smallest(rounds, bare, rewarded)
    return {"bare_ms": alone / count * 1e3, "reward_ms": through / count * 1e3}


def stored(path: Path, count: int) -> EvalReport:
    """A run of `count` rollouts in groups of 8, with outputs and three metrics each."""
    store = open_store(str(path))
    size = count // 8
    record = RunRecord("bench", "bench", "words", "1", "x", size, ("baseline",), 8)
    run = store.create_run(record)
    for start in range(0, size, 100):
        results = [
            EvalResult(
                key=TrialKey("bench", "baseline", f"s{place}", repeat),
                ordinal=run.ordinal(place, 0, repeat),
                outcome="scored",
                score=letters("some words" * (repeat + 1), "x"),
                output_json='"some words of an answer"',
            )
            for place in range(start, min(start + 100, size))
            for repeat in range(8)
        ]
        samples = {place: Sample(f"s{place}", "q", "x") for place in range(start, min(start + 100, size))}
        committed = store.commit("bench", results, samples)
        assert committed.new == len(results), committed
    store.update_run("bench", status="finished", finished_at=1.0)
    return EvalReport(store, store.get_run("bench"))


def grouping(count: int, rounds: int) -> dict[str, float]:
    """Read the rows of a run with plain SQL, and as groups with advantages."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.db"
        report = stored(path, count)

        def bare() -> int:
            with sqlite3.connect(path) as connection:
                rows = connection.execute("SELECT * FROM results ORDER BY ordinal").fetchall()
            return len(rows)

        def slim() -> int:
            with sqlite3.connect(path) as connection:
                rows = connection.execute(
                    "SELECT ordinal, outcome, value, reward, metrics FROM results ORDER BY ordinal"
                ).fetchall()
            return len([json.loads(row[4]) for row in rows])

        def grouped() -> int:
            return sum(len(group.rollouts) for group in groups(report))

        assert bare() == slim() == grouped() == count // 8 * 8
        alone, few, through = smallest(rounds, bare, slim, grouped)
        report.store.close()
    return {"sql_ms": alone * 1e3, "slim_ms": few * 1e3, "groups_ms": through * 1e3}


def main() -> int:
    from figures import figure  # beside this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=2_000)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    scored = scoring(options.completions, options.rounds)
    grouped = grouping(options.rollouts, options.rounds)
    limit = SCORING_FACTOR * scored["bare_ms"] + SCORING_SECONDS * 1e3
    ratio = grouped["groups_ms"] / grouped["sql_ms"]
    kept = figure(
        "a reward for a completion", scored["reward_ms"] * 1000, "us of CPU", at_most=limit * 1000,
        cpu_us=scored["reward_ms"] * 1000, bare_cpu_us=scored["bare_ms"] * 1000,
    )  # fmt: skip
    what = f"{options.rollouts:,} rollouts as groups, against their rows by bare SQL"
    cpu = {
        "cpu_us": grouped["groups_ms"] / options.rollouts * 1000,
        "bare_cpu_us": grouped["sql_ms"] / options.rollouts * 1000,
    }
    kept &= figure(what, ratio, "x the CPU time", at_most=GROUPING_FACTOR, **cpu)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
