"""Check every statistical promise by enumeration or simulation: python benchmarks/coverage.py [--quick]

Each line is one cell of one design: the figure, the limit it is compared with, and whether it holds. What can be
enumerated is enumerated; the rest is simulated with fixed seeds and fails only beyond three Monte Carlo standard
errors. What is measured are the functions of the package themselves. A cell that no method reaches is "warned" if the
package prints its warning there. Exits with 1 if a cell fails. `coverage_designs/__init__.py` says how to add a design.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from coverage_designs._run import RUNS, families, measure_designs
from coverage_designs._tables import figure_text, limit_text, markdown, read_finding, runs_text, summary


def commit() -> str:
    """Return the commit that was measured."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def known_cells(path: Path) -> set[tuple[str, str, str, str]]:
    """Return family, design, cell and what of the findings in a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(one.family, one.design, one.cell, one.what) for one in map(read_finding, lines)}


def main() -> int:
    """Print a line for each cell, or a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fixed subset with fewer runs, within three minutes")
    parser.add_argument("--only", action="append", choices=families(), help="measure this family (repeatable)")
    parser.add_argument("--cell", default="", metavar="TEXT", help="measure designs whose name or cell contains this")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"runs of a simulated cell ({RUNS:,})")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--markdown", action="store_true", help="print a table of designs, each with its worst cell")
    parser.add_argument("--json", action="store_true", help="print every cell as JSON, one per line")
    parser.add_argument("--into", type=Path, metavar="FILE", help="append JSON to a file, skip the cells that it has")
    parser.add_argument("--read", type=Path, metavar="FILE", help="read what --json printed earlier, measure nothing")
    options = parser.parse_args()
    if options.read:
        found = [read_finding(line) for line in options.read.read_text(encoding="utf-8").splitlines()]
        print(f"{summary(found)}\n\n{markdown(found)}")
        return 1 if any(one.verdict == "FAILS" for one in found) else 0
    measured = commit()
    found = []
    known = set() if options.into is None else known_cells(options.into)
    for one in measure_designs(
        options.only or (), quick=options.quick, runs=options.runs, cell=options.cell, jobs=options.jobs, known=known
    ):
        found.append(one)
        if options.into is not None:
            with options.into.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"commit": measured, "verdict": one.verdict, **asdict(one)}) + "\n")
        line = f"{one.verdict:<7} {figure_text(one):<16} {limit_text(one.limit):<14} {one.family}: {one.design}, "
        line += f"{one.cell}: {one.what} ({runs_text(one)}, {one.seconds:.1f} s)"
        if options.json:
            line = json.dumps({"commit": measured, "verdict": one.verdict, **asdict(one)})
        print(line, flush=True, file=sys.stderr if options.markdown else sys.stdout)
    if options.markdown:
        print(f"Commit {measured}, {sum(one.seconds for one in found):.0f} s: {summary(found)}\n\n{markdown(found)}")
    return 1 if any(one.verdict == "FAILS" for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
