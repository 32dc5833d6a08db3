"""tests/requirements.toml says what Fairtrial must do; these tests keep every promise proven."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.figures import Figure, keep
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


# scripts/attacks: every attack has a test and a place on the page, and test results decide the outcome.


ATTACK_TESTS = """
import pytest

@pytest.mark.soak
def test_slow(): ...

@pytest.mark.parametrize("number", [1, 2])
def test_number(number):
    assert number == 1

class TestGroup:
    def test_inner(self): ...
"""


def entry(name: str, *tests: str, **changes: str) -> str:
    fields = {"id": name, "area": "Area", "action": "Something is done.", "expected": "It holds.", **changes}
    lines = [f"{key} = '{value}'" for key, value in fields.items()]
    return "\n".join(["[[attack]]", *lines, f"tests = {list(tests)}", ""])


@pytest.fixture
def attacks_script() -> ModuleType:
    return load_script("attacks")


@pytest.fixture
def project(attacks_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_subject.py").write_text(ATTACK_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\n")
    monkeypatch.setattr(attacks_script, "ROOT", tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def test_every_attack_has_tests_and_a_place_on_the_page(
    attacks_script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attacks_script.main(["--check"]) == 0, capsys.readouterr().out
    attacks = attacks_script.read_attacks(ROOT)
    assert sum(bool(attack.limit) for attack in attacks) <= 5
    assert len(attacks) >= 50
    page = attacks_script.page(ROOT, attacks, attacks_script.read_promises(ROOT, attacks))
    assert [attack.id for attack in attacks if f"| `{attack.id}` |" not in page] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (entry("a"), "attack a: tests or a limit must be given"),
        (entry("a", "tests/test_subject.py::test_gone"), "test must exist (got tests/test_subject.py::test_gone)"),
        (entry("a", "tests/test_gone.py"), "test must exist (got tests/test_gone.py)"),
        (entry("a", "tests/test_subject.py", kind="x"), "attack a: unknown key kind"),
        ("[[attack]]\nid = 'a'", "attack a: action, area, expected must be given"),
        (2 * entry("a", "tests/test_subject.py"), "attack a: the id must be unique (it occurs 2 times)"),
        ("".join(entry(name, limit="No.") for name in "abcdef"), "at most 5 attacks may be documented limits (got 6)"),
        ("[[attack", "tests/attacks.toml: "),
    ],
)
def test_a_wrong_list_is_refused(
    attacks_script: ModuleType, project: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    (project / "tests" / "attacks.toml").write_text(text)
    assert attacks_script.main([]) == 2
    assert problem in capsys.readouterr().out


def test_outcomes_of_tests_decide_which_attacks_held(
    attacks_script: ModuleType, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    subject = "tests/test_subject.py"
    (project / "tests" / "attacks.toml").write_text(
        entry("whole-class", f"{subject}::TestGroup")
        + entry("one-of-two", f"{subject}::test_number")
        + entry("one-parameter", f"{subject}::test_number[1]")
        + entry("slow", f"{subject}::test_slow")
        + entry("known", limit="Nobody can.")
    )
    assert attacks_script.main([]) == 1
    out = capfd.readouterr().out
    assert [line.split() for line in out.splitlines()[-6:-1]] == [
        ["held", "whole-class"],
        ["broken", "one-of-two"],
        ["held", "one-parameter"],
        ["not", "run", "(soak)", "slow"],
        ["limit", "known"],
    ]
    assert attacks_script.main(["slow"]) == 0
    assert "held            slow" in capfd.readouterr().out
    assert attacks_script.main(["nothing"]) == 2
    assert attacks_script.main(["--check"]) == 0
    page = attacks_script.page(project, attacks_script.read_attacks(project))
    assert f"`{subject}::test_slow` (soak)" in page
    assert "- `known`: Nobody can." in page


# Measured figures: asserted against their limits, kept for the history, and plotted on the site.


@pytest.mark.parametrize(("value", "limits"), [(2.5, {"at_most": 2}), (0.5, {"at_least": 1})])
def test_a_figure_beyond_its_limit_fails(figure: Figure, value: float, limits: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match=rf"speed must be at (most|least) \d \(got {value}\)"):
        figure("speed", value, **limits)


def test_a_figure_within_its_limits_passes(figure: Figure) -> None:
    figure("speed", 1.5, at_least=1, at_most=2)


def test_the_history_shows_the_last_value_with_its_commit_and_plots_all(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    for value in (1.25, 1.5, 1.75):
        keep(history, "speed, x <bare>", value, at_most=2, at_least=None)
    keep(history, "another", 3, at_most=None, at_least=1)
    page = load_script("site").history_page(history)
    assert page.index("## another") < page.index("## speed, x <bare>")
    assert "1.75 at commit `" in page
    assert "must be at most 2." in page
    assert page.count("<circle") == 4
    assert page.count("stroke-dasharray") == 2
    assert 'aria-label="speed, x &lt;bare&gt;"' in page
