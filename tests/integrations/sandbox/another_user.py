"""Commands of tests as another user, even if Python or this repository is in a directory that only root can read."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534

_SCRIPT = """
set -e
mount -t tmpfs -o mode=0755 stage /mnt
number=0
for path in $PATHS; do mkdir /mnt/$number; mount --bind $path /mnt/$number; number=$((number + 1)); done
for cover in $COVERS; do mount -t tmpfs -o mode=0755 cover $cover; done
number=0
for path in $PATHS; do mkdir -p $path; mount --bind /mnt/$number $path; number=$((number + 1)); done
umount -l /mnt
exec setpriv --reuid 65534 --regid 65534 --clear-groups env -u PATHS -u COVERS HOME=/nonexistent "$@"
"""


def _cover(path: Path) -> Path | None:
    """The topmost directory on the way to a path through which other users cannot go."""
    ways = [path, *path.parents][::-1]
    return next((way for way in ways if not way.stat().st_mode & stat.S_IXOTH), None)


def as_another_user(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command and its environment that run `argv` as "nobody" if this is root, else as this user."""
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    if os.getuid() != 0:
        return argv, environment
    needed = [Path(sys.base_prefix).resolve(), ROOT, Path(sys.prefix).resolve()]
    hidden = {path: cover for path in dict.fromkeys(needed) if (cover := _cover(path)) is not None}
    environment["PATHS"] = " ".join(map(str, hidden))
    environment["COVERS"] = " ".join(dict.fromkeys(map(str, hidden.values())))
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _SCRIPT, "sh", *argv], environment
