"""Describes functions and objects by their code and values, identically in every process.

A description has one part for each named thing: a function, a class, a value that a function refers to, an attribute.
Two suites have the same description if they have the same code, composition and values. Functions and classes of
libraries are described by name, because their versions are recorded apart.

State (locks, clients, caches) has no part. Text loses what differs between machines and days: the project's folder, the
user's, temporary folders, and secrets.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import re
import sys
import tempfile
import types
from collections import ChainMap, deque
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from inspect import get_annotations
from pathlib import PurePath
from typing import Any

from fairtrial.base.codec import canonical, digest
from fairtrial.base.frozen import JSON
from fairtrial.runs.bytecode import bytecode_digest, names_used
from fairtrial.runs.code import file_name, is_library, project_root, source_file
from fairtrial.store.redact import current, kind_of_variable, looks_like_secret

HOOK = "__fairtrial_identity__"
"""The name of a method that returns the identity of an object as JSON, instead of its attributes."""

_NESTED = 40  # Containers nested deeper than this get a part of their own, so that no recursion is too deep.
_SAFE = 2**53
# Our own classes whose attributes are parameters; those of others (limiters, stores) are state.
_PARAMETERS = (
    "fairtrial.scoring.",
    "fairtrial.models.judges.",
    "fairtrial.models.prompt.",
    "fairtrial.models.tools.",
    "fairtrial.models.users.",
    "fairtrial.models.main_loop.",
    "fairtrial.models.scripted.",
    "fairtrial.trials.",
)
# Modules whose objects are values that show all of themselves when they are copied.
_VALUES = frozenset(
    (
        "array", "datetime", "decimal", "fractions", "ipaddress", "operator", "pathlib", "string", "uuid", "zoneinfo",
        "urllib.parse", "email.message",
    )
)  # fmt: skip
# Modules whose objects are state: they say nothing about what a task does.
_STATE = frozenset(
    (
        "_abc", "_asyncio", "_contextvars", "_io", "_queue", "_random", "_thread", "_weakref", "_weakrefset", "anyio",
        "asyncio", "concurrent", "contextlib", "contextvars", "fairtrial", "functools", "io", "itertools", "logging",
        "multiprocessing", "queue", "selectors", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading",
        "types", "weakref",
    )
)  # fmt: skip
_STATE_TYPES = ("generator", "coroutine", "async_generator", "_Environ", "_lru_cache_wrapper")
_NAMES = ("model", "model_name", "name", "base_url")  # Attributes that identify a client.
_GENERATED = "<string>"  # The file of methods that dataclasses and named tuples make.
_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]|0\.0\.0\.0):\d+")
_RANDOM_NAME = re.compile(r"tmp[a-z0-9_]{8}\Z")
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


@dataclass(slots=True)
class Description:
    """Functions and objects by their parts.

    Attributes:
        parts: Name -> what it is, as plain JSON.
        unknown: What cannot be described: name -> type.
        varying: Text that may differ between machines, such as the port of a local server: name -> digest.
        files: The files of functions and classes that belong to the project.
        packages: The installed packages whose objects were found.
        values: The names of the parts that are values, not code in a file.
        typed: The code of functions that are in no file.
    """

    parts: dict[str, JSON] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    varying: dict[str, str] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    typed: list[types.CodeType] = field(default_factory=list)

    def digests(self) -> dict[str, str]:
        """Return a digest of each part."""
        return {name: digest(part)[:16] for name, part in self.parts.items()}


def describe(roots: Mapping[str, Any], home: str = "") -> Description:
    """Describe functions and objects, and all that they refer to.

    Args:
        roots: What to describe, by the names that messages use: "task", "evaluator".
        home: The file of the suite, which determines the root of the project.
    """
    return _Walk(_Texts(project_root(home))).run(roots)


class _Texts:
    """Removes from text what differs between machines, folders and days."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._redactor = current()
        temporary = {tempfile.gettempdir(), os.path.realpath(tempfile.gettempdir())}
        self._temporary = tuple(os.path.join(folder, "") for folder in temporary)
        user = os.path.expanduser("~")
        self._folders = [(os.path.join(root, ""), "<project>/")]
        if len(user) > 1:
            self._folders.append((os.path.join(user, ""), "~/"))

    def clean(self, text: str, name: str = "") -> tuple[str, bool]:
        """Return the text, and whether something was removed that may matter; `name` is that of the variable."""
        kind = kind_of_variable(name) if name else None
        if kind is not None and looks_like_secret(text, kind):
            return "<secret>", False
        matters = False
        if os.sep in text and len(text) > 1:
            if text == self.root:
                return "<project>", False
            for folder, stands_for in self._folders:
                text = text.replace(folder, stands_for)
            for folder in self._temporary:
                if text.startswith(folder):
                    first, _, rest = text[len(folder) :].partition(os.sep)
                    matters = _RANDOM_NAME.match(first.partition(".")[0]) is None
                    text = f"<temporary>/{rest}"
        if ":" in text and _LOOPBACK.search(text):
            text, matters = _LOOPBACK.sub(r"\1", text), True
        return self._redactor.text(text), matters

    def redacted(self, text: str) -> str:
        """Return the text without secrets."""
        return self._redactor.text(text)


class _Walk:
    def __init__(self, texts: _Texts, sets: frozenset[int] = frozenset()) -> None:
        self._texts = texts
        self._found = Description()
        self._names: dict[int, str] = {}  # The part of each object that has one.
        self._alive: list[Any] = []  # Keeps the objects whose ids are used.
        self._waiting: deque[tuple[str, Any, str, bool]] = deque()
        self._globals_seen: dict[tuple[int, str], JSON] = {}
        self._repeated: dict[str, int] = {}
        self._modules: set[int] = set()  # The modules whose members are being described.
        self._inside: dict[int, None] = {}  # The containers that are being described.
        self._sets = sets

    def run(self, roots: Mapping[str, Any]) -> Description:
        for name, value in roots.items():
            if value is not None:
                self._found.parts[f"<{name}>"] = self._value(value, name)
        while self._waiting:
            name, value, variable, is_reference = self._waiting.popleft()
            try:
                part = self._referred(name, value) if is_reference else self._value(value, name, variable)
            except Exception as error:  # Objects may raise whatever they like when they are looked at.
                self._found.unknown[name] = f"{_type_name(type(value))}: {type(error).__name__}"
                part = ["unknown", _type_name(type(value))]
            self._found.parts[name] = part
        return self._found

    # Names of parts

    def _add(self, name: str, value: Any, variable: str = "", *, is_reference: bool = False) -> str:
        """Queue a value as a part of its own, and return the name of the part."""
        parts = self._found.parts
        if name in parts:
            self._repeated[name] = self._repeated.get(name, 1) + 1
            name = f"{name}#{self._repeated[name]}"
        parts[name] = None
        self._waiting.append((name, value, variable, is_reference))
        return name

    def _refer(self, value: Any, name: str) -> JSON:
        """Return the reference to a function, a class or an object, which is described once."""
        known = self._names.get(id(value))
        if known is None:
            self._alive.append(value)
            known = self._names[id(value)] = self._add(name, value, is_reference=True)
        return ["part", known]

    def _location(self, thing: Any) -> str:
        """Return where something is defined: by file, because the module of an executed file is `__main__`."""
        module = str(getattr(thing, "__module__", ""))
        file = getattr(sys.modules.get(module), "__file__", None)
        where = file_name(file, self._texts.root, module) if file and not is_library(file) else module
        return f"{where}:{getattr(thing, '__qualname__', '')}"

    # Values

    def _referred(self, name: str, value: Any) -> JSON:
        if isinstance(value, types.FunctionType):
            return self._function(name, value)
        return self._class(name, value) if isinstance(value, type) else self._object(name, value)

    def _value(self, value: Any, path: str, name: str = "") -> JSON:
        """Describe a value: plain ones and containers here, everything else as a part of its own."""
        kind = type(value)
        if kind is str:
            return self._text(value, path, name)
        if value is None or kind is bool:
            return value  # type: ignore[no-any-return]
        if kind is int:
            return value if -_SAFE < value < _SAFE else ["int", hex(value)]
        if kind is float:
            return ["float", repr(value)]
        if isinstance(value, enum.Enum):
            return ["enum", self._location(kind), value.name, self._value(value.value, path, name)]
        if isinstance(value, bytes | bytearray):
            return self._bytes(bytes(value), name)
        if isinstance(value, dict | list | tuple | set | frozenset | deque | types.MappingProxyType | ChainMap):
            return self._container(value, path, name)
        if isinstance(value, types.FunctionType | type):
            return self._refer(value, self._location(value))
        if isinstance(value, PurePath):
            return ["path", self._text(str(value), path, name)]
        if isinstance(value, types.MethodType):
            return ["method", self._value(value.__func__, path), self._value(value.__self__, path)]
        if isinstance(value, functools.partial):
            keywords: list[JSON] = [
                [key, self._value(item, f"{path}({key}=)", key)] for key, item in sorted(value.keywords.items())
            ]
            return ["partial", self._value(value.func, path), self._value(value.args, path), keywords]
        if isinstance(value, staticmethod | classmethod):
            return [kind.__name__, self._value(value.__func__, path)]
        if value is Ellipsis or value is NotImplemented or kind is object:
            return ["constant", kind.__name__]
        if isinstance(value, BaseException) and _is_library_type(kind):
            return ["error", _type_name(kind), self._value(value.args, path)]
        if isinstance(value, property | functools.cached_property):
            getters = [getattr(value, part, None) for part in ("fget", "fset", "func")]
            return ["property", *(self._value(item, path) for item in getters)]
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if callable(value) and _is_library_type(kind) and not hasattr(kind, HOOK):
            called = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
            if isinstance(called, str):
                return self._library_callable(value, called, path)
        return self._refer(value, path)

    def _library_callable(self, value: Any, name: str, path: str) -> JSON:
        """Describe a function written in C, or the wrapper of a function, such as that of `functools.cache`."""
        module = str(getattr(value, "__module__", ""))
        self._package(module)
        wrapped = getattr(value, "__wrapped__", None)
        if callable(wrapped):
            parameters = value.cache_parameters() if hasattr(value, "cache_parameters") else None
            return ["wrapped", _type_name(type(value)), repr(parameters), self._value(wrapped, path)]
        owner = getattr(value, "__self__", None)
        bound = None if owner is None or isinstance(owner, types.ModuleType) else self._value(owner, path)
        return ["name", module, name, bound]

    def _text(self, text: str, path: str, name: str) -> JSON:
        cleaned, matters = self._texts.clean(text, name)
        if matters:
            earlier = self._found.varying.get(path)  # Of another item of the same container.
            self._found.varying[path] = digest([earlier, ascii(self._texts.redacted(text))])[:16]
        return cleaned if cleaned.isprintable() else ["text", ascii(cleaned)]

    def _bytes(self, value: bytes, name: str) -> JSON:
        text = value.decode("utf-8", "replace")
        cleaned, _ = self._texts.clean(text, name)
        return ["bytes", hashlib.sha256(value).hexdigest()] if cleaned == text else ["bytes", cleaned]

    def _container(self, value: Any, path: str, name: str) -> JSON:
        if id(value) in self._inside:
            return ["again", list(self._inside).index(id(value)) - len(self._inside)]
        if len(self._inside) > _NESTED:
            if id(value) not in self._names:
                self._alive.append(value)
                self._names[id(value)] = self._add(path, value, name)
            return ["part", self._names[id(value)]]
        kind = _type_name(type(value))
        self._inside[id(value)] = None
        path = path if path.endswith("[]") else f"{path}[]"
        try:
            if isinstance(value, set | frozenset):
                return [kind, sorted((self._alone(item) for item in value), key=canonical)]
            if isinstance(value, dict | types.MappingProxyType | ChainMap):
                return [
                    kind,
                    [
                        [
                            self._value(key, path),
                            self._value(item, path, key if isinstance(key, str) else name),
                        ]
                        for key, item in list(value.items())
                    ],
                ]
            return [kind, [self._value(item, path, name) for item in list(value)]]
        finally:
            del self._inside[id(value)]

    def _alone(self, value: Any) -> JSON:
        """Describe a member of a set by itself, because the order of sets differs between processes."""
        if isinstance(value, str | int | float | bool | None):
            return self._value(value, "")
        if id(value) in self._sets:
            return ["again"]
        found = _Walk(self._texts, self._sets | {id(value)}).run({"member": (value,)})
        self._found.files |= found.files
        self._found.typed += found.typed
        self._found.packages |= found.packages
        return digest(found.parts)

    def _module(self, module: types.ModuleType) -> JSON:
        file = getattr(module, "__file__", None)
        if not file or is_library(file):
            self._package(module.__name__)
            return ["module", module.__name__]
        self._found.files.add(file)
        return ["module", file_name(file, self._texts.root, module.__name__)]

    def _package(self, module: str) -> None:
        top = module.partition(".")[0]
        if top and top not in sys.stdlib_module_names and top not in ("__main__", "fairtrial"):
            file = getattr(sys.modules.get(top), "__file__", None)
            if file is None or is_library(file):
                self._found.packages.add(top)

    # Functions

    def _function(self, name: str, function: types.FunctionType) -> JSON:
        code = function.__code__
        facts: dict[str, JSON] = {"function": self._location(function)}
        if is_library(code.co_filename):
            self._package(str(function.__module__))
        else:
            facts["code"] = self._code(function)
            facts["uses"] = self._globals(function)
            if not os.path.exists(code.co_filename):
                self._found.values.add(name)
                self._found.typed.append(code)
                facts["types"] = _types(function)
        if function.__defaults__ or function.__kwdefaults__:
            named = code.co_varnames[: code.co_argcount][-len(function.__defaults__ or ()) :]
            defaults = dict(zip(named, function.__defaults__ or (), strict=False)) | (function.__kwdefaults__ or {})
            facts["defaults"] = [
                self._variable(f"{name}({variable}=)", item, variable) for variable, item in defaults.items()
            ]
        closure: dict[str, JSON] = {}
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                closure[variable] = self._variable(f"{name}({variable})", cell.cell_contents, variable)
            except ValueError:
                continue  # Not assigned yet.
        if closure:
            facts["closure"] = closure
        for attribute, item in sorted(vars(function).items()):
            if not attribute.startswith("__fairtrial_"):
                facts[f".{attribute}"] = self._variable(f"{name}.{attribute}", item, attribute)
        return facts

    def _variable(self, path: str, value: Any, name: str) -> JSON:
        """Describe a variable or an attribute as a part of its own, so that a change of it can be named."""
        if isinstance(value, types.FunctionType | type | types.ModuleType) or _is_object(value):
            return self._value(value, path, name)
        name_of_part = self._add(f"{path}()" if callable(value) else path, value, name)
        self._found.values.add(name_of_part)
        return ["part", name_of_part]

    def _code(self, function: types.FunctionType) -> JSON:
        code = function.__code__
        if os.path.exists(code.co_filename):
            self._found.files.add(code.co_filename)
            file = source_file(code.co_filename, sys.modules.get(str(function.__module__)))
            source = file.source_digest(code) if file is not None and file.certain else None
            if source is not None:
                return ["source", source]
        return ["bytecode", bytecode_digest(code)]

    def _globals(self, function: types.FunctionType) -> JSON:
        """Describe the global values, functions, classes and modules that a function refers to."""
        space = function.__globals__
        file = space.get("__file__")
        where = str(space.get("__name__", ""))
        if isinstance(file, str) and not is_library(file):
            where = file_name(file, self._texts.root, where)
        names, attributes = names_used(function.__code__)
        used = sorted(name for name in names & space.keys() if not _is_special(name))
        return [[name, self._global(where, space, name, names | attributes)] for name in used]

    def _global(self, where: str, space: dict[str, Any], name: str, used: frozenset[str]) -> JSON:
        value = space[name]
        if isinstance(value, types.ModuleType):
            return self._members(value, used)
        key = id(space), name
        if key not in self._globals_seen:
            self._alive.append(space)
            self._globals_seen[key] = self._variable(f"{where}:{name}", value, name)
        return self._globals_seen[key]

    def _members(self, module: types.ModuleType, used: frozenset[str]) -> JSON:
        """Describe a module by its name, and one of the project by the members that are used."""
        found = self._module(module)
        file = getattr(module, "__file__", None)
        if not file or is_library(file) or id(module) in self._modules:
            return found
        self._modules.add(id(module))
        try:
            where, space = file_name(file, self._texts.root, module.__name__), vars(module)
            members: list[JSON] = [
                [name, self._global(where, space, name, used)]
                for name in sorted(used & space.keys())
                if not _is_special(name)
            ]
        finally:
            self._modules.discard(id(module))
        return [found, members]

    # Classes and objects

    def _class(self, name: str, cls: type) -> JSON:
        if _is_library_type(cls):
            self._package(str(cls.__module__))
            return ["class", self._location(cls)]
        file = getattr(sys.modules.get(str(cls.__module__)), "__file__", None)
        if file:
            self._found.files.add(file)
        facts: dict[str, JSON] = {
            "class": self._location(cls),
            "bases": [self._value(base, name) for base in cls.__bases__ if base is not object],
            "kind": self._value(type(cls), name),
            "types": _types(cls),
        }
        for attribute, value in sorted(_class_attributes(cls)):
            facts[f".{attribute}"] = self._variable(f"{name}.{attribute}", value, attribute)
        return facts

    def _object(self, name: str, value: Any) -> JSON:
        kind = type(value)
        self._found.values.add(name)
        hook = getattr(kind, HOOK, None)
        if hook is not None:
            return ["object", self._value(kind, name), self._value(hook(value), name)]
        if _is_library_type(kind) and not f"{kind.__module__}.".startswith(_PARAMETERS):
            return self._library_object(name, value, kind)
        described = self._value(kind, name)
        attributes: list[JSON] = [
            [attribute, self._variable(f"{name}.{attribute}", item, attribute)]
            for attribute, item in sorted(_attributes(value).items())
        ]
        return ["object", described, attributes]

    def _library_object(self, name: str, value: Any, kind: type) -> JSON:
        called = _type_name(kind)
        self._package(kind.__module__)
        if isinstance(value, re.Pattern):
            return ["pattern", self._value(value.pattern, name), value.flags]
        if isinstance(value, complex | range | slice):
            return ["value", repr(value)]
        if kind.__module__ in _VALUES:
            copied = value.__reduce_ex__(2)
            return ["value", called, *(self._value(item, name) for item in copied[1:3])]
        if isinstance(value, types.SimpleNamespace):
            return ["value", called, self._value(dict(sorted(vars(value).items())), name)]
        if (array := _array(value, kind)) is not None:
            return ["value", called, *array]
        if kind.__module__ in ("typing", "types", "inspect") and called not in _STATE_TYPES:
            return ["type", _ADDRESS.sub("", repr(value))]
        if "Secret" in kind.__name__:
            return ["secret"]
        given = _given_fields(value, kind)
        if given is not None and not kind.__module__.startswith("fairtrial."):
            return [
                "object",
                called,
                [[key, self._variable(f"{name}.{key}", item, key)] for key, item in sorted(given.items())],
            ]
        if kind.__module__.partition(".")[0] in _STATE or kind.__name__ in _STATE_TYPES:
            return ["state", called]
        self._found.unknown[name] = called
        names: list[JSON] = [[key, self._text(text, f"{name}.{key}", key)] for key, text in _identifying(value)]
        return ["object", called, names]


_NOT_OBJECTS = (dict, list, tuple, set, frozenset, enum.Enum, functools.partial, types.MethodType, PurePath)


def _type_name(kind: type) -> str:
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _is_library_type(kind: type) -> bool:
    """Return whether a class belongs to Python, to Fairtrial or to an installed package."""
    module = str(kind.__module__)
    if module == "__main__":
        return False  # The user's, even if a library was started: `python -m cProfile script.py`.
    if module.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_library(file)


def _is_special(name: str) -> bool:
    """Return whether Python itself sets a name: `__name__` depends on how a file was started."""
    return name.startswith("__") and name.endswith("__")


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with attributes, which become parts."""
    return hasattr(type(value), HOOK) or (hasattr(value, "__dict__") and not isinstance(value, _NOT_OBJECTS))


def _types(annotated: Any) -> list[JSON]:
    try:
        found = get_annotations(annotated)
    except NameError:  # Evaluated now, from Python 3.14 on: they may name what only type checkers import.
        found = get_annotations(annotated, format=4)  # type: ignore[call-arg]  # as text
    return [[key, _ADDRESS.sub("", str(kind))] for key, kind in found.items()]


def _class_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(cls).items()):
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            if function.__code__.co_filename != _GENERATED and name != "__annotate_func__":  # See `_types`.
                yield name, value
        elif name == "__dataclass_fields__":
            yield name, [(key, _default(item.default), _default(item.default_factory)) for key, item in value.items()]
        elif name == "__pydantic_fields__":
            yield name, [(key, _ADDRESS.sub("", repr(item))) for key, item in value.items()]
        elif not (
            _is_special(name)
            or name == "_abc_impl"
            or isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
            or type(value).__module__.startswith(("_abc", "pydantic"))
        ):
            yield name, value


def _default(value: Any) -> Any:
    return None if value is MISSING else (value,)


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return found


def _given_fields(value: Any, kind: type) -> dict[str, Any] | None:
    """Return the fields of a library's record that were given: a new version may add others."""
    given = getattr(value, "model_fields_set", None)
    if isinstance(given, set | frozenset):
        return {str(name): getattr(value, str(name), None) for name in given}
    if not is_dataclass(kind):
        return None
    found = {}
    for entry in fields(kind):
        item = getattr(value, entry.name, None)
        default = entry.default if entry.default is not MISSING else None
        if entry.default_factory is not MISSING:
            default = entry.default_factory()
        if item is not default and not (type(item) is type(default) and bool(item == default)):
            found[entry.name] = item
    return found


def _array(value: Any, kind: type) -> list[JSON] | None:
    """Return the content of an array or a data frame."""
    top = kind.__module__.partition(".")[0]
    if top == "numpy" and hasattr(value, "tobytes"):
        shape, content = list(getattr(value, "shape", ())), value.tobytes()
        if str(value.dtype) == "object":
            content = repr(value.tolist()).encode()
        return [str(value.dtype), shape, hashlib.sha256(content).hexdigest()]
    if top == "pandas" and hasattr(value, "to_csv"):
        return [hashlib.sha256(value.to_csv().encode()).hexdigest()]
    return None


def _identifying(value: Any) -> Iterator[tuple[str, str]]:
    for name in _NAMES:
        try:
            found = getattr(value, name, None)
        except Exception:  # noqa: S112 - a property of a library may raise anything
            continue
        if isinstance(found, str) or type(found).__name__ == "URL":
            yield name, str(found)
