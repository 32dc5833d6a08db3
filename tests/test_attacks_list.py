"""scripts/attacks: every attack has a test and a place on the page, and test results decide the outcome."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent

TESTS = """
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
def script() -> ModuleType:
    return load_script("attacks")


@pytest.fixture
def project(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_subject.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def test_every_attack_has_tests_and_a_place_on_the_page(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out
    attacks = script.read_attacks(ROOT)
    assert sum(bool(attack.limit) for attack in attacks) <= 5
    assert len(attacks) >= 50
    page = script.page(ROOT, attacks, script.read_promises(ROOT, attacks))
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
    script: ModuleType, project: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    (project / "tests" / "attacks.toml").write_text(text)
    assert script.main([]) == 2
    assert problem in capsys.readouterr().out


def test_outcomes_of_tests_decide_which_attacks_held(
    script: ModuleType, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    subject = "tests/test_subject.py"
    (project / "tests" / "attacks.toml").write_text(
        entry("whole-class", f"{subject}::TestGroup")
        + entry("one-of-two", f"{subject}::test_number")
        + entry("one-parameter", f"{subject}::test_number[1]")
        + entry("slow", f"{subject}::test_slow")
        + entry("known", limit="Nobody can.")
    )
    assert script.main([]) == 1
    out = capfd.readouterr().out
    assert [line.split() for line in out.splitlines()[-6:-1]] == [
        ["held", "whole-class"],
        ["broken", "one-of-two"],
        ["held", "one-parameter"],
        ["not", "run", "(soak)", "slow"],
        ["limit", "known"],
    ]
    assert script.main(["slow"]) == 0
    assert "held            slow" in capfd.readouterr().out
    assert script.main(["nothing"]) == 2
    assert script.main(["--check"]) == 0
    page = script.page(project, script.read_attacks(project))
    assert f"`{subject}::test_slow` (soak)" in page
    assert "- `known`: Nobody can." in page
