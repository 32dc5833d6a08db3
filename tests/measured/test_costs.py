"""Costs relative to a bare equivalent, measured alternately in the same run, so that other load affects both."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from scipy.stats import binomtest

from fairtrial import Dataset, Sample, ToolInvoked, contains, exact_match, tool_called
from fairtrial.scoring import Case, resolve
from fairtrial.store.schema import details, results, samples
from fairtrial.testing import session_of
from tests.figures import ROOT, Figure

pytestmark = pytest.mark.measured

MOST_PAIRS = 17
LINES = 500_000  # Half a million lines in half of the memory that a million may take.

MEMORY = """
import json, pathlib, random, sys
from fairtrial import Dataset

def resident(field="VmRSS"):
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field + ":"))

Dataset.load("warm.jsonl", lazy=True)
before = resident()
dataset = Dataset.load("big.jsonl", lazy=True)
count = sum(1 for _ in dataset)
chosen = [dataset[n].id for n in random.Random(1).sample(range(count), 200)]
expected = [f"sample-{n}" for n in random.Random(1).sample(range(count), 200)]
assert chosen == expected
print(json.dumps({"count": count, "grown_mb": (resident("VmHWM") - before) / 1024}))
"""


def medians(rounds: int, *work: Callable[[], object]) -> list[float]:
    """The median time of each piece of work, all of them done in turn."""
    times: list[list[float]] = [[] for _ in work]
    for _ in range(rounds):
        for piece, taken in zip(work, times, strict=True):
            started = time.perf_counter()
            piece()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in times]


def write_rows(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            row = {
                "id": f"sample-{number}",
                "input": {"question": f"What is {number} plus {number + 1}?", "topic": "sums"},
                "expected": str(2 * number + 1),
                "metadata": {"level": number % 7},
            }
            file.write(json.dumps(row) + "\n")
    return path


@pytest.mark.long  # Memory, which a neighbour does not change.
@pytest.mark.proves("R5")
def test_half_a_million_lines_cost_under_20_mb_with_ids_checked(tmp_path: Path, child: Any, figure: Figure) -> None:
    write_rows(tmp_path / "warm.jsonl", 100)
    write_rows(tmp_path / "big.jsonl", LINES)
    found = json.loads(child(MEMORY))
    assert found["count"] == LINES
    figure("lazy dataset of 500,000 lines: MB of memory", found["grown_mb"], at_most=20)


@pytest.mark.proves("R5")
def test_a_lazy_dataset_is_read_at_no_less_than_half_the_speed_of_bare_json(tmp_path: Path, figure: Figure) -> None:
    path = write_rows(tmp_path / "slice.jsonl", 20_000)
    dataset = Dataset.load(path, lazy=True)

    def bare() -> None:
        with path.open("rb") as file:
            for line in file:
                json.loads(line)

    def lazy() -> None:
        for _ in dataset:
            pass

    base, ours = medians(15, bare, lazy)
    figure("lazy dataset: time to read, x bare JSON", ours / base, at_most=2)


@pytest.mark.proves("R12", "R13")
@pytest.mark.parametrize("name", ["exact_match", "contains", "tool_called"])
def test_the_canonical_call_costs_at_most_five_bare_calls(name: str, figure: Figure) -> None:
    session = session_of(ToolInvoked("search"))
    fn: Any = {"exact_match": exact_match, "contains": contains, "tool_called": tool_called("search")}[name]
    args = ("a", "a", session) if name == "tool_called" else ("a", "a")
    scorer, sample = resolve(fn), Sample("s", "q", "a")
    count = 3_000

    def bare() -> None:
        for _ in range(count):
            fn(*args)

    async def scored() -> None:
        for _ in range(count):
            await scorer.score(Case(sample, "a", session))

    base, ours = medians(15, bare, lambda: anyio.run(scored))
    figure(f"scoring with {name}: time, x a bare call", ours / base, at_most=5)


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import overhead  # type: ignore[import-not-found]  # not a package

    return overhead


def test_the_loop_that_trials_are_compared_with_stores_the_same_columns(overhead: Any, tmp_path: Path) -> None:
    overhead.reference([("s1", "question 1", "answer 1")], tmp_path)
    with closing(sqlite3.connect(tmp_path / "reference.db")) as database:
        for table in (samples, results, details):
            stored = [name for _place, name, *_ in database.execute(f"PRAGMA table_info({table.name})")]
            assert sorted(stored) == sorted(table.columns.keys())


def test_a_trivial_trial_costs_at_most_twice_a_loop_that_stores_the_same_facts(overhead: Any, figure: Figure) -> None:
    cases = [(f"s{number}", f"question {number}", f"answer {number}") for number in range(30_000)]
    for contestant in (overhead.reference, overhead.fairtrial):
        overhead.measure(contestant, cases[:200])
    # In turns: a busy neighbour slows down some pairs, on either side. More of them while they do not agree.
    ratios: list[float] = []
    limit, agree = 2, False
    while len(ratios) < MOST_PAIRS and not agree:
        ratios.append(overhead.measure(overhead.fairtrial, cases) / overhead.measure(overhead.reference, cases))
        kept = sum(ratio <= limit for ratio in ratios)
        agree = bool(binomtest(kept, len(ratios)).pvalue < 0.01)
    figure("a trivial trial: CPU time, x the reference loop", statistics.median(ratios), at_most=limit)


# Processor time: importing waits for nothing, and a busy neighbour does not count.
IMPORT = "import time\nstarted = time.process_time()\n{}\nprint(time.process_time() - started)"


def test_importing_costs_at_most_a_third_more_than_what_everyone_imports(
    child: Any, tmp_path: Path, figure: Figure
) -> None:
    # Both from compiled files of this test's own: installed packages come compiled, a checkout may not.
    compiled = {"PYTHONPYCACHEPREFIX": str(tmp_path / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}

    def seconds(what: str) -> float:
        return float(child(IMPORT.format(what), **compiled))

    baseline, ours = "from pydantic import TypeAdapter\nimport anyio", "import fairtrial"
    seconds(baseline)
    seconds(ours)
    times = [(seconds(baseline), seconds(ours)) for _ in range(9)]
    base, own = (min(pair[side] for pair in times) for side in (0, 1))
    figure("import fairtrial: CPU time, x pydantic and anyio", own / base, at_most=1.3)


FIRST_TRIAL = """
import os
from fairtrial import Dataset, EvalSuite, exact_match

suite = EvalSuite("first", Dataset.of({"a": "A"}), lambda text: os._exit(0), exact_match)
"""
LIBRARIES = "import anyio, asyncio, pydantic, rich.console, rich.table, sqlalchemy.dialects.sqlite, typer"


def least_cpu_seconds(folder: Path, *commands: list[str]) -> list[float]:
    """The least CPU time of each program of three times, in turns, with its bytecode in the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    times: list[list[float]] = [[] for _ in commands]
    for _ in range(4):
        for command, taken in zip(commands, times, strict=True):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, *command], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return [min(taken[1:]) for taken in times]  # The first one compiles.


def test_a_command_starts_in_little_more_than_its_libraries_take(tmp_path: Path, figure: Figure) -> None:
    (tmp_path / "evals.py").write_text(FIRST_TRIAL)
    ours, typer, first, libraries = least_cpu_seconds(
        tmp_path,
        ["-m", "fairtrial.cli", "--help"],
        ["-c", "import typer"],
        ["-m", "fairtrial.cli", "run", "evals.py", "--resume", "never"],
        ["-c", LIBRARIES],
    )
    figure("`fairtrial --help`: CPU time, x importing typer", ours / typer, at_most=1.5)
    figure("`fairtrial run` to its first trial: CPU time, x importing its libraries", first / libraries, at_most=2.3)
