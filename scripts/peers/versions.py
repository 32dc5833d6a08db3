"""Run the tests on newer versions of Python and of servers, and say how many ran and passed on each.

python scripts/peers versions [NAME...] [--folder DIR] [--chaos]

NAME is python3.12 to python3.14, redis, valkey or postgresql, unpacked into DIR by scripts/newer-parts (which needs
Debian) where this machine has none of that version, or system-redis or system-postgresql, which CI uses; all by
default. For a Python: what depends on its version (`scripts/check --tests-only`), in the environment of
`scripts/setup`. For a server: the conformance suites, the random schedules, and those of crashes and of each script;
with --chaos, also that in which all processes of a fleet are killed (minutes).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800  # For one test: the random schedules take minutes on a busy machine.
SUITES = ("tests/mailbox/test_conformance.py", "tests/mailbox/test_machine.py")
TESTS = {
    "redis-server": (*SUITES, "tests/mailbox/test_redis_failures.py", "tests/mailbox/test_redis_parts.py"),
    "postgres": (*SUITES, "tests/mailbox/test_postgres_failures.py", "tests/mailbox/test_postgres_parts.py"),
}
CHOSEN = {"redis-server": "redis", "postgres": "postgres"}  # In the names of tests, their classes and files.
CHAOS = {"redis-server": "redis-5000", "postgres": "postgresql-4000"}
PACKAGES = {"redis": "redis-server", "valkey": "valkey-server", "postgresql": "postgresql-18"}
PYTHONS = ("python3.12", "python3.13", "python3.14")  # 3.15 when gepa, which an extra needs, can be installed there.
NAMES = (*PYTHONS, "system-redis", "redis", "valkey", "system-postgresql", "postgresql")


def unpack(package: str, folder: Path) -> None:
    subprocess.run([ROOT / "scripts" / "newer-parts", folder, package], check=True, stdout=subprocess.DEVNULL)


def counts(report: Path) -> tuple[int, int]:
    """How many tests ran and how many passed, by a report of pytest."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    count = {key: int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors")}
    ran = count["tests"] - count["skipped"]
    return ran, ran - count["failures"] - count["errors"]


def run_on_python(name: str, folder: Path) -> tuple[str, int, int]:
    """Run the tests that depend on the version of Python; returns the version, how many ran and how many passed."""
    version = name.removeprefix("python")
    environment = ROOT / (".venv" if version == "3.12" else f".venv-{version}")
    found = subprocess.run([ROOT / "scripts" / "setup", version], cwd=ROOT, check=False).returncode == 0
    if not found:
        unpack(f"{name}-venv", folder)
        unpack(f"lib{name}-dev", folder)  # For libraries of the tests that have no wheel for this version yet.
        machine = folder / f"include-{name}" / "x86_64-linux-gnu"
        machine.mkdir(parents=True, exist_ok=True)
        if not (machine / name).exists():
            (machine / name).symlink_to(folder / "usr" / "include" / machine.name / name)
        settings = {"FAIRTRIAL_PYTHON": str(folder / "usr" / "bin" / name), "CPATH": str(machine.parent)}
        subprocess.run([ROOT / "scripts" / "setup", version], cwd=ROOT, check=True, env=os.environ | settings)
    report = folder / f"{name}.xml"
    report.unlink(missing_ok=True)
    check: list[str | Path] = [
        ROOT / "scripts" / "check",
        "--tests-only",
        "--venv",
        environment.name,
        f"--junitxml={report}",
    ]
    subprocess.run(check, cwd=ROOT, check=False)
    said = subprocess.run([environment / "bin" / "python", "--version"], capture_output=True, text=True, check=True)
    return said.stdout.split()[1], *counts(report)


def programs(name: str, folder: Path) -> Path:
    """Unpack a server, if it is not there; returns a folder in which the tests find it, and no other server."""
    if name in PACKAGES:
        unpack(PACKAGES[name], folder)
    if name.endswith("postgresql"):
        place = folder / "usr" if name in PACKAGES else Path("/usr")
        return max(place.glob("lib/postgresql/*/bin"), key=lambda path: int(path.parent.name))
    found = folder / "usr" / "bin" / PACKAGES[name] if name in PACKAGES else Path(shutil.which("redis-server") or "")
    only = folder / f"only-{name}"
    only.mkdir(parents=True, exist_ok=True)
    link = only / "redis-server"  # What the tests start, whatever it is.
    link.unlink(missing_ok=True)
    link.symlink_to(found)
    return only


def run_on_server(name: str, folder: Path, *, chaos: bool) -> tuple[str, int, int]:
    """Run the tests on a server; returns what it says of itself, how many tests ran and how many passed."""
    first = programs(name, folder)
    program = "postgres" if name.endswith("postgresql") else "redis-server"
    said = subprocess.run([first / program, "--version"], capture_output=True, text=True, check=True).stdout
    environment = {**os.environ, "PATH": f"{first}{os.pathsep}{os.environ['PATH']}"}
    runs: list[tuple[str, ...]] = [(*TESTS[program], "-k", CHOSEN[program])]
    if chaos:
        runs.append(("tests/fleet/test_chaos.py", "-k", CHAOS[program]))
    ran = passed = 0
    for tests in runs:
        report = folder / "junit.xml"
        report.unlink(missing_ok=True)
        options = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--timeout", str(SECONDS), "--junitxml", report)
        subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=environment, check=False)
        these, good = counts(report)
        ran, passed = ran + these, passed + good
    version = re.search(r"\d+\.\d+(\.\d+)?", said)
    assert version is not None, said
    return version.group(), ran, passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=NAMES, default=NAMES)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fairtrial-parts")
    parser.add_argument("--chaos", action="store_true")
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in chosen.names:
        found = run_on_python(name, folder) if name in PYTHONS else run_on_server(name, folder, chaos=chosen.chaos)
        rows.append((name, *found))
    print(f"\n{'system':<20}{'version':<10}{'tests run':>10}{'passed':>8}")
    for name, version, ran, passed in rows:
        print(f"{name:<20}{version:<10}{ran:>10}{passed:>8}")
    return 0 if all(ran == passed > 0 for _, _, ran, passed in rows) else 1
