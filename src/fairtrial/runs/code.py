"""The files of a project as they were when they were imported, and the packages that they import.

A file is read once, when it is first seen, and keeps that content until its module is loaded again: a file that is
edited after its import is not what this process executes. Names are relative to the project's root, so that they are
the same in every working directory and on every machine.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fairtrial._version import __version__
from fairtrial.store.redact import current, kind_of_variable

_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARIES = (
    _OURS,
    *(
        os.path.realpath(path) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    ),
)
_MARKERS = ("pyproject.toml", ".git")  # Files and folders that mark the root of a project.
# Suffixes of files that are read as prompts or settings; databases and logs change with every run.
_TEXTS = frozenset(
    (
        ".txt", ".md", ".j2", ".jinja", ".jinja2", ".tmpl", ".template", ".prompt", ".yaml", ".yml", ".json", ".toml",
        ".ini", ".cfg", ".xml", ".html", ".sql", ".rst",
    )
)  # fmt: skip
_MAX_TEXT_BYTES = 4 * 1024 * 1024
_LONGEST_PATH = 200
# Variables that differ between machines and say nothing about the code.
_OF_THE_MACHINE = frozenset(("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TMPDIR", "HOSTNAME", "LANG", "TERM"))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Return whether a file belongs to Fairtrial, to Python or to an installed package."""
    if file.startswith("<frozen"):
        return True
    real = os.path.realpath(file)
    return real.startswith(_LIBRARIES) or "site-packages" in real or "dist-packages" in real


def project_root(home: str) -> str:
    """Return the root of the project of a file: the nearest folder with a `pyproject.toml` or `.git`, else its own.

    Without a file, as in a notebook or a console, the working directory takes the place of its folder.
    """
    return _root_above(os.path.dirname(_real_path(home)) if home else os.getcwd())


@lru_cache(maxsize=256)
def _root_above(folder: str) -> str:
    above = folder
    while True:
        if any(os.path.exists(os.path.join(above, marker)) for marker in _MARKERS):
            return above
        parent = os.path.dirname(above)
        if parent == above:
            return folder
        above = parent


def file_name(file: str, root: str, module: str = "") -> str:
    """Return the name of a file in every folder and on every machine; outside of the root, that of its module."""
    real: str = _real_path(file)
    if real.startswith(os.path.join(root, "")):
        return os.path.relpath(real, root).replace(os.sep, "/")
    if module and module != "__main__":
        return module.replace(".", "/") + ".py"
    return os.path.basename(real)


_real_path = lru_cache(maxsize=16384)(os.path.realpath)


@dataclass(slots=True, eq=False)
class _Contents:
    """What the source of a file contains, from one pass over its syntax tree."""

    imports: dict[tuple[str, int, str], None] = field(default_factory=dict)  # (module, level, name or "").
    variables: set[str] = field(default_factory=set)  # Environment variables that it names.
    texts: set[str] = field(default_factory=set)  # Constants that may be names of files.
    computed: list[int] = field(default_factory=list)  # Lines that import a module by a computed name.
    functions: dict[tuple[int, str], ast.AST | None] = field(default_factory=dict)  # None: several in one line.


class SourceFile:
    """A Python file of the project, as it was when it was imported.

    Attributes:
        edited: Whether the file has been changed since its import.
        certain: Whether `content` is what was imported; not if the file had been changed before it was first seen.
    """

    def __init__(self, path: str, content: bytes, state: tuple[int, int], module: ModuleType | None) -> None:
        self.path = path
        self.content = content
        self.state = state
        self.spec = _spec(module)
        self.loaded = module is not None
        self.edited = False
        self.certain = True
        self._digests: dict[tuple[int, str], str | None] = {}
        self.digest = hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()

    @cached_property
    def contents(self) -> _Contents:
        """What the file imports, names and defines."""
        found = _Contents()
        try:
            tree = ast.parse(self.content)
        except (SyntaxError, ValueError):
            return found
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                waiting.extend(node.orelse)
                continue
            _note(node, found)
            waiting.extend(ast.iter_child_nodes(node))
        return found

    @cached_property
    def codes(self) -> frozenset[CodeType]:
        """The code of the functions in the file, as Python compiles it."""
        try:
            return frozenset(_inner(compile(self.content, self.path, "exec", dont_inherit=True)))
        except (SyntaxError, ValueError):
            return frozenset()

    def source_digest(self, code: CodeType) -> str | None:
        """Return a digest of the source of a function; None if it cannot be told which one it is."""
        key = code.co_firstlineno, code.co_name
        if key not in self._digests:
            source = self._source(code)
            made = None if source is None else hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:32]
            self._digests[key] = made
        return self._digests[key]

    def _source(self, code: CodeType) -> str | None:
        """Return the source of a function without comments, decorators and layout."""
        node = self.contents.functions.get((code.co_firstlineno, code.co_name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators, node.decorator_list = node.decorator_list, []
            try:
                return ast.unparse(node)
            finally:
                node.decorator_list = decorators
        return None if node is None else ast.unparse(node)


def _note_typed(code: CodeType, found: _Contents) -> None:
    """Note what a function that is in no file imports and names."""
    base = ""
    for step in dis.get_instructions(code) if _IMPORT_NAME in code.co_code[::2] else ():
        if step.opname == "IMPORT_NAME":
            base = step.argval
            found.imports[base, 0, ""] = None
        elif step.opname == "IMPORT_FROM":
            found.imports[base, 0, step.argval] = None
    texts = [item for item in code.co_consts if isinstance(item, str)]
    found.texts.update(filter(_may_be_file, texts))
    if {"environ", "getenv"} & set(code.co_names):
        found.variables.update(text for text in texts if text.isidentifier())
    if {"import_module", "__import__"} & set(code.co_names):
        modules = [text for text in texts if text.replace(".", "_").isidentifier()]
        found.imports.update(dict.fromkeys((module, 0, "") for module in modules))
        if not modules:
            found.computed.append(code.co_firstlineno)
    for item in code.co_consts:
        if isinstance(item, CodeType):
            _note_typed(item, found)


_IMPORT_NAME = dis.opmap["IMPORT_NAME"]


def _may_be_file(text: str) -> bool:
    return 4 < len(text) < _LONGEST_PATH and os.path.splitext(text)[1].lower() in _TEXTS


def _note(node: ast.AST, found: _Contents) -> None:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and _may_be_file(node.value):
            found.texts.add(node.value)
    elif isinstance(node, _FUNCTIONS):
        name, decorators = getattr(node, "name", "<lambda>"), getattr(node, "decorator_list", ())
        key = min([node.lineno, *(part.lineno for part in decorators)]), name
        found.functions[key] = None if key in found.functions else node
    elif isinstance(node, ast.Import):
        found.imports.update(dict.fromkeys((alias.name, 0, "") for alias in node.names))
    elif isinstance(node, ast.ImportFrom):
        found.imports.update(dict.fromkeys((node.module or "", node.level, alias.name) for alias in node.names))
    elif isinstance(node, ast.Call):
        _note_call(node, found)
    elif isinstance(node, ast.Subscript) and _last_name(node.value) == "environ":
        found.variables.update(_texts([node.slice]))


def _note_call(node: ast.Call, found: _Contents) -> None:
    name = _last_name(node.func)
    if name in ("import_module", "__import__") and node.args:
        modules = _texts(node.args[:1])
        found.imports.update(dict.fromkeys((module, 0, "") for module in modules if not module.startswith(".")))
        if not modules or modules[0].startswith("."):
            found.computed.append(node.lineno)
    elif name == "getenv" or (isinstance(node.func, ast.Attribute) and _last_name(node.func.value) == "environ"):
        found.variables.update(_texts(node.args[:1]))


def _texts(nodes: Iterable[ast.AST]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _last_name(node: ast.AST) -> str:
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def _inner(code: CodeType) -> Iterator[CodeType]:
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield item
            yield from _inner(item)


def _spec(module: ModuleType | None) -> ModuleSpec | None:
    return getattr(module, "__spec__", None)


_files: dict[str, SourceFile] = {}


def source_file(path: str, module: ModuleType | None = None) -> SourceFile | None:
    """Return a file of the project as it was when its module was loaded; None if it cannot be read."""
    known = _files.get(path)
    state = _state(path)
    if state is None or (known is not None and known.state == state and known.loaded >= (module is not None)):
        return known  # A file that has been deleted is still what is executed.
    if known is not None and known.loaded and module is None:
        return known  # It may have been loaded again, which only its module can tell.
    try:
        content = Path(path).read_bytes()
    except OSError:
        return known
    fresh = SourceFile(path, content, state, module)
    if known is None:
        fresh.edited = state[0] > _STARTED_NS and _differs(fresh, module)
        fresh.certain = not fresh.edited
    elif fresh.digest == known.digest:
        known.state, known.loaded = state, known.loaded or fresh.loaded
        return known
    elif known.loaded and fresh.spec is known.spec and _differs(fresh, module, otherwise=True):
        known.edited = True
        return known
    _files[path] = fresh
    return fresh


def _state(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _process_started() -> float:
    """Return when this process was started; where the system does not tell, when this module was loaded."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        booted = next(
            line for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines() if line.startswith("btime")
        )
        return float(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK") - 1.0  # `btime` is in whole seconds.
    except (OSError, ValueError, IndexError, StopIteration):
        return time.time()


_STARTED_NS = int(_process_started() * 1e9)


def _differs(file: SourceFile, module: ModuleType | None, *, otherwise: bool = False) -> bool:
    """Return whether a module has a function that its file does not contain; `otherwise` if it has no functions."""
    codes = list(_codes_in_memory(file.path, module))
    return any(code not in file.codes for code in codes) if codes else otherwise


def _codes_in_memory(path: str, module: ModuleType | None) -> Iterator[CodeType]:
    """Yield the code of a module's functions and methods, if Python itself has compiled it from the file."""
    loader = getattr(_spec(module), "loader", None)
    if module is None or not (loader is None or isinstance(loader, SourceFileLoader)):
        return
    for thing in list(vars(module).values()):
        members = list(vars(thing).values()) if isinstance(thing, type) else [thing]
        for member in members:
            member = getattr(member, "__func__", member)
            if isinstance(member, FunctionType) and member.__code__.co_filename == path:
                yield member.__code__


@dataclass(frozen=True, slots=True)
class ProjectCode:
    """The project's files that a suite uses, and what they import and read.

    Attributes:
        files: Name -> digest of the content.
        paths: The files.
        packages: The installed packages that they import.
        edited: The files that were changed after their import.
        unknown: Imports by a computed name.
        reads: Environment variables and text files that they name, with a digest of their content.
    """

    files: Mapping[str, str]
    paths: tuple[str, ...]
    packages: frozenset[str]
    edited: tuple[str, ...]
    unknown: tuple[str, ...]
    reads: Mapping[str, str]


def project_code(home: str, parts: Iterable[str] = (), typed: Iterable[CodeType] = ()) -> ProjectCode:
    """Return the project's files that a suite uses: its own, those of its parts, and all that these import.

    Imports inside functions count too, whether or not they have been executed. It does not cover every loaded module,
    because client and worker of a fleet are different programs.

    Args:
        home: The file that defines the suite.
        parts: Further files, of the suite's functions and objects.
        typed: The code of functions that are in no file, as in a notebook or a console.
    """
    root = project_root(home)
    by_file = _modules_by_file()
    given = [(file, by_file.get(file)) for file in [home, *parts] if file]
    waiting = [(file, module, module.__name__ if module is not None else "") for file, module in given]
    sources: dict[str, tuple[SourceFile, str]] = {}
    packages: set[str] = set()
    in_no_file = _Contents()
    for code in typed:
        _note_typed(code, in_no_file)

    def follow(contents: _Contents, package: str, folder: str) -> None:
        for imported, file in _imported(contents, package, folder):
            if file is not None and not is_library(file):
                waiting.append((file, by_file.get(file) or sys.modules.get(imported), imported))
            elif "." not in imported:
                packages.add(imported)

    follow(in_no_file, "", root)
    while waiting:
        path, module, name = waiting.pop()
        if path in sources or not path.endswith(".py") or is_library(path):
            continue
        source = source_file(path, module)
        if source is None:
            continue
        sources[path] = source, file_name(path, root, name)
        folder, file = os.path.split(path)
        # A module that is not loaded has a package too.
        package = getattr(module, "__package__", None) or (name if file == "__init__.py" else name.rpartition(".")[0])
        follow(source.contents, package, folder)
    files: dict[str, str] = {}
    reads = _reads(in_no_file, os.getcwd(), root)
    edited: list[str] = []
    unknown = [_COMPUTED for _line in in_no_file.computed[:1]]
    for path, (source, name) in sources.items():
        files[name] = source.digest
        if source.edited:
            edited.append(name)
        if not source.certain:
            files[name] = _memory_digest(source, by_file.get(path))
        unknown += [f"{name}:{line} ({_COMPUTED})" for line in source.contents.computed]
        reads |= _reads(source.contents, os.path.dirname(path), root)
    return ProjectCode(files, tuple(sorted(sources)), frozenset(packages), tuple(edited), tuple(sorted(unknown)), reads)


def project_files(home: str, parts: Iterable[str] = ()) -> list[str]:
    """Return the paths of the project's files that a suite uses."""
    return list(project_code(home, parts).paths)


_module_names: tuple[tuple[int, str], dict[str, str]] = ((0, ""), {})


def _modules_by_file() -> dict[str, ModuleType]:
    """Return the loaded modules of projects; their names are kept, because every run looks for them."""
    global _module_names
    state = len(sys.modules), next(reversed(sys.modules))
    if _module_names[0] != state:
        names: dict[str, str] = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not is_library(file):
                names.setdefault(file, name)
        _module_names = state, names
    loaded = sys.modules
    return {file: loaded[name] for file, name in _module_names[1].items() if name in loaded}


def _memory_digest(source: SourceFile, module: ModuleType | None) -> str:
    """Return a digest of the code that was loaded from a file whose content at that time is not known."""
    codes = [(code.co_name, code.co_code.hex(), repr(code.co_consts)) for code in _codes_in_memory(source.path, module)]
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", repr(codes)).encode()).hexdigest()


_COMPUTED = "a module imported by a computed name"


def _imported(contents: _Contents, package: str, folder: str) -> Iterator[tuple[str, str | None]]:
    """Yield the modules that a file imports, with their packages: names and files (None: in no Python file)."""
    for base, level, name in contents.imports:
        if level:
            steps = package.split(".") if package else []
            above = steps[: len(steps) - level + 1]
            base = ".".join([*above, base] if base else above)
        parts = base.split(".") if base else []
        names = [".".join(parts[: length + 1]) for length in range(len(parts))]
        if name and name != "*":
            names.append(f"{base}.{name}" if base else name)
        for dotted in names:
            top = dotted.partition(".")[0]
            if top == "fairtrial" or top in sys.stdlib_module_names:
                continue
            found, file = _locate(dotted, folder)
            if found:
                yield dotted, file


def _locate(name: str, folder: str) -> tuple[bool, str | None]:
    """Return whether there is a module of this name, and its file, without importing anything."""
    module = sys.modules.get(name)
    if module is not None:
        return True, getattr(module, "__file__", None)
    return _find(name, folder, tuple(sys.path))


@lru_cache(maxsize=4096)
def _find(name: str, folder: str, path: tuple[str, ...]) -> tuple[bool, str | None]:
    """Search a module that has not been loaded; below a package, in its folders only."""
    parent, _, last = name.rpartition(".")
    where: list[str] | None = [*path, folder]
    if parent:
        package = sys.modules.get(parent)
        if package is None:
            found, file = _find(parent, folder, path)
            if not found or file is None or os.path.basename(file) != "__init__.py":
                return False, None
            where = [os.path.dirname(file)]
        else:
            where = list(getattr(package, "__path__", ()))
            if not where:
                return False, None  # An attribute of a module, not a module.
    try:
        spec = PathFinder.find_spec(last if parent else name, where)
    except (ImportError, ValueError, OSError):
        return False, None
    return (False, None) if spec is None else (True, spec.origin if spec.has_location else None)


def _reads(contents: _Contents, own_folder: str, root: str) -> dict[str, str]:
    """Return the text files and environment variables that code names, as far as they exist."""
    redactor = current()
    result = {
        f"${name}": hashlib.sha256(redactor.text(os.environ[name]).encode("utf-8", "replace")).hexdigest()
        for name in contents.variables
        if name in os.environ and name not in _OF_THE_MACHINE and kind_of_variable(name) is None
    }
    for text in contents.texts:
        for folder in (own_folder, root, os.getcwd()):
            path = os.path.join(folder, text)
            content = _text_digest(path)
            if content is not None:
                result[file_name(path, root)] = content
                break
    return result


def _text_digest(path: str) -> str | None:
    try:
        state = os.stat(path)
        if not os.path.isfile(path):
            return None
        if state.st_size > _MAX_TEXT_BYTES:
            return f"{state.st_size} bytes"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages with these top-level modules, and of Python and Fairtrial."""
    found = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "fairtrial": __version__}
    return found | {name: version for name in sorted(names) if (version := _version(name)) is not None}


@lru_cache(maxsize=1024)
def _version(name: str) -> str | None:
    from importlib import metadata  # Here, because it takes longer than the rest of an import of Fairtrial's records.

    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError):
        pass
    stated: Any = getattr(sys.modules.get(name), "__version__", None)
    if isinstance(stated, str):
        return stated
    distributions = _distributions().get(name)
    return metadata.version(distributions[0]) if distributions else None


@lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions of all modules; slow, so only for a module that does not state its own version."""
    from importlib import metadata

    return metadata.packages_distributions()
