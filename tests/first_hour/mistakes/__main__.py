"""Run the mistakes against the package that this Python has, and print the table.

python -m tests.first_hour.mistakes              every case, one row each; exit 1 if one is not as judged
python -m tests.first_hour.mistakes --quick      those that take little time; --slow: the others
python -m tests.first_hour.mistakes NAME ...     these, with what is printed
"""

from __future__ import annotations

import os
import sys
from collections import Counter

from tests.first_hour.mistakes.cases import CASES
from tests.first_hour.mistakes.process import judge


def main(names: list[str]) -> int:
    kinds = {"--quick": (False,), "--slow": (True,)}.get(names[0] if names else "", (False, True))
    names = [name for name in names if not name.startswith("--")]
    chosen = [case for case in CASES if (case.name in names if names else case.slow in kinds)]
    if unknown := set(names) - {case.name for case in chosen}:
        print(f"there is no case {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    judged = judge(chosen)
    for one in judged:
        bad = "; ".join(one.faults)
        print(f"{one.name:28} {'BAD' if bad else one.verdict:10} exit {one.code:<4} {bad or one.why}")
        if names or bad:
            print(one.text)
    counts = Counter("bad" if one.faults else one.verdict for one in judged)
    shares = ", ".join(f"{counts[name]} {name}" for name in ("good", "acceptable", "bad"))
    spent = os.times()
    print(
        f"{len(judged)} of {len(chosen)} mistakes: {shares}; {spent.children_user + spent.children_system:.0f} s of CPU"
    )
    return 1 if counts["bad"] else 0


sys.exit(main(sys.argv[1:]))
