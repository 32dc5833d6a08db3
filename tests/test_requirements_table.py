"""tests/requirements.toml says what Fairtrial must do; these tests keep every promise proven."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("pages")


def test_every_promise_is_proven(script: ModuleType) -> None:
    assert script.problems(script.LIST.read_text(encoding="utf-8"), script.proven_by(ROOT / "tests")) == []


def test_the_list_has_every_number_once_and_in_order(script: ModuleType) -> None:
    numbers = [number for _, number, _ in script.requirements(script.LIST.read_text(encoding="utf-8"))]
    assert numbers == [f"R{number}" for number in range(1, 161)]


TEXT = """planned = ["R5"]

[First]
R1 = "one"
R2 = "two"

[Second]
R3 = "three"
R4 = "four"
R5 = "five"
"""

TESTS = """
import pytest

@pytest.mark.proves("R1", "R3")
def test_one(): ...

@pytest.mark.proves("R2")
class TestTwo:
    @pytest.mark.parametrize("x", [1])
    @pytest.mark.proves("R4")
    async def test_inner(self, x): ...
    def helper(self): ...

@pytest.mark.proves("R9")
def helper(): ...

@pytest.mark.skip
def test_unmarked(): ...
"""


def test_markers_are_read_from_functions_methods_and_classes(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "deep"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(TESTS)
    proofs = script.proven_by(tmp_path / "tests")
    one, inner = "tests/deep/test_it.py::test_one", "tests/deep/test_it.py::TestTwo::test_inner"
    assert proofs == {"R1": [one], "R3": [one], "R2": [inner], "R4": [inner]}
    assert script.problems(TEXT, proofs) == []
    page = script.requirements_page(TEXT, proofs)
    assert f"| R1 | one | `{one}` |" in page
    assert "| R5 | five | `planned` |" in page


def test_markers_of_whole_modules_and_classes_are_read_too(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        'import pytest\npytestmark = [pytest.mark.anyio, pytest.mark.proves("R1")]\n'
        'class TestIt:\n    pytestmark = pytest.mark.proves("R2")\n    def test_inner(self): ...\n'
    )
    inner = "tests/test_it.py::TestIt::test_inner"
    assert script.proven_by(tmp_path / "tests") == {"R1": [inner], "R2": [inner]}


def test_unknown_repeated_and_unproven_numbers_are_named(script: ModuleType) -> None:
    text = TEXT + '[Third]\nR4 = "again"\n'
    found = script.problems(text, {"R1": ["t"], "R2": ["t"], "R3": ["t"], "R117": ["tests/test_x.py::test_y"]})
    assert found == [
        "R4 is in the list twice",
        "R117 is not in the list, and tests/test_x.py::test_y says it proves it",
        "no test proves R4, and it is not planned",
        "no test proves R4, and it is not planned",
    ]


def test_the_command_says_what_it_does(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    assert "--write" in capsys.readouterr().out
    assert script.main(["--check"]) == 0
    assert capsys.readouterr().out == "the generated parts are up to date\n"
