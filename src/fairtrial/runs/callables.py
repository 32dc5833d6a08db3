"""Describes functions and objects by their code and parameters, identically in every process.

A description is plain JSON: no addresses, no order of sets, no module names that depend on how a file was loaded. Two
evaluators have the same description if they have the same code, composition and parameters. Functions of libraries are
described by name, because a change there shows in a lock file.
"""

from __future__ import annotations

import ast
import dis
import enum
import functools
import hashlib
import inspect
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fairtrial.codec import canonical
from fairtrial.types import JSON

HOOK = "__fairtrial_identity__"
"""The name of a method that returns the identity of an object as JSON, instead of its attributes."""

_DEEPEST = 12
_PLAIN = (str, int, float, bool, type(None))
_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARIES = (
    _OURS,
    *(
        os.path.realpath(path) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    ),
)
# Our own classes whose attributes are parameters; those of others (adapters, limiters) are state.
_PARAMETERS = ("fairtrial.scoring.", "fairtrial.judging.", "fairtrial.models.prompt")


def describe(value: Any, *, mutable: bool = True) -> JSON:
    """Describe a function or an object.

    Args:
        value: An evaluator, a task, or anything they refer to.
        mutable: Whether lists, mappings and attributes of objects count as parameters. For a task they are state, which
            changes while it runs.
    """
    return _Description(mutable).of(value, 0)


class _Description:
    def __init__(self, mutable: bool) -> None:
        self._mutable = mutable
        self._inside: set[int] = set()

    def of(self, value: Any, depth: int) -> JSON:
        if isinstance(value, enum.Enum):
            return ["enum", _place(type(value)), value.name]
        if type(value) in _PLAIN:
            return repr(value) if isinstance(value, float) else value
        if isinstance(value, bytes):
            return ["bytes", hashlib.sha256(value).hexdigest()]
        if id(value) in self._inside or depth > _DEEPEST:
            return ["again", type(value).__qualname__]
        self._inside.add(id(value))
        try:
            return self._structure(value, depth + 1)
        finally:
            self._inside.discard(id(value))

    def _structure(self, value: Any, depth: int) -> JSON:
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        if isinstance(value, functools.partial):
            keywords = {name: self.of(item, depth) for name, item in sorted(value.keywords.items())}
            return ["partial", self.of(value.func, depth), [self.of(item, depth) for item in value.args], keywords]
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__, depth), self.of(value.__self__, depth)]
        if isinstance(value, type):
            return self._class(value, depth)
        if isinstance(value, ModuleType) or inspect.isroutine(value):
            return ["name", str(getattr(value, "__module__", "")), getattr(value, "__qualname__", value.__name__)]
        if isinstance(value, re.Pattern):
            return ["pattern", self.of(value.pattern, depth), value.flags]
        if isinstance(value, PurePath):
            return ["path", str(value)]
        if isinstance(value, tuple | frozenset) or (self._mutable and isinstance(value, list | set)):
            items = [self.of(item, depth) for item in value]
            return ["items", sorted(items, key=canonical) if isinstance(value, set | frozenset) else items]
        if isinstance(value, Mapping) and (self._mutable or type(value) is not dict):
            pairs = [[self.of(key, depth), self.of(item, depth)] for key, item in value.items()]
            return ["mapping", sorted(pairs, key=canonical)]
        return self._object(value, depth)

    def _function(self, function: FunctionType, depth: int) -> JSON:
        code = function.__code__
        facts: dict[str, JSON] = {"function": _place(function)}
        if _is_library(code.co_filename):
            pass
        elif os.path.exists(code.co_filename):
            facts["code"] = _code_digest(code)
        else:  # Defined in a notebook or a console: its globals are in no file either.
            facts["code"] = _code_digest(code)
            facts["uses"] = self._globals(function, depth)
        if function.__defaults__:
            facts["defaults"] = [self.of(item, depth) for item in function.__defaults__]
        if function.__kwdefaults__:
            facts["keywords"] = {name: self.of(item, depth) for name, item in sorted(function.__kwdefaults__.items())}
        closure = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                closure[name] = self.of(cell.cell_contents, depth)
            except ValueError:
                continue  # Not assigned yet.
        if closure:
            facts["closure"] = closure
        return facts

    def _globals(self, function: FunctionType, depth: int) -> JSON:
        """Describe the constants, functions and classes that a function refers to."""
        found: dict[str, JSON] = {}
        for name in sorted(_names(function.__code__)):
            value = function.__globals__.get(name)
            if value is not None and isinstance(value, (*_PLAIN, bytes, tuple, frozenset, FunctionType, type)):
                found[name] = self.of(value, depth)
        return found

    def _class(self, cls: type, depth: int) -> JSON:
        module = sys.modules.get(cls.__module__)
        if cls.__module__ == "builtins" or getattr(module, "__file__", None):
            return ["class", _place(cls)]
        methods = {name: self.of(item, depth) for name, item in vars(cls).items() if isinstance(item, FunctionType)}
        return ["class", _place(cls), methods]

    def _object(self, value: Any, depth: int) -> JSON:
        kind = type(value)
        hook = getattr(kind, HOOK, None)
        if hook is not None:
            return ["object", _place(kind), hook(value)]
        described = self._class(kind, depth)
        call = getattr(kind, "__call__", None)  # noqa: B004 - the function itself, not a test
        code: JSON = None
        if isinstance(call, FunctionType) and not _is_library(call.__code__.co_filename):
            code = _code_digest(call.__code__)
        frozen = is_dataclass(value) and kind.__dataclass_params__.frozen
        ours = any(_module(kind).startswith(prefix) for prefix in _PARAMETERS)
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if ours or frozen or (self._mutable and not (file and _is_library(file))):
            attributes = {name: self.of(item, depth) for name, item in sorted(_attributes(value).items())}
            return ["object", described, code, attributes]
        # Attributes of clients, adapters and locks are state: only their names identify them.
        names = {name: item for name in ("model", "name") if isinstance(item := getattr(value, name, None), str)}
        return ["object", described, code, names]


def _module(kind: type) -> str:
    return f"{kind.__module__}."


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return found


def _place(thing: Any) -> str:
    """Return where something is defined: by file, because the module of an executed file is `__main__`."""
    module = str(getattr(thing, "__module__", ""))
    file = getattr(sys.modules.get(module), "__file__", None)
    where = Path(file).name if file and not _is_library(file) else module
    return f"{where}:{getattr(thing, '__qualname__', '')}"


@functools.lru_cache(maxsize=1024)
def _is_library(file: str) -> bool:
    """Return whether a file belongs to Fairtrial, to Python or to an installed package."""
    if file.startswith("<frozen"):
        return True
    real = os.path.realpath(file)
    return real.startswith(_LIBRARIES) or "site-packages" in real


@functools.lru_cache(maxsize=4096)
def _code_digest(code: CodeType) -> str:
    """Hash the code of a function: its source if available, else its bytecode and constants."""
    source = _source(code)
    content = _bytecode(code) if source is None else ["source", source]
    return hashlib.sha256(canonical(content)).hexdigest()[:32]


def _source(code: CodeType) -> str | None:
    """Return the source of a function without comments, decorators and layout; None if it cannot be determined."""
    if code.co_name == "<lambda>" or not os.path.exists(code.co_filename):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    found = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) or found.name != code.co_name:
        return None
    found.decorator_list = []
    return ast.unparse(found)


def _bytecode(code: CodeType) -> JSON:
    constants: list[JSON] = [_constant(item) for item in code.co_consts]
    return [
        "bytecode",
        code.co_code.hex(),
        constants,
        list(code.co_names),
        list(code.co_varnames),
        list(code.co_freevars),
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags],
    ]


def _constant(value: Any) -> JSON:
    if isinstance(value, CodeType):
        return _bytecode(value)
    if isinstance(value, tuple):
        return ["tuple", [_constant(item) for item in value]]
    if isinstance(value, frozenset):
        return ["frozenset", sorted((_constant(item) for item in value), key=canonical)]
    return [type(value).__name__, repr(value)]


def _names(code: CodeType) -> set[str]:
    """Return the global names that a function reads and does not assign, and those of the functions inside it."""
    stored = {item.argval for item in _instructions(code) if item.opname == "STORE_GLOBAL"}
    names = set(code.co_names) - stored
    for item in code.co_consts:
        if isinstance(item, CodeType):
            names |= _names(item)
    return names


def _instructions(code: CodeType) -> Any:
    return dis.get_instructions(code)
