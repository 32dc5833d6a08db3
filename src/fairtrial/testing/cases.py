"""A test for every sample of a suite, and a gate over all of them at the end of the session."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fairtrial.base.codec import decode, dumps
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.reports import EvalReport
from fairtrial.reports.figures.rules import GateRules
from fairtrial.reports.gate.gate import gate
from fairtrial.reports.render.safe_text import plain
from fairtrial.scoring.score import Score
from fairtrial.suites import EvalSuite
from fairtrial.testing.assertions import Inconclusive, changed_suite, current_session, gate_line, gate_rules
from fairtrial.trials.config import Experiment
from fairtrial.trials.result import EvalResult


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """What a test of one sample leaves for the gate: text, so that workers of pytest-xdist can send it."""

    suite: str
    experiment: str
    sample_id: str
    planned: int
    floor: str
    inconclusive: str
    scores: tuple[tuple[Score | None, str | None], ...]


@dataclass(frozen=True, slots=True)
class CasesDecision:
    """The gate over the tests of one experiment. `status` is None if some samples had no test in this session."""

    line: str
    markdown: str
    status: str | None
    accepted: bool


def eval_cases(
    suite: EvalSuite,
    *,
    floor: float | None = None,
    rules: GateRules | Mapping[str, Any] | None = None,
    experiment: str | None = None,
    inconclusive: Inconclusive = "fail",
) -> Callable[..., None]:
    """Return a test with one item per sample, as in `test_support = eval_cases(suite, floor=0.8)`.

    `pytest -k q20` runs one sample, and `--lf` those that failed. An item fails if its sample does not pass. If all
    samples had their test, the gate decides at the end of the session: it may accept that some failed, and then the
    session passes. Otherwise, as with `-k` or `-x`, the items alone decide.

    Args:
        suite: The suite.
        floor: The lowest acceptable pass rate: the whole interval must lie at or above it.
        rules: Rules of a gate without a baseline, instead of a floor.
        experiment: The experiment; by default every experiment of the suite.
        inconclusive: Whether the session fails or passes if there are too few samples to decide.
    """
    import pytest

    wanted = gate_rules(floor, rules)
    if wanted.compares:
        raise ConfigurationError("eval_cases compares with no baseline: use assert_eval for rules with a margin")
    known = [each.name for each in suite.experiments] or [Experiment().name]
    if experiment is not None and experiment not in known:
        raise ConfigurationError(f"suite {suite.name!r} has no experiment {experiment!r}; it has {', '.join(known)}")
    names = known if experiment is None else [experiment]
    samples = {sample.id: sample for sample in itertools.islice(suite.dataset, suite.config.max_samples)}
    several = len(names) > 1
    cases = [
        pytest.param(name, sample_id, id=f"{name}-{sample_id}" if several else sample_id)
        for name in names
        for sample_id in samples
    ]
    rules_text = dumps(wanted)

    @pytest.mark.parametrize(("experiment_name", "sample_id"), cases)
    def test(experiment_name: str, sample_id: str) -> None:
        results = _run_sample(suite, experiment_name, samples[sample_id])
        scores = tuple((result.score, result.error) for result in results)
        record = CaseRecord(suite.name, experiment_name, sample_id, len(samples), rules_text, inconclusive, scores)
        session = current_session()
        if session is not None:
            session.record({"case": dumps(record)})
        problems = [problem for result in results if (problem := _problem(result))]
        if problems:
            pytest.fail("\n".join(problems), pytrace=False)  # The traceback would be of our code.

    test.__doc__ = f"Every sample of suite {suite.name!r} passes."
    return test


def _run_sample(suite: EvalSuite, experiment: str, sample: Sample[Any, Any]) -> list[EvalResult]:
    dataset: Dataset[Any, Any] = Dataset([sample], name=suite.dataset.name, version=suite.dataset.version)
    chosen = [each for each in suite.experiments if each.name == experiment]
    return list(changed_suite(suite, dataset, chosen, suite.config).run_sync(store="memory:").results)


def _problem(result: EvalResult) -> str:
    if result.score is None:
        return f"{result.sample_id} ended in an error: {plain(str(result.error), limit=500)}"
    if result.score.passed:
        return ""
    reason = f": {result.score.explain()}" if result.score.explain() else ""
    return f"{result.sample_id} failed with {plain(repr(result.output), limit=300)}{plain(reason, limit=500)}"


def decide_cases(texts: Iterable[str]) -> list[CasesDecision]:
    """Gate the samples of every experiment. Of a sample that was tested again, the first result counts.

    A rerun until it passes would turn every flaky sample into a good one.
    """
    groups: dict[tuple[str, str], dict[str, CaseRecord]] = {}
    for text in texts:
        record = decode(CaseRecord, text)
        groups.setdefault((record.suite, record.experiment), {}).setdefault(record.sample_id, record)
    return [_decision(suite, experiment, list(found.values())) for (suite, experiment), found in groups.items()]


def _decision(suite: str, experiment: str, records: list[CaseRecord]) -> CasesDecision:
    first = records[0]
    if len(records) < first.planned:
        line = f"{'not decided':<13}{suite} [{experiment}]  {len(records)} of {first.planned} samples had a test."
        return CasesDecision(line, line, None, False)
    results = [
        EvalResult(sample_id=record.sample_id, score=score, error=error)
        for record in records
        for score, error in record.scores
    ]
    decided = gate(EvalReport(results=results), decode(GateRules, first.floor))
    accepted = decided.status == "pass" or (decided.status == "inconclusive" and first.inconclusive == "pass")
    line = gate_line(suite, experiment, decided)
    return CasesDecision(line, decided.to_markdown().rstrip(), decided.status, accepted)
