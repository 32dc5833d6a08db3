"""Measure designs, in one process or in several."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pkgutil import iter_modules
from zlib import crc32

import numpy as np

from . import Design, Finding, Measured, monte_carlo_error

RUNS = 4_000


def families() -> list[str]:
    """Return the names of all families."""
    package = import_module(__package__)
    return sorted(one.name for one in iter_modules(package.__path__) if not one.name.startswith("_"))


def designs_of(family: str) -> list[Design]:
    """Return the designs of a family."""
    return list(import_module(f".{family}", __package__).designs())


def measure_designs(
    only: Sequence[str] = (),
    *,
    quick: bool = False,
    runs: int = RUNS,
    cell: str = "",
    jobs: int = 1,
    known: Collection[tuple[str, str, str, str]] = (),
) -> Iterator[Finding]:
    """Measure the designs of the families `only` (all if empty) whose name or cell contains `cell`, in their order.

    `known` are the cells to skip: family, design, cell and what.
    """
    tasks = [
        (family, place, runs, quick)
        for family in only or families()
        for place, design in enumerate(designs_of(family))
        if (design.quick or not quick) and cell in f"{design.name}, {design.cell}"
        if (family, design.name, design.cell, design.what) not in known
    ]
    if jobs == 1:
        yield from map(_measure, tasks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_measure, tasks)


def _measure(task: tuple[str, int, int, bool]) -> Finding:
    family, place, runs, quick = task
    design = designs_of(family)[place]
    wanted = 0 if design.exact else design.quick if quick else min(runs, design.most or runs)
    rng = np.random.default_rng(crc32(f"{design.name}, {design.cell}: {design.what}".encode()))
    start = time.perf_counter()
    found = design.measure(wanted, rng)
    seconds = time.perf_counter() - start
    if not isinstance(found, Measured):
        found = Measured(float(found))
    error = monte_carlo_error(found.figure, wanted) if found.error is None else found.error
    return Finding(
        family,
        design.name,
        design.cell,
        design.what,
        design.limit,
        found.figure,
        error,
        wanted,
        found.unwarned,
        seconds,
    )
