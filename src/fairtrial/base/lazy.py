"""Names of a package that are imported on first use, and names that other names have replaced."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], replaced: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Args:
        package: The `__name__` of the package.
        homes: Names, with the modules of the package that define them.
        replaced: Deprecated names, with the full names of what replaces them. They work, and warn.
    """
    replaced = replaced or {}

    def find(name: str) -> Any:
        if name in replaced:
            message = f"{package}.{name} is deprecated: use {replaced[name]}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            module, _, new = replaced[name].rpartition(".")
            return getattr(import_module(module), new)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *homes})
