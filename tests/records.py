"""Which records of a package can be changed. Results, reports and settings are frozen: what was read stays as it is."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import is_dataclass


def changeable(package: str) -> set[str]:
    """The names of a package's dataclasses that are not frozen."""
    folder = importlib.import_module(f"fairtrial.{package}")
    found = set()
    for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.name:
                frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]  # not in the stubs
                found |= set() if frozen else {kind.__qualname__}
    return found
