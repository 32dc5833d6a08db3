"""Loading a suite by its import string."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairtrial import ConfigurationError
from fairtrial.suites.loading import load_suite

SUITE = """
from fairtrial import Dataset, EvalSuite, exact_match
{name} = EvalSuite({called!r}, Dataset.of({{"a": "b"}}), str.upper, exact_match)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def one(name: str = "suite", called: str = "letters") -> str:
    return SUITE.format(name=name, called=called)


@pytest.mark.proves("R59")
def test_a_file_with_one_suite_means_that_suite(project: Path) -> None:
    write(project / "evals" / "letters.py", one("whatever"))
    assert load_suite("evals/letters.py").name == "letters"
    assert load_suite(str(project / "evals" / "letters.py")) is load_suite("evals/letters.py")


def test_a_module_with_one_suite_means_that_suite(project: Path) -> None:
    write(project / "checks" / "letters.py", one())
    write(project / "checks" / "__init__.py", "")
    assert load_suite("checks.letters").name == "letters"
    assert load_suite("checks.letters") is load_suite("checks/letters.py")


def test_one_suite_under_two_names_is_one_suite(project: Path) -> None:
    write(project / "twice.py", one() + "also = suite\n")
    assert load_suite("twice.py").name == "letters"


@pytest.mark.parametrize("where", ["several.py", "several"])
def test_several_suites_are_named_and_chosen_by_name(project: Path, where: str) -> None:
    write(project / "several.py", one("first", "one") + one("second", "two") + "class Kept:\n    inner = first\n")
    with pytest.raises(
        ConfigurationError, match=rf"{where} has 2 suites; name one of them: {where}:first, {where}:second"
    ):
        load_suite(where)
    assert load_suite(f"{where}:second").name == "two"
    assert load_suite(f"{where}:Kept.inner").name == "one"
    with pytest.raises(ConfigurationError, match=r"no 'third' in several(.py)?; its suites are: first, second"):
        load_suite(f"{where}:third")
    with pytest.raises(ConfigurationError, match=r":Dataset must be an EvalSuite \(got ABCMeta\)"):
        load_suite(f"{where}:Dataset")


def test_a_file_finds_its_neighbours_and_the_project(project: Path) -> None:
    write(project / "evals" / "near.py", "CALLED = 'near'\n")
    write(project / "whole.py", "from fairtrial import exact_match as judge\n")
    text = "from near import CALLED\nfrom whole import judge\n" + one().replace("'letters'", "CALLED")
    write(project / "evals" / "beside.py", text)
    assert load_suite("evals/beside.py").name == "near"


def test_a_file_in_a_package_is_imported_as_part_of_it(project: Path) -> None:
    write(project / "pack" / "__init__.py", "")
    write(project / "pack" / "names.py", "CALLED = 'packed'\n")
    write(project / "pack" / "evals.py", "from .names import CALLED\n" + one().replace("'letters'", "CALLED"))
    assert load_suite("pack/evals.py").name == "packed"
    assert "pack.evals" in sys.modules


def test_a_file_named_like_a_module_of_python_does_not_take_its_place(project: Path) -> None:
    import json

    write(project / "evals" / "json.py", one())
    assert load_suite("evals/json.py").name == "letters"
    assert sys.modules["json"] is json


def test_a_missing_suite_is_reported(project: Path) -> None:
    write(project / "empty.py", "")
    for where, said in [
        ("", "name a suite"),
        ("missing.py", "there is no file missing.py"),
        ("evals/missing", "there is no file evals/missing"),
        (".." + os.sep, "is a folder: name the file"),
        ("no.such.module", "there is no module no "),
        ("empty.py", "empty.py must define an EvalSuite at the top level"),
        ("empty.py:suite", "there is no 'suite' in empty.py, nor any other EvalSuite"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            load_suite(where)


def test_an_error_in_the_file_is_reported_with_its_line(project: Path) -> None:
    write(project / "helper.py", "def make():\n    return 1 / 0\n")
    write(project / "raises.py", "import helper\n\nhelper.make()\n")
    write(project / "syntax.py", "x = 1\ny = (\n")
    write(project / "needs.py", "import nothing_of_that_name\n")
    write(project / "leaves.py", "import sys\nsys.exit(3)\n")
    for where, said in [
        ("raises.py", r"importing raises.py failed at helper.py:2: ZeroDivisionError: division by zero"),
        ("raises", r"importing raises failed at helper.py:2: ZeroDivisionError"),
        ("syntax.py", r"importing syntax.py failed at syntax.py:2: SyntaxError"),
        ("needs.py", r"importing needs.py failed at needs.py:1: ModuleNotFoundError: .*nothing_of_that_name"),
        ("needs", r"importing needs failed at needs.py:1: ModuleNotFoundError: .*nothing_of_that_name"),
        ("leaves.py", r"importing leaves.py failed at leaves.py:2: SystemExit: 3"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            load_suite(where)
    assert "raises" not in sys.modules


@pytest.mark.parametrize("where", ["slow.py", "neighbour.py", "package/inner.py"])
def test_a_file_that_changes_while_it_is_loaded_is_refused(project: Path, where: str) -> None:
    """Its code would get the version of code that was never loaded, and a worker of a fleet would execute it."""
    change = f"from pathlib import Path\nwith Path({where!r}).open('a') as file: file.write('# changed')\n"
    (project / "package").mkdir(exist_ok=True)
    (project / "package" / "__init__.py").write_text("")
    (project / "package" / "inner.py").write_text("value = 1\n")
    (project / "neighbour.py").write_text("import package.inner\n")
    (project / "slow.py").write_text(f"import neighbour\n{one()}\n{change}")
    with pytest.raises(ConfigurationError, match=rf"^{where} changed while the suite was being loaded"):
        load_suite("slow.py")
    (project / "slow.py").write_text(f"import neighbour\n{one(called='again')}\n")
    assert load_suite("slow.py").name == "again"


def test_a_file_that_a_suite_writes_before_it_imports_it_is_no_change(project: Path) -> None:
    write = "from pathlib import Path\nPath('generated.py').write_text('value = 1')\nimport generated\n"
    (project / "generating.py").write_text(write + one())
    assert load_suite("generating.py").name
