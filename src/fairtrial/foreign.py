"""Rules for files that others wrote: where the paths they name may lead, and how far their content may expand."""

from __future__ import annotations

from pathlib import Path

from fairtrial.errors import DataError


def inside(folder: Path, name: str | Path) -> Path:
    """Return the path of a file that foreign data names. It must be in the folder, also after following links.

    Raises:
        DataError: the path leads out of the folder, or cannot be a path.
    """
    path = folder / name
    try:
        root, target = folder.resolve(), path.resolve()
        target.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # Where it would be is known; the reader says what is wrong with it.
    except (OSError, ValueError, RuntimeError):  # Too long, with a null character, or a circle of links.
        target = root = folder
    if root == target or not target.is_relative_to(root):
        raise DataError(f"{str(name)[:200]!r} must be a file in {folder} (it leads elsewhere)")
    return path
