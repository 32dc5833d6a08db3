"""What a trial costs now against what it cost at another commit: CPU time, locally, through a fleet and per model call.

    python benchmarks/against_commit.py COMMIT [--limit 1.05] [--rounds 20] [--only overhead|fleet|adapter]

Both versions run the same workloads: those of this checkout, with the sources of the commit in front. They run at the
same time on the same core, so that the scheduler has them take turns every few milliseconds and a busy neighbour
affects both equally. CPU time includes workers and Redis, not the start of processes or the model server. Prints every
round and the median of their ratios; fails above the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
TRIALS = {"overhead": 4_000, "fleet": 3_000, "adapter": 1_500}


def extract(commit: str, folder: Path) -> Path:
    """Write the sources of a commit into a folder; returns what goes into PYTHONPATH."""
    packed = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def measure(workload: str, trials: int) -> float:
    """CPU microseconds per trial, with the sources that are imported here."""
    if workload == "overhead":
        import overhead  # type: ignore[import-not-found]  # not a package

        cases = [(f"s{i}", f"question {i}", f"answer {i}") for i in range(trials)]
        return float(overhead.measure(overhead.fairtrial, cases))
    if workload == "adapter":
        import adapter  # type: ignore[import-not-found]  # not a package

        with adapter.spawn_model_server(adapter.Reply("Paris.")) as server:
            _rates, costs = asyncio.run(adapter.measure(server.base_url, trials, 20, 1, only="adapter"))
        return float(costs["adapter"][0]) * 1000
    import fleet_throughput  # type: ignore[import-not-found]  # not a package

    with tempfile.TemporaryDirectory() as folder:
        used = fleet_throughput.ours(Path(folder), trials, workers=2).cpu_seconds
    return float(used) / trials * 1e6


def serve(workload: str) -> None:
    """Measure once for each line of standard input."""
    import fairtrial

    source = Path(os.environ["PYTHONPATH"])
    assert Path(fairtrial.__file__).is_relative_to(source), f"{fairtrial.__file__} is not of {source}"
    measure(workload, 500)  # Imports and first-use costs are not per-trial costs.
    for _ in sys.stdin:
        print(measure(workload, TRIALS[workload]), flush=True)


@contextmanager
def started(workload: str, source: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that measures with these sources."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", workload],
        cwd=source.parent,  # Each has its sources in the current folder, or they count as code of the user's.
        env={**os.environ, "PYTHONPATH": str(source)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process


def compare(workload: str, sources: list[Path], rounds: int) -> list[tuple[float, float]]:
    """CPU microseconds per trial of both versions, one pair per round."""
    pairs = []
    with started(workload, sources[0]) as before, started(workload, sources[1]) as now:
        for _ in range(rounds):
            for process in (before, now):
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            assert before.stdout is not None
            assert now.stdout is not None
            pairs.append((float(before.stdout.readline()), float(now.stdout.readline())))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--limit", type=float, default=1.05)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=sorted(TRIALS))
    parser.add_argument("--serve", choices=sorted(TRIALS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # Inherited by everything that is started here.
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        sources = [extract(options.commit, Path(folder)), ROOT / "src"]
        for workload in [options.only] if options.only else sorted(TRIALS, reverse=True):
            pairs = compare(workload, sources, options.rounds)
            ratios = [now / before for before, now in pairs]
            ratio = statistics.median(ratios)
            failed |= ratio > options.limit
            print(f"{workload}: {TRIALS[workload]} trials a round, CPU microseconds each, {options.commit} -> now")
            print("  " + ", ".join(f"{first:.0f} -> {second:.0f}" for first, second in pairs))
            print(
                f"  ratio {ratio:.3f}, rounds {min(ratios):.3f} to {max(ratios):.3f} (limit {options.limit:g})",
                flush=True,
            )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
