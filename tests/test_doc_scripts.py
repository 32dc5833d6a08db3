"""Generated parts of the documentation are up to date: pictures and command options."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import fairtrial
from fairtrial.cli.app import command_tree
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
REFERENCE = ROOT / "docs" / "reference" / "commands.md"


def test_the_pictures_are_those_that_the_commands_make_today() -> None:
    made = load_script("pictures").pictures()
    kept = {path.stem: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == [], "run scripts/pictures and look at them"


@pytest.mark.long
def test_the_screenshots_show_the_pages_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("pictures")
    assert script.stale() == [], "run scripts/pictures --screens and look at them"
    styles = tmp_path / "view.css"
    styles.write_text("body { color: red }")
    monkeypatch.setattr(script, "STYLES", styles)
    assert script.stale() == sorted(path.stem for path in PICTURES.glob("view-*.png"))


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_fetches_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ElementTree.fromstring(text)
    title = tree.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text
    assert "@import" not in text


def test_every_picture_is_shown_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [path.name for path in PICTURES.glob("*.*g") if f"pictures/{path.name})" not in shown] == []


def test_the_reference_has_every_option_of_every_command_in_the_words_of_its_help() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    assert load_script("pages").rewritten_commands(text) == text, "run scripts/pages --write"


def test_the_reference_is_complete_without_its_script() -> None:
    """The options are looked up in the page here, so that a fault of the script is no fault of the page."""
    parts = re.split(r"^### (.*)$", REFERENCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    root: Any = command_tree()
    leaves: dict[str, Any] = {}
    for name, command in root.commands.items():
        below = getattr(command, "commands", None)
        leaves |= {name: command} if below is None else {f"{name} {inner}": below[inner] for inner in below}
    assert sorted(sections) == sorted(leaves)
    for name, command in leaves.items():
        asked = {option for one in command.params if one.param_type_name == "option" for option in one.opts}
        listed = "\n".join(re.findall(r"^- (?:shared: .*|.*?(?=:))", sections[name], re.MULTILINE))
        assert {"--json", *re.findall(r"`(--?[a-z][a-z-]*)`", listed)} == asked, name


def test_a_stale_reference_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("pages")
    page = tmp_path / "commands.md"
    page.write_text("# Commands\n" + script.MARK)
    monkeypatch.setattr(script, "PAGE", page)
    assert script.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().out
    assert script.main(["--write"]) == 0
    assert script.main(["--check"]) == 0
    assert script.main([]) == 2


def test_every_public_name_has_a_docstring_and_is_in_the_reference_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("site")
    assert script.undocumented() == []
    script.write_reference(tmp_path / "python")
    described = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "python").glob("*.rst"))
    entries = re.findall(r"^\.\. [\w:]+:: fairtrial\.(?:\w+\.)*(\w+)$", described, re.MULTILINE)
    assert {name for _, name, _ in script.public_names()} <= set(entries)
    monkeypatch.setattr(fairtrial.evaluate, "__doc__", None)
    assert "fairtrial.evaluate" in script.undocumented()
