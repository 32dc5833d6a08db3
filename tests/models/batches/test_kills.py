"""kill -9 at every commit and at every request to the provider: each request is answered and paid for exactly once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def killed_everywhere(store: str, provider: str, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.batches.kills", store, provider, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/runs.db"
    return str(request.getfixturevalue("pg_url"))


SOME = ",".join(map(str, range(8, 78, 10)))


@pytest.mark.long
@pytest.mark.proves("R142")
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_run_killed_at_a_commit_or_a_request_pays_for_no_request_twice(provider: str, store: str) -> None:
    found = killed_everywhere(store, provider, "--only", SOME)
    assert found["wrong"] == []
    assert found["points"] >= 25
    assert found["killed"] >= 5


@pytest.mark.long
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_run_of_four_turns_killed_at_random_moments_pays_for_no_request_twice(provider: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/runs.db"
    found = killed_everywhere(store, provider, "--random", "6", "--trials", "60", "--turns", "4")
    assert found["wrong"] == []
    assert found["killed"] >= 2
