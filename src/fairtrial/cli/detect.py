"""Find out what a folder has that can be evaluated: model SDKs, an application, data and tests.

Nothing of the folder is imported or executed: sources are parsed, and what is read is limited in number and size.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from keyword import iskeyword
from pathlib import Path
from typing import Any

from fairtrial.base.foreign import inside, load_toml
from fairtrial.data.dataset import Dataset
from fairtrial.errors import DatasetError, FairtrialError

SDKS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
_INPUTS = (
    "input", "question", "prompt", "query", "user_input", "user_message", "instruction", "message", "text", "request",
    "utterance", "sentence", "document", "review", "ticket", "email", "content", "q",
)  # fmt: skip
_EXPECTED = (
    "expected", "expected_output", "expected_answer", "ground_truth", "reference", "reference_answer", "correct_answer",
    "answer", "label", "target", "ideal", "gold", "category", "intent", "class", "output", "completion", "response",
    "a",
)  # fmt: skip
_OUTPUTS = (
    "answer", "output", "reply", "response", "text", "result", "label", "category", "intent", "summary", "content",
    "message",
)  # fmt: skip
_DATA_FOLDERS = ("", "data", "datasets", "evals")
_LABELS = 12  # The most distinct values in a column of labels.
_LABEL_COLUMNS = frozenset({"label", "target", "gold", "category", "intent", "class"})
_MAX_SOURCES, _MAX_SOURCE_BYTES, _MAX_DEPTH = 300, 500_000, 4
_MAX_FOLDERS, _MAX_SUBFOLDERS = 1_000, 100
_MAX_TABLES, _MAX_TABLE_BYTES = 20, 20_000_000
_NOT_SOURCES = frozenset(
    {"node_modules", "venv", "env", "site-packages", "build", "dist", "tests", "test", "docs", "migrations"}
)
# Names that are other modules by the time that a suite imports them: `import csv` is never a csv.py beside it.
_TAKEN = frozenset({*sys.stdlib_module_names, "__main__", "evals", "fairtrial", "test_evals"})
# Statements that run when a module is imported: these do no harm, any other call may be a program.
_HARMLESS = ("load_dotenv", "basicConfig", "include_router", "add_middleware", "mount", "setdefault", "filterwarnings",
             "append", "insert", "add_exception_handler", "simplefilter", "getLogger")  # fmt: skip
_ASKS = frozenset({"input", "parse_args", "exit", "run"})


@dataclass(frozen=True, slots=True)
class SampleFile:
    """A file of samples, and which of its columns hold what."""

    path: str
    columns: dict[str, str]
    samples: int
    typed: bool  # Inputs and references are text.
    expected: bool  # There are references, and all of them are text.
    labels: bool  # The references are a few labels that repeat.


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """How one function of the application is called."""

    path: str
    module: str
    function: str
    is_async: bool
    argument: str  # The expression that is passed; {value} is the input.
    result: str  # What follows the reply: `.answer`, `["answer"]`, or "" for all of it.
    text: bool  # The result is known to be text.
    route: str = ""  # As in POST /ask, if the function is an endpoint.


@dataclass(frozen=True, slots=True)
class Found:
    """What a folder has."""

    sdks: dict[str, str]  # The name of an SDK -> the file that names it.
    fastapi: str = ""  # The file with the application.
    pytest: str = ""  # The file that shows that tests are run with pytest.
    table: SampleFile | None = None
    call: FunctionCall | None = None
    unused: dict[str, str] = field(default_factory=dict)  # A file of samples that cannot be used -> why.

    @property
    def anything(self) -> bool:
        """Whether there is something to evaluate."""
        return bool(self.sdks or self.fastapi or self.table or self.unused)


def detect(folder: Path) -> Found:
    """Look through a folder."""
    required = _required(folder)
    modules = list(_modules(folder))
    sdks = {name: required[name] for name in SDKS if name in required}
    for module in modules:
        for name in SDKS:
            if name in module.imports:
                sdks.setdefault(name, module.path)
    apps = [module.path for module in modules if module.makes_app]
    table, unused = _tables(folder)
    wanted = table.columns.get("input", "input") if table else ""
    return Found(
        dict(sorted(sdks.items(), reverse=True)),
        apps[0] if apps else "",
        required.get("pytest", "") or _tests(folder),
        table,
        _best_call(modules, wanted) if sdks or apps or table or unused else None,
        unused,
    )


# What a project depends on.


def _required(folder: Path) -> dict[str, str]:
    """Return the packages that a project names -> the file that names them."""
    found: dict[str, str] = {}
    for path in [*sorted(folder.glob("requirements*.txt"))[:10], folder / "pyproject.toml"]:
        for text in _requirements(path):
            match = re.match(r"\s*([A-Za-z0-9][\w.-]*)", text)
            if match:
                found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), path.name)
    return found


def _requirements(path: Path) -> list[str]:
    text = _read(path)
    if text is None:
        return []
    if path.suffix != ".toml":
        return text.decode("utf-8", "replace").splitlines()[:10_000]
    try:
        tree = load_toml(path)
    except (OSError, ValueError):
        return []
    project, tools = _dict(tree.get("project")), _dict(tree.get("tool"))
    poetry = _dict(tools.get("poetry"))
    groups = [*_dict(project.get("optional-dependencies")).values(), *_dict(tree.get("dependency-groups")).values()]
    lists = [project.get("dependencies"), *groups]
    named = [
        *_dict(poetry.get("dependencies")),
        *(name for group in _dict(poetry.get("group")).values() for name in _dict(_dict(group).get("dependencies"))),
    ]
    return [*named, *(item for part in lists if isinstance(part, list) for item in part if isinstance(item, str))]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tests(folder: Path) -> str:
    for name in ("pytest.ini", "conftest.py", "tests/conftest.py"):
        if os.path.isfile(folder / name):
            return name
    found = next(iter(sorted([*folder.glob("test_*.py"), *folder.glob("tests/test_*.py")])), None)
    return "" if found is None else found.relative_to(folder).as_posix()


def _read(path: Path) -> bytes | None:
    """Return the content of a small file; None for anything else."""
    try:
        if path.is_file() and path.stat().st_size <= _MAX_SOURCE_BYTES:
            return path.read_bytes()
    except OSError:
        pass
    return None


# Files of samples.


def _tables(folder: Path) -> tuple[SampleFile | None, dict[str, str]]:
    """Return the first file whose columns can be guessed and which loads, and why others cannot be used."""
    suffixes = (".csv", ".tsv", ".jsonl", ".ndjson")
    paths = [
        path for name in _DATA_FOLDERS if os.access(folder / name, os.R_OK | os.X_OK) and (folder / name).is_dir()
        for path in sorted((folder / name).iterdir()) if path.suffix.lower() in suffixes
    ]  # fmt: skip
    read = {path.relative_to(folder).as_posix(): _read_table(folder, path) for path in paths[:_MAX_TABLES]}
    found = [table for table in read.values() if isinstance(table, SampleFile)]
    unused = {name: " ".join(reason.split())[:200] for name, reason in read.items() if isinstance(reason, str)}
    return max(found, key=lambda table: table.expected, default=None), unused


def _read_table(folder: Path, path: Path) -> SampleFile | str:
    """Return a file of samples, or why it cannot be used."""
    name = path.relative_to(folder).as_posix()
    try:
        inside(folder, name)
        if not path.is_file():
            return "it is not a file"
        if path.stat().st_size > _MAX_TABLE_BYTES:
            return f"it is larger than {_MAX_TABLE_BYTES // 1_000_000} MB"
        # Whatever the columns are called: with all of them as metadata, the first row names them.
        first = _first_row(path)
        if not first:
            return "it has no rows"
        columns = {
            field: column for field, names in (("input", _INPUTS), ("expected", _EXPECTED))
            if (column := _column(first, names)) is not None
        }  # fmt: skip
        if "input" not in columns or columns["input"] == columns.get("expected"):
            return f"no column is named input, question, prompt or the like ({', '.join(first[:10])})"
        columns = {field: column for field, column in columns.items() if column != field}
        try:
            return _loaded(path, name, columns)
        except FairtrialError:  # As when some rows have no reference.
            return _loaded(path, name, {field: column for field, column in columns.items() if field == "input"})
    except (FairtrialError, OSError, ValueError) as error:
        problem = error.problem if isinstance(error, DatasetError) else getattr(error, "strerror", None) or str(error)
        line = f"line {error.line}: " if isinstance(error, DatasetError) and error.line else ""
        return line + problem.partition("\n")[0]


def _loaded(path: Path, name: str, columns: dict[str, str]) -> SampleFile:
    mapped: Any = columns or None
    try:
        samples: Dataset[Any, Any] = Dataset.load(path, str, str, columns=mapped)
        expected = [sample.expected for sample in samples if sample.has_expected]
        typed = True
    except FairtrialError:
        samples = Dataset.load(path, columns=mapped)
        expected, typed = [sample.expected for sample in samples if sample.has_expected], False
    texts = {value for value in expected if isinstance(value, str)}
    short = typed and max(map(len, texts), default=0) <= 40
    named = _plain(columns.get("expected", "")) in _LABEL_COLUMNS
    labels = named and short and len(texts) <= min(_LABELS, len(expected) // 2)
    all_text = bool(expected) and all(isinstance(value, str) for value in expected)
    return SampleFile(name, columns, len(samples), typed, all_text, labels and all_text)


def _first_row(path: Path) -> list[str]:
    """Return the names of the columns."""
    seen: list[str] = []

    def note(row: dict[str, Any]) -> Any:
        seen.extend(map(str, row))
        raise _SeenError

    try:
        Dataset.load(path, row=note)
    except _SeenError:
        pass
    except FairtrialError as error:
        if not isinstance(error.__cause__, _SeenError):
            raise
    return seen


class _SeenError(Exception):
    """The first row was seen."""


def _column(names: list[str], wanted: tuple[str, ...]) -> str | None:
    known = {_plain(name): name for name in reversed(names)}
    return next((known[name] for name in wanted if name in known), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z]+", "_", name.lower()).strip("_")


# Sources.


type _Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class _Module:
    """A source that was parsed."""

    path: str
    name: str  # As it is imported; "" if it cannot be.
    imports: frozenset[str]
    makes_app: bool
    functions: dict[str, _Function]
    classes: dict[str, ast.ClassDef]
    names: frozenset[str]  # Names that it imports from others.


def _modules(folder: Path) -> Iterator[_Module]:
    count = 0
    for visited, (parent, folders, files) in enumerate(os.walk(folder), 1):
        here = Path(parent).relative_to(folder)
        more = len(here.parts) < _MAX_DEPTH
        folders[:] = sorted(name for name in folders if more and not name.startswith((".", "_")))[:_MAX_SUBFOLDERS]
        folders[:] = (
            name for name in folders
            if name not in _NOT_SOURCES
            and not os.path.exists(Path(parent) / name / "pyvenv.cfg")  # False in a folder that cannot be read.
        )  # fmt: skip
        for name in sorted(files):
            if not name.endswith(".py") or name.startswith(("test_", "conftest", "setup.py", "evals.py")):
                continue
            count += 1
            if count > _MAX_SOURCES:
                return
            module = _parse(Path(parent) / name, here / name)
            if module is not None:
                yield module
        if visited == _MAX_FOLDERS:
            return


def _parse(path: Path, place: Path) -> _Module | None:
    content = _read(path)
    if content is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # What is wrong with somebody's strings is not our concern.
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    imports, names = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {(node.module or "").partition(".")[0]} if not node.level else set()
            names |= {alias.asname or alias.name for alias in node.names}
    made = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return _Module(
        place.as_posix(),
        _import_name(place) if _is_library(tree) else "",
        frozenset(imports),
        any(_called(value) == "FastAPI" for value in made),
        {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)},
        {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)},
        frozenset(names),
    )


def _import_name(place: Path) -> str:
    parts = [*place.parent.parts, *(() if place.stem == "__init__" else (place.stem,))]
    parts = parts[1:] if parts[:1] == ["src"] else parts
    good = parts and all(part.isascii() and part.isidentifier() and not iskeyword(part) for part in parts)
    return ".".join(parts) if good and not _is_taken(parts[0]) else ""


@cache
def _is_taken(name: str) -> bool:
    """Whether a name is a module of Python, of Fairtrial or of an installed package. Nothing is imported."""
    installed = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    spec = None if name in _TAKEN else PathFinder.find_spec(name, installed)
    return name in _TAKEN or (spec is not None and spec.origin is not None)  # Without origin: a folder, not a package.


def _is_library(tree: ast.Module) -> bool:
    """Whether importing the module only defines things: no loop, no question, no call that may be a program."""
    for node in tree.body:
        if isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith):
            return False
        if isinstance(node, ast.If) and "__name__" in {
            part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)
        }:
            continue
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call | ast.Await)
            and _called(node.value) not in _HARMLESS
        ):
            return False
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.If | ast.Try):
            calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
            if any(_called(call) in _ASKS for call in calls):
                return False
    return True


def _called(node: ast.AST | None) -> str:
    """Return the last name of what a call calls."""
    target = node.func if isinstance(node, ast.Call) else None
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""


def _calls_model(function: _Function) -> bool:
    """Whether a function calls something like `client.chat.completions.create`."""
    targets = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(
        isinstance(target, ast.Attribute)
        and target.attr in ("create", "parse", "stream")
        and _named(target.value) in ("completions", "responses", "messages")
        for target in targets
    )


def _best_call(modules: list[_Module], wanted: str) -> FunctionCall | None:
    """Return the call that reaches a model from furthest outside: an endpoint, or a function that no other calls."""
    functions = [(module, function) for module in modules for function in module.functions.values()]
    calls = {
        function.name: {_called(node) for node in ast.walk(function) if isinstance(node, ast.Call)} - {function.name}
        for _, function in functions
    }
    reaching = {function.name for _, function in functions if _calls_model(function)}
    while more := {name for name, called in calls.items() if called & reaching} - reaching:
        reaching |= more
    classes = {name: node for module in modules for name, node in module.classes.items()}
    called_by_others = {name for names in calls.values() for name in names}
    ranked = []
    for at, (module, function) in enumerate(functions):
        call = _call(module, function, classes)
        if call is None or not (function.name in reaching or call.route or (not reaching and _is_plain(function))):
            continue
        fits = wanted != "" and f"{wanted}=" in call.argument
        rank = (function.name in reaching, bool(call.route), fits, function.name not in called_by_others, -at)
        ranked.append((rank, call))
    if not reaching and sum(not call.route for _, call in ranked) > 1:
        ranked = [pair for pair in ranked if pair[1].route]  # Any of several functions may be meant.
    return max(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _is_plain(function: _Function) -> bool:
    """Whether a function says of itself that it makes text of text."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return bool(
        arguments
        and arguments[0].arg in _INPUTS
        and _named(arguments[0].annotation) == _named(function.returns) == "str"
    )


def _call(module: _Module, function: _Function, classes: dict[str, ast.ClassDef]) -> FunctionCall | None:
    """Return how a function is called with one text, if that can be told."""
    route, decorated = _route(function)
    if not module.name or not function.name.isascii() or function.name.startswith("_") or (decorated and not route):
        return None
    if any(
        isinstance(node, ast.Yield | ast.YieldFrom) or _called(node) == "StreamingResponse"
        for node in ast.walk(function)
    ):
        return None
    argument = _argument(module, function, classes, is_route=bool(route))
    if argument is None:
        return None
    result, text = _result(function, classes)
    is_async = isinstance(function, ast.AsyncFunctionDef)
    return FunctionCall(module.path, module.name, function.name, is_async, argument, result, text, route)


def _route(function: _Function) -> tuple[str, bool]:
    """Return the method and path of an endpoint, and whether a function is decorated at all."""
    for node in function.decorator_list:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("post", "get", "put")
        ):
            path = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            return f"{node.func.attr.upper()} {path if isinstance(path, str) else ''}".strip(), True
    return "", bool(function.decorator_list)


def _argument(module: _Module, function: _Function, classes: dict[str, ast.ClassDef], *, is_route: bool) -> str | None:
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    required = plain[: len(plain) - len(arguments.defaults)]
    only = [one for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is None]
    defaults = [*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)]
    if len(required) + len(only) != 1 or any(isinstance(value, ast.Call) for value in defaults):
        return None  # FastAPI fills defaults such as Depends(...) in; a plain call does not.
    (parameter,) = required or only
    if not parameter.arg.isascii():
        return None
    name, prefix = _named(parameter.annotation), f"{parameter.arg}=" if only else ""
    if name == "str" or (parameter.annotation is None and not is_route and parameter.arg in _INPUTS):
        return f"{prefix}{{value}}"
    known = name in module.classes or name in module.names
    fields = _fields(classes[name]) if known and name in classes and name.isascii() else {}
    needed = [field for field, (kind, given) in fields.items() if not given]
    if len(needed) == 1 and fields[needed[0]][0] == "str" and needed[0].isascii():
        return f"{prefix}application.{name}({needed[0]}={{value}})"
    return None


def _fields(node: ast.ClassDef) -> dict[str, tuple[str, bool]]:
    """Return the fields of a pydantic model: name -> (type, whether it has a default)."""
    if not any(_named(base) == "BaseModel" for base in node.bases):
        return {}
    return {
        part.target.id: (_named(part.annotation), part.value is not None and not _is_required(part.value))
        for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }  # fmt: skip


def _is_required(value: ast.expr) -> bool:
    """Whether a value is `...`, `Field(...)` or `Field(min_length=1)`: no default."""
    if isinstance(value, ast.Constant):
        return value.value is ...
    if _called(value) != "Field" or not isinstance(value, ast.Call):
        return False
    given = [keyword.arg for keyword in value.keywords]
    first_is_dots = bool(value.args) and isinstance(value.args[0], ast.Constant) and value.args[0].value is ...
    return first_is_dots or not (value.args or "default" in given or "default_factory" in given)


def _named(node: ast.expr | None) -> str:
    """Return the name that an annotation or a base is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value  # In quotes.
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _result(function: _Function, classes: dict[str, ast.ClassDef]) -> tuple[str, bool]:
    name = _named(function.returns)
    if name == "str":
        return "", True
    fields = _fields(classes[name]) if name in classes else {}
    texts = [field for field, (kind, _) in fields.items() if kind == "str" and field.isascii()]
    chosen = _chosen(texts)
    if chosen:
        return f".{chosen}", True
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            keys = [
                key.value for key in node.value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
            ]
            chosen = _chosen(keys)
            if chosen:
                return f"[{chosen!r}]", False
    return "", False


def _chosen(names: list[str]) -> str:
    return next((name for name in _OUTPUTS if name in names), names[0] if len(names) == 1 else "")
