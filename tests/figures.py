"""Figures of the measured tests: asserted against their limits, and kept with `--figures FILE` for the history."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

import fairtrial

ROOT = Path(__file__).resolve().parent.parent

type Figure = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--figures`."""
    parser.addoption("--figures", type=Path, help="append the figures of measured tests to this file, as JSON lines")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Keeps a figure under a name that stays the same over commits, then asserts its limit."""
    file: Path | None = request.config.getoption("--figures")

    def check(name: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        print(f"{name}: {value:.3g}")
        if file is not None:
            keep(file, name, value, at_most=at_most, at_least=at_least)
        assert at_most is None or value <= at_most, f"{name} must be at most {at_most:g} (got {value:.4g})"
        assert at_least is None or value >= at_least, f"{name} must be at least {at_least:g} (got {value:.4g})"

    return check


def keep(file: Path, name: str, value: float, *, at_most: float | None, at_least: float | None) -> None:
    """Append a figure to the history, with the version of Python and, in a checkout, the commit."""
    asked = ["git", "-C", str(ROOT), "log", "-1", "--format=%h"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    line = {
        "figure": name,
        "value": float(f"{value:.4g}"),
        "at_most": at_most,
        "at_least": at_least,
        "commit": commit,
        "version": fairtrial.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with file.open("a", encoding="utf-8") as history:
        history.write(json.dumps(line) + "\n")
