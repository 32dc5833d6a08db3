"""Try Fairtrial with the real tools of others, each in an environment of its own. Not part of CI.

python scripts/peers files       make the files that importers are tested with; run tasks of Inspect
python scripts/peers tracers     record what tracing libraries send; needs pip and npm
python scripts/peers receivers   send a run to Phoenix and MLflow and read it back
python scripts/peers trainers    train with TRL, verl, verifiers and others on a CPU
python scripts/peers side_by_side  one small task in Fairtrial and four other tools: lines, size, CPU, crash
python scripts/peers cgroups     limits of sandboxes by cgroup v2, on User-mode Linux, which needs no privileges
python scripts/peers versions    the tests on Python 3.12 to 3.14, Redis 8, Valkey 9 and PostgreSQL 18

Each has options: python scripts/peers NAME --help
"""

from __future__ import annotations

import sys
from importlib import import_module

NAMES = ("files", "tracers", "receivers", "trainers", "side_by_side", "cgroups", "versions")

if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
    print(__doc__)
    sys.exit(2)
name = sys.argv.pop(1)
sys.argv[0] = f"scripts/peers {name}"
sys.exit(import_module(name).main())
