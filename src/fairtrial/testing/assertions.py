"""Evals as tests: a suite that must reach a floor, or be no worse than a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from fairtrial.analysis.gate_rules import GateRules
from fairtrial.errors import ConfigurationError, RunMismatchError
from fairtrial.render.safe_text import plain
from fairtrial.report import EvalReport, ExperimentReport
from fairtrial.report.gate import GateResult, gate
from fairtrial.store.protocol import RunStore
from fairtrial.suites import EvalSuite

type Inconclusive = Literal["fail", "pass"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """What a test session asks of all its evals."""

    store: str | None = None
    max_samples: int | None = None


@dataclass(slots=True)
class SharedRuns:
    """The runs of a test session, so that tests of one suite share them."""

    _runs: list[tuple[EvalSuite, int | None, object, EvalReport]] = field(default_factory=list)

    def find(self, suite: EvalSuite, samples: int | None, store: object, names: Sequence[str]) -> EvalReport | None:
        """A finished run of that suite with all of these experiments."""
        for known, size, place, report in self._runs:
            if known is suite and (size, place) == (samples, store) and set(names) <= set(report.experiments):
                return report
        return None

    def add(self, suite: EvalSuite, samples: int | None, store: object, report: EvalReport) -> None:
        """Keep a run that has ended by itself; one that was broken off is not what another test asks for."""
        if report.status in ("finished", "stopped"):
            self._runs.append((suite, samples, store, report))


@dataclass(frozen=True, slots=True)
class _Session:
    settings: Settings
    record: Callable[[dict[str, str]], None]
    runs: SharedRuns


_session: ContextVar[_Session | None] = ContextVar("fairtrial_session", default=None)


@contextmanager
def recording(
    settings: Settings, record: Callable[[dict[str, str]], None], runs: SharedRuns | None = None
) -> Iterator[None]:
    """What a test runner's plugin wraps a test in: settings for its evals, where they leave their outcome, and the
    runs that its tests share.
    """
    token = _session.set(_Session(settings, record, SharedRuns() if runs is None else runs))
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
    fresh: bool = False,
) -> EvalReport:
    """Run a suite and hold it against a floor or a gate; the report if it passes.

    Only the experiments that are asked for are run. Within a pytest session, tests of one suite object share their
    runs: what one test has executed is not executed again for another.

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
        fresh: Run the suite for this test, whatever other tests have run.

    Returns:
        The report of the run that has `experiment`, or all experiments if none is named.

    Raises:
        AssertionError: it did not pass; the message says by how much, and shows samples that failed.
    """
    __tracebackhide__ = True
    wanted = _rules(floor, rules)
    session = _session.get()
    settings = session.settings if session is not None else Settings()
    limits = [number for number in (suite.config.max_samples, max_samples, settings.max_samples) if number is not None]
    samples, place = min(limits, default=None), store or settings.store or "memory:"
    shared = SharedRuns() if session is None or fresh else session.runs
    every = tuple(one.name for one in suite.experiments)
    if experiment is None:
        report = _run(suite, samples, place, every, shared)
        parts = {name: report[name] for name in report.experiments}
    else:
        asked = dict.fromkeys((experiment, baseline) if isinstance(baseline, str) else (experiment,))
        parts = _parts(suite, samples, place, tuple(asked), shared)
        report = _run(suite, samples, place, (experiment,), shared)
    against = parts[baseline] if isinstance(baseline, str) else baseline
    names = [experiment] if experiment is not None else [name for name in report.experiments if name != baseline]
    problems = []
    for name in names:
        result = gate(parts[name], wanted, against)
        if session is not None:
            session.record({"line": _line(suite, name, result), "markdown": result.to_markdown().rstrip()})
        if result.status == "fail" or (result.status == "inconclusive" and inconclusive == "fail"):
            problems.append(_problem(suite, parts[name], result))
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


def _parts(
    suite: EvalSuite, samples: int | None, store: RunStore | str, names: tuple[str, ...], runs: SharedRuns
) -> dict[str, ExperimentReport]:
    """The reports of some experiments, each from whichever run has it; those that no run has are run together."""
    missing = tuple(name for name in names if runs.find(suite, samples, store, (name,)) is None)
    if missing:
        _run(suite, samples, store, missing, runs)
    return {name: _run(suite, samples, store, (name,), runs)[name] for name in names}


def _run(
    suite: EvalSuite, samples: int | None, store: RunStore | str, names: tuple[str, ...], runs: SharedRuns
) -> EvalReport:
    """The report of a run with these experiments: one that there is already, or a new one."""
    known = runs.find(suite, samples, store, names)
    if known is not None:
        return known
    part = _part(suite, samples, names)
    try:
        report = part.run_sync(store=store)
    except RunMismatchError:  # An unfinished run in a lasting store, of other experiments or of older code.
        report = part.run_sync(store=store, fresh=True)
    runs.add(suite, samples, store, report)
    return report


def _part(suite: EvalSuite, samples: int | None, names: tuple[str, ...]) -> EvalSuite:
    """A suite with at most so many samples and these experiments only."""
    known = {one.name: one for one in suite.experiments}
    if unknown := [name for name in names if known and name not in known]:
        raise ConfigurationError(f"suite {suite.name!r} has no experiment {unknown[0]!r}; it has {', '.join(known)}")
    if samples == suite.config.max_samples and len(names) == len(known):
        return suite
    return EvalSuite(
        suite.name,
        suite.dataset,
        suite.task,
        suite.evaluator,
        experiments=[known[name] for name in names if known],
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
