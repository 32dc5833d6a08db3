"""Sandboxes whose limits are kept by control groups, on a kernel that has them; run by `scripts/peers cgroups` as init.

Prints one line for each check, and "all checks passed" at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio

from fairtrial.integrations.sandbox import Sandbox, SandboxLimits

MIB = 1024 * 1024
GROUPS = Path("/sys/fs/cgroup")
LIMITS = SandboxLimits(seconds=30, memory=128 * MIB, processes=20, disk=16 * MIB)
FORKS = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError:
    print(n)
"""
HOG = "import os, time\nfor _ in range(7): os.fork() == 0 or None\nx = b'x' * (60 << 20)\ntime.sleep(20)"


def require(condition: bool, text: str) -> None:
    if not condition:
        raise SystemExit(f"failed: {text}")
    print(f"ok: {text}", flush=True)


async def check(place: str) -> None:
    async with Sandbox(limits=LIMITS) as box:
        require(box.enforcement == "cgroup", f"{place}: the kernel keeps the limits ({box.enforcement})")
        (group,) = GROUPS.rglob("fairtrial-sandbox-*")
        require((group / "pids.max").read_text() == "22\n", f"{place}: the limit of processes is set")
        inside = (await box.exec(["cat", "/proc/self/cgroup"])).stdout.strip()
        require(inside.endswith(group.name), f"{place}: commands are in the group")
        forks = await box.exec(["python3", "-c", FORKS])
        require(forks.success and 10 <= int(forks.stdout) <= LIMITS.processes, f"{place}: {forks.stdout.strip()} forks")
        hog = await box.exec(["python3", "-c", HOG])
        peak = int((group / "memory.peak").read_text()) if (group / "memory.peak").exists() else 0
        require(not hog.success and peak <= 300 * MIB, f"{place}: memory is limited, {peak // MIB} MiB at most")
        require((await box.exec(["echo", "on"])).stdout == "on\n", f"{place}: the sandbox works on")
    require(not list(GROUPS.rglob("fairtrial-sandbox-*")), f"{place}: the group is removed")


def main() -> None:
    if len(sys.argv) > 1:  # In a group of its own, as a service or a container is.
        (GROUPS / "service" / "cgroup.procs").write_text(str(os.getpid()))
        anyio.run(check, "own group")
        anyio.run(check, "own group again")
        return
    anyio.run(check, "root group")
    (GROUPS / "service").mkdir()
    subprocess.run([sys.executable, __file__, "service"], check=True)
    print("all checks passed", flush=True)


if __name__ == "__main__":
    main()
