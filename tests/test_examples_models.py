"""The examples of prompts, models and agents run as they are."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ToolInvoked

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_function_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("function", monkeypatch).main()
    assert report.pass_rate == pytest.approx(2 / 3)


@pytest.mark.proves("R66")
def test_a_prompt_is_evaluated_in_two_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("prompt", monkeypatch).main()
    assert report["brief"].pass_rate == report["thorough"].pass_rate == 1.0


def test_an_agent_with_tools_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("tool_agent", monkeypatch).main()
    assert report.pass_rate == 1.0
    assert report.total_tokens > 0


def test_code_is_tested_in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("sandboxed_code", monkeypatch).main()
    assert report.pass_rate == 1.0
    assert [call.result for call in report.results[0].session[ToolInvoked].all()] == ["13"]


def test_agents_that_exist_already_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    function, endpoint = load("existing_agent", monkeypatch).main()
    assert function.pass_rate == 1.0
    assert endpoint.pass_rate == 0.5
    assert function.total_tokens > 0
    assert endpoint.total_tokens == 30


@pytest.mark.long
@pytest.mark.parametrize("name", ["function", "prompt", "tool_agent", "existing_agent", "sandboxed_code"])
def test_an_example_run_from_the_shell_ends_quietly(name: str) -> None:
    """With warnings on, so that nothing left open goes unnoticed."""
    command = [sys.executable, "-W", "always", str(EXAMPLES / f"{name}.py")]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    assert ended.returncode == 0
    assert "pass rate" in ended.stdout
    assert ended.stderr == ""


@pytest.mark.proves("R39")
def test_a_judge_is_checked_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, report = load("judge", monkeypatch).main()
    assert checked.ok
    assert report.pass_rate == 0.5


def test_an_agent_of_another_framework_is_evaluated_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("pydantic_ai_agent", monkeypatch).main()
    assert report.pass_rate == 1.0
    assert report.total_tokens > 0
