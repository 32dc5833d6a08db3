"""The documentation site: every page and every public name, without a warning, without anything from elsewhere."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairtrial

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once for all processes of the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, str(ROOT / "scripts" / "site"), "--output", str(folder)]
            built = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
            assert built.returncode == 0, built.stderr
    return folder / fairtrial.__version__


@pytest.mark.long
class TestSite:
    def test_every_page_of_the_documentation_is_on_it(self, site: Path) -> None:
        pages = {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
        built = {path.relative_to(site) for path in site.rglob("*.html")}
        assert pages - built == {Path("docs/README.html")}

    def test_every_public_name_has_an_entry(self, site: Path) -> None:
        reference = "".join(path.read_text(encoding="utf-8") for path in (site / "python").glob("*.html"))
        entries = set(re.findall(r'<dt class="[^"]*" id="fairtrial\.([\w.]+)"', reference))
        assert {"EvalSuite", "compare", "EvalReport", "EvalSuite.run_sync"} <= entries
        missing = [name for name in fairtrial.__all__ if not name.startswith("__") and name not in entries]
        assert missing == []

    def test_it_can_be_searched_without_a_server(self, site: Path) -> None:
        assert "smallest_difference_that_matters" in (site / "searchindex.js").read_text(encoding="utf-8")
