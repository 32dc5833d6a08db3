"""The cost of the live progress display."""

from __future__ import annotations

import os
import pty
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.test_screens import environment
from tests.figures import Figure

TRIVIAL = """
from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match, task


@task(inline=True)
def same(number: int) -> int:
    return number


suite = EvalSuite(
    "trivial", Dataset([Sample(str(number), number, number) for number in range(40_000)]), same, exact_match
)
"""


def spent(place: Path, *words: str) -> float:
    """The processor time of a whole run in a terminal: on a busy machine the clock on the wall says little."""
    ours, theirs = pty.openpty()

    def drain() -> None:
        while True:
            try:
                if not os.read(ours, 65536):
                    return
            except OSError:
                return

    reader = threading.Thread(target=drain)
    reader.start()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        subprocess.run(
            [sys.executable, "-m", "fairtrial.cli", "run", "trivial.py", "--json", *words, "--store", "trivial.db"],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            check=True,
            cwd=place,
            timeout=280,
            env=environment(COLUMNS="80", LINES="24"),
        )
    finally:
        os.close(theirs)
        reader.join(30)
        os.close(ours)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.measured
def test_live_progress_costs_at_most_15_percent(place: Path, figure: Figure) -> None:
    (place / "trivial.py").write_text(TRIVIAL)
    # Taken in turns, the best of each: a burst of someone else's work affects both.
    quiet, live = [], []
    for _ in range(2):
        quiet.append(spent(place, "--quiet"))
        live.append(spent(place))
    print(f"quiet {min(quiet):.1f} s, live {min(live):.1f} s: {min(live) / min(quiet):.3f}")
    figure("live progress: CPU time, x a quiet run", min(live) / min(quiet), at_most=1.15)
