"""scripts/mutate: a fault is caught only if its test fails, and a wrong list is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent

SOURCE = """
def double(number):
    return number * 2


def greet(name):
    return f"hello {name}"
"""

TESTS = """
import time
import pytest
from subject import double, greet

def test_double():
    assert double(2) == 4

@pytest.mark.parametrize("number", [0, 3])
def test_parametrized(number):
    assert double(number) == 2 * number

def test_greet_is_text():
    assert isinstance(greet("you"), str)

@pytest.fixture
def doubled():
    assert double(2) == 4
    return 4

def test_fixture(doubled):
    assert doubled == 4

def test_slow():
    if double(2) != 4:
        time.sleep(30)

@pytest.mark.skip
def test_skipped():
    pass

def test_broken():
    assert double(2) == 5
"""

FIND = "    return number * 2\n"
REPLACE = "    return number + 3\n"


def entry(**changes: str) -> str:
    fields = {
        "id": "doubles",
        "file": "src/subject.py",
        "find": FIND,
        "replace": REPLACE,
        "test": "tests/test_subject.py::test_double",
        "proves": "numbers are not doubled",
        **changes,
    }
    return "[[fault]]\n" + "".join(f"{name} = '''\n{text}'''\n" for name, text in fields.items())


type Mutate = Callable[..., tuple[int, str]]


@pytest.fixture
def script() -> ModuleType:
    return load_script("mutate")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "src" / "subject.py").write_text(SOURCE)
    (root / "tests" / "test_subject.py").write_text(TESTS)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return root


@pytest.fixture
def mutate(
    script: ModuleType, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Mutate:
    monkeypatch.setattr(script, "ROOT", project)
    # As with an editable install: the working tree can be imported too, and must not be what is tested.
    monkeypatch.setenv("PYTHONPATH", str(project / "src"))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second saved per call

    def run(text: str, *arguments: str) -> tuple[int, str]:
        (project / "tests" / "mutations.toml").write_text(text)
        code = script.main(list(arguments))
        return code, capsys.readouterr().out

    return run


def test_a_fault_is_caught_when_its_test_fails_and_the_tree_is_left_alone(mutate: Mutate, project: Path) -> None:
    before = {path: path.read_bytes() for path in project.rglob("*.py")}
    code, printed = mutate(entry())
    assert "caught    doubles" in printed
    assert "1 faults: 1 caught, 0 not caught" in printed
    assert code == 0
    assert {path: path.read_bytes() for path in project.rglob("*.py")} == before


def test_a_fault_is_caught_when_one_of_the_tests_parameters_fails(mutate: Mutate) -> None:
    assert mutate(entry(test="tests/test_subject.py::test_parametrized"))[0] == 0


def test_a_fault_that_no_test_notices_survives_and_fails_the_command(mutate: Mutate) -> None:
    greeting = entry(
        id="greets", find='f"hello {name}"', replace='f"bye {name}"', test="tests/test_subject.py::test_greet_is_text"
    )
    code, printed = mutate(entry() + greeting, "--jobs", "2")
    assert code == 1
    assert "caught    doubles" in printed
    assert "SURVIVED  greets: tests/test_subject.py::test_greet_is_text passes although" in printed
    assert "2 faults: 1 caught, 1 not caught" in printed
    assert printed.endswith("not caught: greets\n")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"replace": "    return number +* 3\n"}, "error"),  # the test's file cannot even be imported
        ({"test": "tests/test_subject.py::test_fixture"}, "error"),
        ({"test": "tests/test_subject.py::test_slow"}, "timeout"),
        ({"replace": "    __import__('os')._exit(1)\n"}, "error"),
    ],
    ids=["collection", "fixture", "timeout", "exit"],
)
@pytest.mark.long
def test_what_is_not_a_failed_test_counts_only_where_the_entry_expects_it(
    mutate: Mutate, change: dict[str, str], expected: str
) -> None:
    code, printed = mutate(entry(**change), "--timeout", "2")
    assert code == 1
    assert (
        f"UNCLEAR   doubles: {change.get('test', 'tests/test_subject.py::test_double')} ended with {expected}"
        in printed
    )
    assert mutate(entry(**change, expect=expected), "--timeout", "2")[0] == 0


@pytest.mark.parametrize("test", ["test_broken", "test_skipped"])
def test_tests_must_run_and_pass_without_the_fault(mutate: Mutate, test: str) -> None:
    code, printed = mutate(entry(test=f"tests/test_subject.py::{test}"))
    assert code == 2
    assert printed.startswith("the tests must pass without any fault:")
    assert test in printed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (entry() + entry(), "fault doubles: the id must be unique (it occurs 2 times)"),
        (entry(find="return 1"), "fault doubles: find must occur exactly once in src/subject.py (it occurs 0 times)"),
        (entry(find="return"), "fault doubles: find must occur exactly once in src/subject.py (it occurs 2 times)"),
        (entry(find=""), "find must occur exactly once"),
        (entry(replace=FIND), "fault doubles: replace must differ from find"),
        (entry(file="src/other.py"), "file must name a file of the repository (got 'src/other.py')"),
        (entry(test="tests/test_subject.py::test_missing"), "test must name a test of the repository"),
        (entry(test="tests/test_other.py::test_x"), "test must name a test of the repository"),
        (entry(expect="success"), "expect must be one of failure, error, timeout (got 'success')"),
        (entry(reason="none"), "unknown key reason"),
        ("[[fault]]\nid = 'short'\n", "fault short: file, find, proves, replace, test must be given"),
        (entry().replace("'''\nnumbers are not doubled'''", "7"), "every value must be text"),
        ("[[fault]", "mutations.toml"),
    ],
)
def test_a_wrong_list_is_refused_before_anything_runs(mutate: Mutate, text: str, problem: str) -> None:
    code, printed = mutate(text)
    assert code == 2
    assert problem in printed


def test_faults_that_are_not_asked_for_may_be_out_of_date(mutate: Mutate) -> None:
    assert mutate(entry() + entry(id="stale", find="gone"), "doubles")[0] == 0


def test_faults_are_chosen_by_id_or_by_seed_and_listed(mutate: Mutate) -> None:
    text = "".join(entry(id=f"f{number}") for number in range(20))
    assert mutate(text, "--list", "f3", "f1")[1].splitlines()[::3] == ["f1", "f3"]
    some = mutate(text, "--list", "--sample", "4", "--seed", "a")[1]
    assert len(some.splitlines()[::3]) == 4
    assert mutate(text, "--list", "--sample", "4", "--seed", "a")[1] == some
    assert mutate(text, "--list", "--sample", "4", "--seed", "b")[1] != some
    assert mutate(text, "f99") == (2, "no fault with the id f99; see scripts/mutate --list\n")
    assert mutate("") == (0, f"{os.path.join('tests', 'mutations.toml')} lists no faults\n")


def test_options_that_make_runs_repeatable_are_given_where_the_project_has_the_plugins(
    script: ModuleType, tmp_path: Path
) -> None:
    assert script.options(tmp_path) == ["-p", "no:cacheprovider"]
    assert {"no:randomly", "--timeout=0", "--hypothesis-seed=0"} <= set(script.options(ROOT))


def test_mutations_change_one_expression_of_one_line_and_leave_out_what_changes_no_result(script: ModuleType) -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    DEBUG = True
def judge(value: float, limit: float = 2) -> bool:
    note(value)
    if not value < limit and list(zip([1], strict=True)):
        return value + 1 == limit
    return "é" in "é" or value is None
"""
    changed = {
        mutation.apply(source).splitlines()[mutation.line - 1].strip()
        for mutation in script.mutations_of("src/fairtrial/x/y.py", source)
    }
    assert changed == {
        "def judge(value: float, limit: float = 3) -> bool:",
        "pass",
        "if (not (not value < limit and list(zip([1], strict=True)))):",
        "if ((not value < limit) or (list(zip([1], strict=True)))):",
        "if (value < limit) and list(zip([1], strict=True)):",
        "if not value <= limit and list(zip([1], strict=True)):",
        "if not value < limit and list(zip([2], strict=True)):",
        "return value + 1 != limit",
        "return (value) - (1) == limit",
        "return value + 2 == limit",
        'return (("é" in "é") and (value is None))',
        'return "é" not in "é" or value is None',
        'return "é" in "é" or value is not None',
    }


@pytest.fixture
def package(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one line that its tests check, one that they execute, and one that a long test checks."""
    folder = project / "src" / "fairtrial" / "sums"
    folder.mkdir(parents=True)
    for parent in (folder, folder.parent):
        (parent / "__init__.py").touch()
    (folder / "sums.py").write_text(
        "def add(a, b):\n    return a + b\ndef log(a):\n    return str(a * 10)\ndef late(a):\n    return a - 7\n"
    )
    (project / "tests" / "sums").mkdir()
    (project / "tests" / "sums" / "test_sums.py").write_text(
        "import pytest\n"
        "from fairtrial.sums.sums import add, late, log\n"
        "def test_add():\n    assert add(2, 3) == 5\n    assert log(2)\n"
        "@pytest.mark.long\ndef test_late():\n    assert late(8) == 1\n"
    )
    (project / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["long", "measured", "soak"]\n')
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    for name in [name for name in os.environ if name.startswith(("COV_", "COVERAGE_", "PYTEST_XDIST"))]:
        monkeypatch.delenv(name)
    return folder


def test_mutations_are_drawn_by_the_seed(mutate: Mutate, package: Path) -> None:
    drawn = [mutate("", "--draw", "2", "--package", "sums", "--list", "--seed", seed)[1] for seed in "aabcdef"]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1
    assert drawn[0].count("src/fairtrial/sums/sums.py:") == 2


@pytest.mark.long
def test_a_drawn_mutation_is_noticed_by_the_tests_of_its_package_or_survives(mutate: Mutate, package: Path) -> None:
    code, printed = mutate("", "--draw", "9", "--package", "sums", "--survivors", "0", "--jobs", "2")
    assert printed.count("noticed ") == 2, printed  # One by the tests that execute its line, one by a long test.
    assert "by tests/sums/test_sums.py::test_add (call)" in printed
    assert "by tests/sums/test_sums.py::test_late (call)" in printed
    assert "SURVIVED  src/fairtrial/sums/sums.py:4" in printed
    assert "3 mutations: 1 survived, 0 may" in printed
    assert code == 1


def test_the_projects_own_list_fits_its_files(script: ModuleType) -> None:
    faults = script.read_faults(ROOT)
    assert [fault.id for fault in faults if fault.id != fault.id.lower() or " " in fault.id] == []
    for fault in faults:
        if fault.file.endswith(".py") and fault.expect != "error":
            broken = (ROOT / fault.file).read_text(encoding="utf-8").replace(fault.find, fault.replace)
            compile(broken, fault.id, "exec", dont_inherit=True)  # A file that cannot be imported proves nothing.
