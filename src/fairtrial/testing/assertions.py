"""Suites as tests: assert that a suite reaches a minimum pass rate or passes a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError, RunMismatchError
from fairtrial.reports import EvalReport, ExperimentReport
from fairtrial.reports.figures.rules import GateRules
from fairtrial.reports.gate.gate import GateResult, gate
from fairtrial.reports.render.safe_text import plain
from fairtrial.store.protocol import RunStore
from fairtrial.suites import EvalSuite
from fairtrial.trials.config import EvalConfig, Experiment

type Inconclusive = Literal["fail", "pass"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings of a test session for all its evals."""

    store: str | None = None
    max_samples: int | None = None


@dataclass(slots=True)
class SharedRuns:
    """The runs of a test session, so that tests of one suite share them."""

    _runs: list[tuple[EvalSuite, int | None, object, EvalReport]] = field(default_factory=list)

    def find(self, suite: EvalSuite, samples: int | None, store: object, names: Sequence[str]) -> EvalReport | None:
        """Return a finished run of the suite with all of these experiments; None if there is none."""
        for known, size, address, report in self._runs:
            if known is suite and (size, address) == (samples, store) and set(names) <= set(report.experiments):
                return report
        return None

    def add(self, suite: EvalSuite, samples: int | None, store: object, report: EvalReport) -> None:
        """Keep a run for other tests, unless it was interrupted."""
        if report.status in ("finished", "stopped"):
            self._runs.append((suite, samples, store, report))


@dataclass(frozen=True, slots=True)
class _Session:
    settings: SessionSettings
    record: Callable[[dict[str, str]], None]
    runs: SharedRuns


_session: ContextVar[_Session | None] = ContextVar("fairtrial_session", default=None)


@contextmanager
def recording(
    settings: SessionSettings, record: Callable[[dict[str, str]], None], runs: SharedRuns | None = None
) -> Iterator[None]:
    """Give the evals of a test their settings, a function that records their outcomes, and the shared runs.

    For plugins of test runners, which run each test inside this block.
    """
    token = _session.set(_Session(settings, record, SharedRuns() if runs is None else runs))
    try:
        yield
    finally:
        _session.reset(token)


def current_session() -> _Session | None:
    """Return the session that runs this test; None outside of pytest."""
    return _session.get()


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
    fresh: bool = False,
) -> EvalReport:
    """Run a suite and assert that it reaches a floor or passes a gate; returns the report.

    Only the requested experiments are run. Within a pytest session, tests of the same suite object share their runs:
    an experiment that one test has run is not run again for another.

        def test_support():
            assert_eval(suite, floor=0.8)                                          # every experiment, by its interval
            assert_eval(suite, rules={"margin": 0.02}, baseline="baseline", experiment="terse")

    Args:
        suite: The suite.
        floor: The lowest acceptable pass rate: the whole interval must lie at or above it.
        rules: Rules of a gate, instead of a floor.
        baseline: The baseline of rules with a margin: a report, or the name of another experiment of this suite.
        experiment: The experiment that must pass; by default every experiment except the baseline must.
        store: The store for the run; by default `pytest --eval-store`, or memory.
        max_samples: Use at most this many samples; `pytest --eval-max-samples` lowers it for all tests.
        inconclusive: Whether the test fails or passes if there are too few samples to decide.
        fresh: Run the suite for this test even if another test has run it.

    Returns:
        The report of the run with `experiment`, or with all experiments if none is named.

    Raises:
        AssertionError: the suite did not pass; the message contains the reasons and samples that failed.
    """
    __tracebackhide__ = True
    wanted = gate_rules(floor, rules)
    session = _session.get()
    settings = session.settings if session is not None else SessionSettings()
    limits = [number for number in (suite.config.max_samples, max_samples, settings.max_samples) if number is not None]
    samples, address = min(limits, default=None), store or settings.store or "memory:"
    shared = SharedRuns() if session is None or fresh else session.runs
    every = tuple(one.name for one in suite.experiments)
    if experiment is None:
        report = _run(suite, samples, address, every, shared)
        parts = {name: report[name] for name in report.experiments}
    else:
        asked = dict.fromkeys((experiment, baseline) if isinstance(baseline, str) else (experiment,))
        parts = _parts(suite, samples, address, tuple(asked), shared)
        report = _run(suite, samples, address, (experiment,), shared)
    against = parts[baseline] if isinstance(baseline, str) else baseline
    names = [experiment] if experiment is not None else [name for name in report.experiments if name != baseline]
    problems = []
    for name in names:
        result = gate(parts[name], wanted, against)
        if session is not None:
            session.record({"line": gate_line(suite.name, name, result), "markdown": result.to_markdown().rstrip()})
        if result.status == "fail" or (result.status == "inconclusive" and inconclusive == "fail"):
            problems.append(_problem(suite, parts[name], result))
    if problems:
        raise AssertionError("\n".join(problems))
    return report


def eval_test(suite: EvalSuite, **wanted: Any) -> Callable[[], None]:
    """Return a test function, as in `test_support = eval_test(suite, floor=0.8)`, with the options of `assert_eval`."""

    if not isinstance(suite, EvalSuite):
        raise TypeError(f"eval_test takes an EvalSuite (got {type(suite).__name__})")

    def test() -> None:
        __tracebackhide__ = True
        assert_eval(suite, **wanted)

    test.__doc__ = f"Suite {suite.name!r} passes."
    return test


def gate_rules(floor: float | None, rules: GateRules | Mapping[str, Any] | None) -> GateRules:
    """Return the rules of a floor, or those given."""
    if (floor is None) == (rules is None):
        raise ConfigurationError("assert_eval needs a floor or rules, one of the two: assert_eval(suite, floor=0.8)")
    if floor is not None:
        return GateRules(min_pass_rate=floor)
    return rules if isinstance(rules, GateRules) else GateRules.from_mapping(rules or {})


def _parts(
    suite: EvalSuite, samples: int | None, store: RunStore | str, names: tuple[str, ...], runs: SharedRuns
) -> dict[str, ExperimentReport]:
    """Return reports of these experiments, from shared runs if there are any; the others are run together."""
    missing = tuple(name for name in names if runs.find(suite, samples, store, (name,)) is None)
    if missing:
        _run(suite, samples, store, missing, runs)
    return {name: _run(suite, samples, store, (name,), runs)[name] for name in names}


def _run(
    suite: EvalSuite, samples: int | None, store: RunStore | str, names: tuple[str, ...], runs: SharedRuns
) -> EvalReport:
    """Return the report of a shared run with these experiments, or of a new one."""
    known = runs.find(suite, samples, store, names)
    if known is not None:
        return known
    part = _part(suite, samples, names)
    try:
        report = part.run_sync(store=store)
    except RunMismatchError:  # The store has an unfinished run of other experiments or older code.
        report = part.run_sync(store=store, resume="never")
    runs.add(suite, samples, store, report)
    return report


def _part(suite: EvalSuite, samples: int | None, names: tuple[str, ...]) -> EvalSuite:
    """Return the suite with at most this many samples and only these experiments."""
    known = {one.name: one for one in suite.experiments}
    if unknown := [name for name in names if known and name not in known]:
        raise ConfigurationError(f"suite {suite.name!r} has no experiment {unknown[0]!r}; it has {', '.join(known)}")
    if samples == suite.config.max_samples and len(names) == len(known):
        return suite
    chosen = [known[name] for name in names if known]
    return changed_suite(suite, suite.dataset, chosen, replace(suite.config, max_samples=samples))


def changed_suite(
    suite: EvalSuite, dataset: Dataset[Any, Any], experiments: Sequence[Experiment], config: EvalConfig
) -> EvalSuite:
    """Return a suite with other samples, experiments and settings."""
    return EvalSuite(
        suite.name,
        dataset,
        suite.task,
        suite.evaluator,
        experiments=experiments,
        config=config,
        adapter=suite.adapter,
        lifespan=suite.lifespan,
        version=suite.version,
    )


def gate_line(suite: str, experiment: str, result: GateResult) -> str:
    """Return the line of the summary about one gate."""
    return f"{result.status:<13}{suite} [{experiment}]  {plain(' '.join(result.reasons))}"


def _problem(suite: EvalSuite, part: ExperimentReport, result: GateResult) -> str:
    verdict = {"fail": "did not pass", "inconclusive": "is not decided"}[result.status]
    lines = [f"suite {suite.name!r} [{part.name}] {verdict}", *(f"  {plain(reason)}" for reason in result.reasons)]
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
