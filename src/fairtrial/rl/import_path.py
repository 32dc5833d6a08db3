"""Find the import string of an object, so that other processes can load it instead of receiving a copy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.suites.loading import load_module


def import_path(value: object, what: str) -> str:
    """Return `module:name` (or `/path/script.py:name`) of an object that is a global variable of a module.

    Raises:
        ConfigurationError: no module that other processes can import has it as a variable.
    """
    for module, name in _homes(value):
        if module.__name__ != "__main__":
            return f"{module.__name__}:{name}"
        file = getattr(module, "__file__", None)
        if file and Path(file).is_file():
            spec = getattr(module, "__spec__", None)
            return f"{spec.name if spec is not None else Path(file).resolve()}:{name}"
    raise ConfigurationError(
        f"{what} must be a variable at the top level of a module, because processes of a trainer import it "
        "(it is none)\n"
        "assign it in a .py file, as in `suite = EvalSuite(...)`, and import it from there"
    )


def load_object(where: str) -> Any:
    """Return the object that an import string of `import_path` names."""
    place, _, name = where.rpartition(":")
    value: Any = load_module(place)
    for step in name.split("."):
        try:
            value = getattr(value, step)
        except AttributeError:
            raise ConfigurationError(f"there is no {name!r} in {place}: its code has changed since") from None
    return value


def _homes(value: object) -> Iterator[tuple[ModuleType, str]]:
    """Yield the modules that have the object as a variable, its own module first."""
    own = getattr(value, "__module__", None)
    home = getattr(value, "home", None)

    def distance(module: ModuleType) -> int:
        return (
            0 if getattr(module, "__name__", None) == own or (home and getattr(module, "__file__", None) == home) else 1
        )

    for module in sorted(sys.modules.values(), key=distance):
        for name, found in list(getattr(module, "__dict__", {}).items()):
            if found is value:
                yield module, name
