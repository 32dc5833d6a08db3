"""The source: its words, code that is forbidden, the order of its modules, and its dependencies."""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple, TypeGuard, get_args

import pytest

from fairtrial.errors import Extra

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests/forbidden_words.toml"
PROSE = ("*.md", "docs/**/*.md", "examples/**/*.md", "deploy/**/*.md", "deploy/*.yaml", "pyproject.toml")
CODE = ("src/**/*.py", "examples/**/*.py", "benchmarks/**/*.py", "deploy/**/*.py", "scripts/*")
TESTS = ("tests/**/test_*.py",)


class Forbidden(NamedTuple):
    """One entry of the list."""

    pattern: re.Pattern[str]
    use: str
    exceptions: tuple[str, ...]

    def matches(self, text: str, lowered: str) -> Iterator[re.Match[str]]:
        """Yield the occurrences that begin a word, also a word inside an identifier."""
        for match in self.pattern.finditer(lowered):
            start = match.start()
            if start == 0 or not text[start - 1].isalpha() or text[start].isupper():
                yield match


def read_list() -> list[Forbidden]:
    entries = tomllib.loads(LIST.read_text())["forbidden"]
    # Lower-case text and no condition in front: the search for a literal is many times faster.
    return [
        Forbidden(re.compile(entry["word"].replace(" ", "[ _]?")), entry["use"], tuple(entry.get("except", ())))
        for entry in entries
    ]


def names_of_tests(source: str) -> str:
    """Return the names of the tests in a file, each on its own line."""
    lines = (re.match(r"\s*(?:async )?def (test_\w+)|class (Test\w+)", line) for line in source.splitlines())
    return "\n".join("" if line is None else line[1] or line[2] for line in lines)


def checked_texts() -> Iterator[tuple[str, str]]:
    """Yield every file that is checked, with its text; of tests, only their names."""
    for pattern in (*PROSE, *CODE, *TESTS):
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                text = path.read_text()
                yield path.relative_to(ROOT).as_posix(), names_of_tests(text) if pattern in TESTS else text


def find_words(name: str, text: str, forbidden: list[Forbidden]) -> Iterator[str]:
    lowered = text.lower()
    for word in forbidden:
        for match in word.matches(text, lowered):
            if not any(fnmatch.fnmatch(name, pattern) for pattern in word.exceptions):
                line = text.count("\n", 0, match.start()) + 1
                yield f"{name}:{line}: {match[0]!r} is forbidden, use: {word.use}"


def test_no_forbidden_word_occurs_in_code_messages_documents_and_test_names() -> None:
    forbidden, texts = read_list(), dict(checked_texts())
    assert len(texts) > 300
    assert [problem for name, text in texts.items() for problem in find_words(name, text, forbidden)] == []


def test_a_forbidden_word_is_found_in_identifiers_and_in_sentences() -> None:
    (broker, *_) = read_list()
    for text in ("open_post_office(url)", "class RedisPostOffice:", "The post office", "POST_OFFICE = 1"):
        assert list(find_words("x.py", text, [broker])), text
    assert not list(find_words("x.py", "compost office", [broker]))


def test_in_files_of_tests_only_names_of_tests_are_checked() -> None:
    source = "class TestPostOffice:\n    async def test_it(self) -> None:\n        office = 1\n"
    assert names_of_tests(source).split() == ["TestPostOffice", "test_it"]


def test_every_entry_of_the_list_is_unique_and_has_a_replacement() -> None:
    entries = tomllib.loads(LIST.read_text())["forbidden"]
    assert [entry for entry in entries if set(entry) - {"word", "use", "except"} or not entry["use"].strip()] == []
    words = [entry["word"] for entry in entries]
    assert len(words) == len(set(words))
    assert words == [word.lower() for word in words]


# The package runs no text as code, loads no pickles of others and starts no shell.


SOURCE = Path(__file__).resolve().parent.parent / "src"
FORBIDDEN = {"eval", "exec", "os.system", "os.popen", "yaml.load", "marshal.loads", "shelve.open"}
SUSPICIOUS = re.compile(r"\b(eval|exec|system|popen|yaml|marshal|shelve|pickle|cloudpickle|shell)\b")
# Pickles pass only through a private socket, between a process and the child that it started.
MAY_PICKLE = {"fairtrial/base/isolation"}


def calls(tree: ast.AST) -> list[str]:
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_is_evaluated_unpickled_or_given_to_a_shell() -> None:
    found = []
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 200
    for file in files:
        name, text = file.relative_to(SOURCE), file.read_text(encoding="utf-8")
        if not SUSPICIOUS.search(text):
            continue
        tree = ast.parse(text)
        found += [f"{name}: {call}" for call in calls(tree) if call in FORBIDDEN]
        if str(name.parent) not in MAY_PICKLE:
            found += [f"{name}: {call}" for call in calls(tree) if "pickle" in call]
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                found.append(f"{name}: shell={ast.unparse(node.value)}")
    assert found == []


# No module imports itself indirectly, and no class name has two meanings.
#
# `lint-imports` keeps the order of packages. This looks inside them, and at every import: also those in functions and
# those for type checkers, which hide a circle and do not break it. Only within one folder may modules name each other's
# types: the alternative is a protocol for each class that one of them uses.


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Every module with all that it imports of ours, except the types of modules in its own folder."""
    paths = {module_name(path, root): path for path in (root / "fairtrial").rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        every = imported_modules(ast.walk(tree), paths)
        types = {node for test in ast.walk(tree) if is_for_types(test) for part in test.body for node in ast.walk(part)}
        others = imported_modules((node for node in ast.walk(tree) if node not in types), paths)
        graph[module] = {name for name in every if name in others or paths[name].parent != path.parent} - {module}
    return graph


def imported_modules(nodes: Iterable[ast.AST], paths: Mapping[str, Path]) -> set[str]:
    imported: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert not node.level, "a relative import, which this test does not follow"
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            imported.update(name if name in paths else node.module for name in within)
    return imported & paths.keys()


def is_for_types(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def class_definitions(root: Path) -> dict[str, list[str]]:
    """Every class name with the modules that define a class of that name, at any depth."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "fairtrial").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module_name(path, root))
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle of imports, the first of its modules also the last; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = import_graph(SOURCE)
    assert {"fairtrial", "fairtrial.base.backoff", "fairtrial.integrations.model_server.service"} <= graph.keys()
    assert circle(graph) == []


@pytest.mark.parametrize(
    ("first", "late", "found"),
    [
        ("render/a", "def f():\n    from fairtrial.render import b", True),
        ("render/a", "if TYPE_CHECKING:\n    import fairtrial.render.b", False),
        ("render/a", "if TYPE_CHECKING:\n    pass\nelse:\n    import fairtrial.render.b", True),
        ("render/a", "if TYPE_CHECKING:\n    import fairtrial.render.b\nimport fairtrial.render.b", True),
        ("store/a", "if TYPE_CHECKING:\n    import fairtrial.render.b", True),
    ],
)
def test_a_circle_that_is_closed_late_is_found(first: str, late: str, found: bool, tmp_path: Path) -> None:
    for folder in ("render", "store"):
        (tmp_path / "fairtrial" / folder).mkdir(parents=True)
        (tmp_path / "fairtrial" / folder / "__init__.py").write_text("")
    module = f"fairtrial.{first.replace('/', '.')}"
    (tmp_path / "fairtrial" / f"{first}.py").write_text(late)
    (tmp_path / "fairtrial" / "render" / "b.py").write_text(f"from {module} import f")
    assert set(circle(import_graph(tmp_path))) == ({module, "fairtrial.render.b"} if found else set())


def test_no_class_name_is_defined_twice() -> None:
    found = class_definitions(SOURCE)
    assert len(found) > 500
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


# Every import is declared: a core install must not depend on packages that happen to be installed.


# The names packages are imported by, where they differ from those they are installed by.
IMPORTED_AS = {
    "PyYAML": "yaml",
    "inspect-ai": "inspect_ai",
    "typing-extensions": "typing_extensions",
    "genai-prices": "genai_prices",
    "prometheus-client": "prometheus_client",
    "opentelemetry-proto": "opentelemetry",
    "markdown-it-py": "markdown_it",
    "math-verify": "math_verify",
    "rouge-score": "rouge_score",
}
# Brought along by a declared dependency, as a documented part of it.
PARTS = {
    "pydantic_core": "pydantic",
    "trio": "anyio",
    "referencing": "jsonschema",
    "yarl": "aiohttp",
    "google": "opentelemetry",
}
# Brought by authors who run the suites of `fairtrial.testing` on a part of their own.
BROUGHT = {"pytest", "hypothesis"}
# Brought by users who train: `fairtrial.rl` installs no trainer.
TRAINERS = {"datasets", "openenv", "skyrl_gym", "torch", "transformers", "trl", "verifiers"}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def declared(*extras: str) -> set[str]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    names = {re.match(r"[\w.-]+", line)[0] for line in lines}  # type: ignore[index]
    return {IMPORTED_AS.get(name, name) for name in names} | set(sys.stdlib_module_names) | {"fairtrial"}


def imported(folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    return found


def test_what_tests_read_is_part_of_the_source_distribution() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    read = {name for text in texts for name in re.findall(r'\bROOT / "([\w.-]+)"', text)} - {".mypy_cache"}
    read |= {"examples"}  # Run by tests that put its path together.
    assert "scripts" in read
    assert sorted(read - set(build["include"]) - {"pyproject.toml"}) == []  # That one is always in it.


def test_type_checkers_see_only_names_that_exist() -> None:
    """A module's `__getattr__` would tell them that every name does."""
    for path in sorted((ROOT / "src").rglob("__init__.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert "__getattr__" not in top, path


def test_everything_imported_is_declared() -> None:
    known = declared(*EXTRAS) | BROUGHT | TRAINERS
    strangers = {
        name: place for name, place in imported("src").items() if name not in known and PARTS.get(name, "") not in known
    }
    assert strangers == {}


@pytest.mark.parametrize("folder", ["viewer", "cli", "stats", "reports/render"])
def test_the_default_installation_has_what_viewer_and_commands_import(folder: str) -> None:
    """What only some commands need is imported in `try`, or by the parts they call."""
    optional = {"redis", "botocore", "psycopg"}  # Of `doctor`, which checks these servers.
    optional |= {"aiohttp", "joserfc"}  # Of `serve`, which says that it needs its extra.
    assert imported(f"src/fairtrial/{folder}").keys() - declared() <= optional


def test_errors_name_the_extras_of_the_project() -> None:
    assert {*get_args(Extra.__value__), "all"} == EXTRAS.keys()
    assert len(EXTRAS) == 14
