"""The pytest plugin: what evals in tests came to, at the end of a session and in a step summary.

Pytest loads this at its start in every project that has fairtrial installed, so it imports nothing of ours until a
test has used `fairtrial.testing.assert_eval`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

_PROPERTY = "fairtrial"
_RUNS = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options, for every eval of a session."""
    group = parser.getgroup("fairtrial", "evals")
    group.addoption(
        "--eval-store", metavar="URL", default=None, help="keep the runs of evals in this store (default: in memory)"
    )
    group.addoption(
        "--eval-max-samples", metavar="N", type=int, default=None, help="use at most N samples in every eval"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """While a test runs, its evals are told the session's options and leave what they came to with the test."""
    assertions = sys.modules.get("fairtrial.testing.assertions")
    if assertions is None:
        return (yield)
    settings = assertions.SessionSettings(
        item.config.getoption("eval_store"), item.config.getoption("eval_max_samples")
    )
    runs = item.config.stash.setdefault(_RUNS, assertions.SharedRuns())
    with assertions.recording(settings, lambda entry: item.user_properties.append((_PROPERTY, entry)), runs):
        return (yield)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A section with a line for every eval; and Markdown for whoever offers a file for it."""
    if hasattr(config, "workerinput"):
        return  # A worker of pytest-xdist: what it found reaches the process that started it.
    entries = list(_entries(terminalreporter))
    if not entries:
        return
    terminalreporter.section("evals")
    for entry in entries:
        terminalreporter.write_line(entry["line"])
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with open(summary, "a", encoding="utf-8") as file:
            file.writelines(f"{entry['markdown']}\n\n" for entry in entries)


def _entries(terminalreporter: Any) -> Iterator[dict[str, str]]:
    """What tests left, from this process or from the workers of pytest-xdist."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, entry in report.user_properties:
                    if name == _PROPERTY:
                        yield entry
