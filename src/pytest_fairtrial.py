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
_DECISIONS = pytest.StashKey[list[Any]]()


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
    """Pass the session's options to the evals of a test, and attach their results to the test."""
    assertions = sys.modules.get("fairtrial.testing.assertions")
    if assertions is None:
        return (yield)
    settings = assertions.SessionSettings(
        item.config.getoption("eval_store"), item.config.getoption("eval_max_samples")
    )
    runs = item.config.stash.setdefault(_RUNS, assertions.SharedRuns())
    with assertions.recording(settings, lambda entry: item.user_properties.append((_PROPERTY, entry)), runs):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """If every sample of a suite had its test, the gate over all of them decides, not the single samples."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None:
        return  # A worker of pytest-xdist: what it found reaches the process that started it.
    cases = [entry["case"] for entry in _entries(reporter) if "case" in entry]
    if not cases:
        return
    from fairtrial.testing.cases import decide_cases

    decisions = config.stash[_DECISIONS] = decide_cases(cases)
    if not all(decision.accepted for decision in decisions if decision.status is not None):
        session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)
    elif session.exitstatus == pytest.ExitCode.TESTS_FAILED and all(decision.accepted for decision in decisions):
        failed = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
        if all(any(_is_case(entry) for entry in report.user_properties) for report in failed):
            session.exitstatus = pytest.ExitCode.OK


def _is_case(entry: tuple[str, Any]) -> bool:
    return entry[0] == _PROPERTY and "case" in entry[1]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a section with a line for every eval; write a Markdown summary if GITHUB_STEP_SUMMARY is set."""
    if hasattr(config, "workerinput"):
        return  # A worker of pytest-xdist: what it found reaches the process that started it.
    entries = [entry for entry in _entries(terminalreporter) if "case" not in entry]
    entries += [{"line": each.line, "markdown": each.markdown} for each in config.stash.get(_DECISIONS, [])]
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
