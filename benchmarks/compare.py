"""Time and memory of comparing two stored runs.

    python benchmarks/compare.py [SAMPLES] [METRICS] [REPEATS] [--against COMMIT] [--limit 1.5] [--rounds 3]

Two runs are written to an SQLite store in a temporary folder; then a fresh process opens it, reads both runs, and
compares them on all metrics for the first time: there are no column files. Printed are the seconds of the comparison
and the growth of its memory over what it had after its imports; without slices, 6 seconds of CPU time and 400 MB are
the most for 100,000 samples with 10 metrics. With --against, the sources of that commit compare the same store in turns
with those at hand, on one core; printed is the ratio of the CPU seconds (the median of the rounds), and a ratio above
the limit fails.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fairtrial import Metric, Sample, Score
from fairtrial.store import RunRecord, RunStore, open_store
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult

BATCH = 1_000
CPU_SECONDS = 6.0
GROWN_MB = 400

MEASURE = """
import json, pathlib, sys, time
import fairtrial
from fairtrial import EvalReport, compare, open_store

assert len(sys.argv) < 4 or pathlib.Path(fairtrial.__file__).is_relative_to(sys.argv[3]), fairtrial.__file__

def memory(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field + ":")) / 1024

store = open_store(sys.argv[1])
reports = [EvalReport(store, store.get_run(name)) for name in ("one", "other")]
for report in reports:
    report.pass_rate
before, start, used = memory("VmRSS"), time.perf_counter(), time.process_time()
comparison = compare(*reports, metrics=None, slice_by=json.loads(sys.argv[2]))
seconds, used = time.perf_counter() - start, time.process_time() - used
found = comparison.candidates[0]
print(json.dumps({
    "seconds": seconds,
    "cpu_seconds": used,
    "grown_mb": memory("VmHWM") - before,
    "matched": found.matched,
    "metrics": len(found.metrics),
    "slices": len(found.slices),
    "verdicts": sorted({metric.verdict for metric in found.metrics}),
}))
"""


def fill(store: RunStore, run_id: str, samples: int, metrics: int, repeats: int, lift: float) -> None:
    """One run: graded metrics and a pass, a little better by `lift`; a hundredth of the trials fails."""
    draw = random.Random(run_id)
    store.create_run(RunRecord(run_id, "bench", "facts", "1", "f" * 32, samples, ("baseline",), repeats))
    for start in range(0, samples, BATCH):
        batch, facts = [], {}
        for place in range(start, min(start + BATCH, samples)):
            facts[place] = Sample(f"sample-{place:08d}", f"question {place}", "answer", {"topic": f"t{place % 8}"})
            for repeat in range(repeats):
                key = TrialKey(run_id, "baseline", facts[place].id, repeat)
                ordinal = place * repeats + repeat
                if draw.random() < 0.01:
                    batch.append(
                        EvalResult(
                            key=key,
                            ordinal=ordinal,
                            outcome="timeout",
                            error="too slow",
                            stage="task",
                            execution=ordinal,
                        )
                    )
                    continue
                value = min(1.0, draw.random() + lift)
                parts = [Metric(f"metric {n}", min(1.0, draw.random() + lift)) for n in range(metrics)]
                score = Score(value, value > 0.3, metrics=parts)
                batch.append(
                    EvalResult(
                        key=key,
                        ordinal=ordinal,
                        outcome="scored",
                        score=score,
                        output="an answer",
                        latency_ms=100,
                        execution=ordinal,
                    )
                )
        store.commit(run_id, batch, facts)
    store.update_run(run_id, status="finished")


def measure(
    where: str, slice_by: list[str], python: str = sys.executable, source: Path | None = None
) -> dict[str, float]:
    """What a fresh process needs to compare the two runs of a store, with the package of `source` if there is one."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "FAIRTRIAL_CACHE_DIR": cache}
        done = subprocess.run(
            [python, "-c", MEASURE, where, json.dumps(slice_by), *([] if source is None else [str(source)])],
            cwd=None if source is None else source.parent,
            env=environment if source is None else {**environment, "PYTHONPATH": str(source)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def against(where: str, commit: str, rounds: int, slice_by: list[str]) -> list[tuple[float, float]]:
    """CPU seconds of a comparison at a commit and now, a pair for each round."""
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root / "benchmarks"))
    from against_commit import extract  # type: ignore[import-not-found]  # not a package

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # Inherited by everything that is started here.
    with tempfile.TemporaryDirectory() as folder:
        sources = (extract(commit, Path(folder)), root / "src")
        measured = [[measure(where, slice_by, source=one)["cpu_seconds"] for one in sources] for _ in range(rounds)]
        return [(before, now) for before, now in measured]


def main() -> int:
    """Print what a comparison takes, or how it compares with another commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", nargs="?", type=int, default=100_000)
    parser.add_argument("metrics", nargs="?", type=int, default=10)
    parser.add_argument("repeats", nargs="?", type=int, default=1)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = f"{options.samples:,} samples x {options.repeats} repeats x {options.metrics} metrics"
    with tempfile.TemporaryDirectory() as folder:
        where = str(Path(folder) / "runs.db")
        store = open_store(where)
        for name, lift in (("one", 0.0), ("other", 0.01)):
            fill(store, name, options.samples, options.metrics, options.repeats, lift)
        store.close()
        if options.against is not None:
            ratios = []
            for slice_by in ([], ["topic"]):
                pairs = against(where, options.against, options.rounds, slice_by)
                ratios.append(statistics.median(now / before for before, now in pairs))
                print(f"{size}, slices {slice_by or 'none'}, CPU seconds, {options.against} -> now")
                print("  " + ", ".join(f"{before:.2f} -> {now:.2f}" for before, now in pairs))
                print(f"  ratio {ratios[-1]:.2f} (limit {options.limit:g})", flush=True)
            return 1 if max(ratios) > options.limit else 0
        missed = False
        for slice_by in ([], ["topic"]):
            found = measure(where, slice_by)
            times = f"{found['cpu_seconds']:.1f} s of CPU time ({found['seconds']:.1f} s)"
            print(f"{size}, slices {slice_by or 'none'}: {times}, {found['grown_mb']:.0f} MB")
            if not slice_by and (options.samples, options.metrics, options.repeats) == (100_000, 10, 1):
                missed = found["cpu_seconds"] > CPU_SECONDS or found["grown_mb"] > GROWN_MB
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
