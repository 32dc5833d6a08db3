"""Runs cgroup_program.py of the tests of sandboxes on a kernel with writable control groups: limits by cgroup v2.

python scripts/peers cgroups [--folder DIR]

The kernel is User-mode Linux (Debian's package user-mode-linux, 40 MB), a program that needs no privileges: it is
downloaded into DIR (default: a folder for temporary files) and not installed. It starts with this machine's files,
read-only, and with Python of .venv. It takes half a minute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "integrations" / "sandbox" / "cgroup_program.py"
SECONDS = 600
INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t cgroup2 none /sys/fs/cgroup
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={root}
cd {root} && {python} {program}
echo o > /proc/sysrq-trigger
sleep 60
"""


def kernel(folder: Path) -> Path:
    """Download the kernel, if it is not there; returns its program."""
    found = folder / "usr" / "bin" / "linux.uml"
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "--quiet", "user-mode-linux"], cwd=folder, check=True)
        (package,) = folder.glob("user-mode-linux_*.deb")
        subprocess.run(["dpkg", "-x", package, folder], check=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fairtrial-cgroups")
    folder = parser.parse_args().folder.resolve()
    program = kernel(folder)
    init = folder / "init"
    init.write_text(INIT.format(root=ROOT, python=sys.executable, program=PROGRAM))
    init.chmod(0o755)
    command = [program, "mem=1500M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}"]
    done = subprocess.run(
        [*command, "con=null", "con0=null,fd:1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    lines = [line.strip() for line in done.stdout.splitlines()]
    passed = "all checks passed" in lines
    print("\n".join(line for line in lines if line.startswith(("ok: ", "failed: ", "all "))) if passed else done.stdout)
    return 0 if passed else 1
