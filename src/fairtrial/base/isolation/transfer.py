"""Serialize functions and arguments for a child process."""

from __future__ import annotations

import io
import os
import sys
import threading
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from fairtrial.errors import ConfigurationError

_lock = threading.Lock()
_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class NotSendableError(ConfigurationError):
    """A value cannot be sent to a child process."""


def pack(value: object, what: str) -> bytes:
    """Pickle a value for a child process: code that the child can import by name, other code by value.

    Raises:
        NotSendableError: the value refers to something that exists only in this process.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def reducer_override(self, found: Any) -> Any:
            if type(found) in _LOCKS:
                return _LOCKS[type(found)], ()  # The child gets a lock of its own.
            module = sys.modules.get(getattr(found, "__module__", None) or "")
            if module is not None and not _is_importable(module):
                cloudpickle.register_pickle_by_value(module)
            return super().reducer_override(found)

    with _lock, io.BytesIO() as file:
        try:
            Pickler(file).dump(value)
        except Exception as error:
            raise NotSendableError(
                f"{what} must be something that can be sent to a child process ({type(error).__name__}: {error})\n"
                "Open connections and files inside the function, define it in a module that can be imported, or "
                "remove isolate=True"
            ) from None
        return file.getvalue()


def check_sendable(value: object, what: str) -> None:
    """Raise unless a value can be sent to a child process."""
    pack(value, what)


_importable: dict[str, bool] = {}


def _is_importable(module: ModuleType) -> bool:
    """Return whether a new interpreter with the same `sys.path` would import the same file under the same name."""
    name = module.__name__
    file = getattr(module, "__file__", None)
    if name == "__main__" or file is None:
        return True  # cloudpickle always sends `__main__` by value; modules without a file are built in.
    found = _importable.get(name)
    if found is None:
        found = _importable[name] = _imported_from(name) == os.path.realpath(file)
    return found


def _imported_from(name: str) -> str | None:
    path = None
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        spec = PathFinder.find_spec(full, path)
        if spec is None:
            for finder in sys.meta_path:  # Editable installations add finders, in the child too.
                search = getattr(finder, "find_spec", None)
                spec = search(full, path) if search is not None else None
                if spec is not None:
                    break
            else:
                return None
        path = spec.submodule_search_locations
    return os.path.realpath(spec.origin) if spec is not None and spec.origin else None
