"""What mypy says about code of a user: the sample of the README is fine, and unknown names are errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

import fairtrial
from tests.doc_pages import ROOT, blocks

MISTAKES = """
from fairtrial import EvalSuit
from fairtrial.fleet import NoSuchThing
from fairtrial.mailbox import NoSuchThing as A
from fairtrial.models import NoSuchThing as B
"""


@pytest.mark.long
def test_the_sample_in_the_readme_is_strictly_typed_and_unknown_names_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    samples = [block.text for block in blocks(text) if block.kind == "python"]
    assert samples
    (tmp_path / "sample.py").write_text("\n".join(samples))
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    monkeypatch.setenv("MYPYPATH", str(Path(fairtrial.__file__).parent.parent))
    found, errors, _ = api.run(
        [
            "--strict",
            "--config-file=",
            "--follow-imports=silent",
            f"--cache-dir={ROOT / '.mypy_cache' / 'users-view'}",
            str(tmp_path / "sample.py"),
            str(tmp_path / "mistakes.py"),
        ]
    )
    assert errors == ""
    lines = [line for line in found.splitlines() if ": error: " in line]
    assert [line for line in lines if "sample.py" in line] == []
    missing = [line.partition('no attribute "')[2].partition('"')[0] for line in lines]
    assert missing == ["EvalSuit", "NoSuchThing", "NoSuchThing", "NoSuchThing"]
