"""Evals as tests: a suite that must reach a floor, or be no worse than a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from fairtrial.errors import ConfigurationError
from fairtrial.report import EvalReport, ExperimentReport
from fairtrial.report.gate import GateResult, gate
from fairtrial.report.rules import GateRules
from fairtrial.report.untrusted import plain
from fairtrial.store.protocol import RunStore
from fairtrial.suites import EvalSuite

type Inconclusive = Literal["fail", "pass"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """What a test session asks of all its evals."""

    store: str | None = None
    max_samples: int | None = None


@dataclass(frozen=True, slots=True)
class _Session:
    settings: Settings
    record: Callable[[dict[str, str]], None]


_session: ContextVar[_Session | None] = ContextVar("fairtrial_session", default=None)


@contextmanager
def recording(settings: Settings, record: Callable[[dict[str, str]], None]) -> Iterator[None]:
    """What a test runner's plugin wraps a test in: settings for its evals, and where they leave their outcome."""
    token = _session.set(_Session(settings, record))
    try:
        yield
    finally:
        _session.reset(token)


def assert_eval(
    suite: EvalSuite,
    *,
    floor: float | None = None,
    rules: GateRules | Mapping[str, Any] | None = None,
    baseline: EvalReport | ExperimentReport | str | None = None,
    experiment: str | None = None,
    store: RunStore | str | None = None,
    max_samples: int | None = None,
    inconclusive: Inconclusive = "fail",
) -> EvalReport:
    """Run a suite and hold it against a floor or a gate; the report if it passes.

        def test_support():
            assert_eval(suite, floor=0.8)                                          # every experiment, by its interval
            assert_eval(suite, rules={"margin": 0.02}, baseline="baseline", experiment="terse")

    Args:
        suite: The suite.
        floor: The least pass rate: the whole interval must lie at or above it.
        rules: Rules of a gate, in place of a floor.
        baseline: What rules with a margin compare with: a report, or the name of another experiment of this suite.
        experiment: The one experiment that must pass; without it each must, but for the baseline.
        store: Where to keep the run; in memory unless given here or as `pytest --eval-store`.
        max_samples: Use at most this many samples; `pytest --eval-max-samples` lowers it for all.
        inconclusive: What too few samples to decide mean.

    Raises:
        AssertionError: it did not pass; the message says by how much, and shows samples that failed.
    """
    __tracebackhide__ = True
    wanted = _rules(floor, rules)
    session = _session.get()
    settings = session.settings if session is not None else Settings()
    limits = [number for number in (suite.config.max_samples, max_samples, settings.max_samples) if number is not None]
    report = _limited(suite, min(limits, default=None)).run_sync(store=store or settings.store or "memory:")
    against = report[baseline] if isinstance(baseline, str) else baseline
    names = [experiment] if experiment is not None else [name for name in report.experiments if name != baseline]
    problems = []
    for name in names:
        result = gate(report[name], wanted, against)
        if session is not None:
            session.record({"line": _line(suite, name, result), "markdown": result.to_markdown().rstrip()})
        if result.status == "fail" or (result.status == "inconclusive" and inconclusive == "fail"):
            problems.append(_problem(suite, report[name], result))
    if problems:
        raise AssertionError("\n".join(problems))
    return report


def eval_test(suite: EvalSuite, **wanted: Any) -> Callable[[], None]:
    """A test function of a suite: `test_support = eval_test(suite, floor=0.8)`. Takes what `assert_eval` takes."""

    def test() -> None:
        __tracebackhide__ = True
        assert_eval(suite, **wanted)

    test.__doc__ = f"Suite {suite.name!r} passes."
    return test


def _rules(floor: float | None, rules: GateRules | Mapping[str, Any] | None) -> GateRules:
    if (floor is None) == (rules is None):
        raise ConfigurationError("assert_eval needs a floor or rules, one of the two: assert_eval(suite, floor=0.8)")
    if floor is not None:
        return GateRules(min_pass_rate=floor)
    return rules if isinstance(rules, GateRules) else GateRules.from_mapping(rules or {})


def _limited(suite: EvalSuite, samples: int | None) -> EvalSuite:
    if samples == suite.config.max_samples:
        return suite
    return EvalSuite(
        suite.name,
        suite.dataset,
        suite.task,
        suite.evaluator,
        experiments=suite.experiments,
        config=replace(suite.config, max_samples=samples),
        adapter=suite.adapter,
        lifespan=suite.lifespan,
        version=suite.version,
    )


def _line(suite: EvalSuite, experiment: str, result: GateResult) -> str:
    return f"{result.status:<13}{suite.name} [{experiment}]  {plain(' '.join(result.reasons))}"


def _problem(suite: EvalSuite, part: ExperimentReport, result: GateResult) -> str:
    told = {"fail": "did not pass", "inconclusive": "is not decided"}[result.status]
    lines = [f"suite {suite.name!r} [{part.name}] {told}", *(f"  {plain(reason)}" for reason in result.reasons)]
    errors = ", ".join(f"{count} {kind}" for kind, count in part.errors.items())
    if errors:
        lines.append(f"  errors: {errors}")
    failed = part.failed_samples()
    for one in islice(failed, _SHOWN):
        reason = f": {one.score.reason}" if one.score is not None and one.score.reason else ""
        lines.append(f"  failed {one.sample_id}: {plain(repr(one.output), limit=200)}{plain(reason, limit=200)}")
    if len(failed) > _SHOWN:
        lines.append(f"  and {len(failed) - _SHOWN} more")
    return "\n".join(lines)
