"""The first five minutes of a new user: the wheel in an empty environment, without a key and without a network."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "first-hour"
GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.proves("R91", "R92", "R103")
def test_a_newcomer_gets_from_nothing_to_a_verdict_and_sees_what_the_golden_screens_show() -> None:
    command = [sys.executable, str(SCRIPT), "--minutes"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1100)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "network: unreachable" in done.stdout
    assert "13 screens are as they should be" in done.stdout


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT), run_name="first_minutes")


@pytest.mark.parametrize("apart", [True, False])
def test_the_script_would_notice_the_network_in_a_namespace_and_without(
    script: dict[str, Any], tmp_path: Path, apart: bool
) -> None:
    newcomer = script["Newcomer"](tmp_path, Path(sys.executable).parent)
    if not apart:
        newcomer.apart = []
    newcomer.check_the_watch()
    newcomer.check_no_attempt()
    (tmp_path / "caller.py").write_text(
        "import contextlib, socket\n"
        "with contextlib.suppress(OSError):\n    socket.create_connection(('192.0.2.7', 443), 1)\n"
    )
    assert newcomer.type("python caller.py", tmp_path).returncode == 0  # It hides what it did,
    with pytest.raises(script["Failed"], match=r"192\.0\.2\.7"):
        newcomer.check_no_attempt()  # in vain.


def test_the_script_tells_what_changed_on_a_screen_but_for_ids_and_times(script: dict[str, Any]) -> None:
    kept = (GOLDEN / "run.txt").read_text(encoding="utf-8")
    line, _, rest = kept.removesuffix("[exit 0]\n").partition("\n")
    assert "<the-run-id>" in rest
    lived = rest.replace("<the-run-id>", "0123456789ab").replace(" <time>", "    1.7 s")
    assert script["check_screen"]("run", line[2:], subprocess.CompletedProcess([], 0, lived, ""), write=False) is None
    worse = lived.replace("76.9%", "76.8%")
    changes = script["check_screen"]("run", line[2:], subprocess.CompletedProcess([], 0, worse, ""), write=False)
    assert "76.8%" in changes
    assert script["check_screen"]("run", line[2:], subprocess.CompletedProcess([], 1, lived, ""), write=False)
