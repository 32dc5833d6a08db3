"""Time and memory of comparing two stored runs: python benchmarks/compare.py [samples] [metrics] [repeats]

Two runs are written to an SQLite store in a temporary folder; then a fresh process opens it, reads both runs, and
compares them on all metrics. Printed are the seconds of the comparison and the growth of its memory over what it had
after its imports.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from fairtrial import Metric, Sample, Score
from fairtrial.store import RunRecord, RunStore, open_store
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult

BATCH = 1_000

MEASURE = """
import json, pathlib, sys, time
from fairtrial import EvalReport, compare, open_store

def memory(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field + ":")) / 1024

store = open_store(sys.argv[1])
reports = [EvalReport(store, store.get_run(name)) for name in ("one", "other")]
for report in reports:
    report.pass_rate
before, start = memory("VmRSS"), time.perf_counter()
comparison = compare(*reports, metrics=None, slice_by=json.loads(sys.argv[2]))
seconds = time.perf_counter() - start
found = comparison.candidates[0]
print(json.dumps({
    "seconds": seconds,
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
                    batch.append(EvalResult(key, ordinal, "timeout", error="too slow", stage="task", execution=ordinal))
                    continue
                value = min(1.0, draw.random() + lift)
                parts = [Metric(f"metric {n}", min(1.0, draw.random() + lift)) for n in range(metrics)]
                score = Score(value, value > 0.3, metrics=parts)
                batch.append(EvalResult(key, ordinal, "scored", score, "an answer", 100, execution=ordinal))
        store.commit(run_id, batch, facts)
    store.update_run(run_id, status="finished")


def measure(where: str, slice_by: list[str], python: str = sys.executable) -> dict[str, float]:
    """What a fresh process needs to compare the two runs of a store."""
    done = subprocess.run(
        [python, "-c", MEASURE, where, json.dumps(slice_by)], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    given = [int(number) for number in sys.argv[1:4]]
    samples, metrics, repeats = (*given, *(100_000, 10, 1)[len(given) :])
    with tempfile.TemporaryDirectory() as folder:
        where = str(Path(folder) / "runs.db")
        store = open_store(where)
        fill(store, "one", samples, metrics, repeats, 0.0)
        fill(store, "other", samples, metrics, repeats, 0.01)
        store.close()
        for slice_by in ([], ["topic"]):
            found = measure(where, slice_by)
            print(
                f"{samples:,} samples x {repeats} repeats x {metrics} metrics, slices {slice_by or 'none'}: "
                f"{found['seconds']:.1f} s, {found['grown_mb']:.0f} MB"
            )


if __name__ == "__main__":
    main()
