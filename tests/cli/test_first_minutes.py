"""The first five minutes, from nothing: the wheel in an empty environment, without a key and without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "first-minutes"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.proves("R91", "R92", "R103")
def test_a_newcomer_gets_from_nothing_to_a_verdict_and_sees_what_the_golden_screens_show() -> None:
    done = subprocess.run([sys.executable, SCRIPT], check=False, capture_output=True, text=True, timeout=1100)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "network: unreachable" in done.stdout
    assert "10 screens are as they should be" in done.stdout
