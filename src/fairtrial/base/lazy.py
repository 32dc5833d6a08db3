"""Packages whose names are imported on first use: the stub of the package, `__init__.pyi`, lists them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package whose stub imports every name that it exports."""
    spec: Any = sys.modules[package].__spec__
    stub = ast.parse(spec.loader.get_data(f"{spec.origin}i"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    for name, home in homes.items():
        if home == f"{package}.{name}":  # Importing the module would set the name of the package to the module.
            find(name)
    return find, lambda: sorted({*vars(sys.modules[package]), *homes}), sorted(homes)
