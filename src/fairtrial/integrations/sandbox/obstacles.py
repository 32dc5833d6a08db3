"""Find out why bwrap cannot isolate here, and say which setting to change."""

from __future__ import annotations

import sys
from pathlib import Path

_APPARMOR = "kernel/apparmor_restrict_unprivileged_userns"
_MAXIMUM = "user/max_user_namespaces"
_CLONE = "kernel/unprivileged_userns_clone"


def find_obstacles(proc: Path = Path("/proc")) -> list[str]:
    """Return the settings of this machine that keep bwrap from making namespaces, each with its remedy."""
    found: list[str] = []
    if _setting(proc, _APPARMOR) == "1":
        found.append(
            "AppArmor forbids user namespaces (kernel.apparmor_restrict_unprivileged_userns=1): load an AppArmor "
            "profile for bwrap that has `userns`, or `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
        )
    if _setting(proc, _MAXIMUM) == "0":
        found.append(
            "the number of user namespaces is limited to 0 (user.max_user_namespaces=0): "
            "`sysctl user.max_user_namespaces=10000`"
        )
    if _setting(proc, _CLONE) == "0":
        found.append(
            "unprivileged user namespaces are switched off (kernel.unprivileged_userns_clone=0): "
            "`sysctl kernel.unprivileged_userns_clone=1`"
        )
    if _has_seccomp_filter(proc):
        found.append(
            "this process runs under a seccomp filter, as in a container with Docker's default profile: start the "
            "container with `--security-opt seccomp=PROFILE` that allows unshare, clone, mount and pivot_root"
        )
    return found


def _setting(proc: Path, name: str) -> str:
    try:
        return (proc / "sys" / name).read_text().strip()
    except OSError:
        return ""


def _has_seccomp_filter(proc: Path) -> bool:
    try:
        status = (proc / "self/status").read_text()
    except OSError:
        return False
    return any(line.split() == ["Seccomp:", "2"] for line in status.splitlines())


def explain_refusal(problem: str, proc: Path = Path("/proc")) -> str:
    """Return the message for a sandbox that cannot be made: what failed, why, and what to change."""
    lines = [f"cannot make a bwrap sandbox: {problem}"]
    if sys.platform != "linux":
        lines.append("  bwrap works on Linux only")
    else:
        lines += [f"  {obstacle}" for obstacle in find_obstacles(proc)]
    lines.append('  or name another kind: "docker", "podman", "inspect:NAME"; "unsafe-local" isolates nothing')
    return "\n".join(lines)
