"""Whether a run is let through: pass, fail, or not enough evidence to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairtrial.analysis.gate import GateRecord, gate_sources
from fairtrial.analysis.gate_rules import GateRules
from fairtrial.report.compare import Comparison
from fairtrial.report.renderable import RenderableRecord, WithTestCases
from fairtrial.report.report import EvalReport, ExperimentReport, source_of


@dataclass(frozen=True, slots=True, repr=False)
class GateResult(GateRecord, RenderableRecord, WithTestCases):
    """What a gate decided, rule by rule; "inconclusive" means that the data allow both answers.

    `reasons` say why it did not pass, or what it passed on; `needed` is the number of samples that would decide what
    is open, None where nothing is or no number can be named.
    """

    comparison: Comparison | None = None


def gate(
    candidate: EvalReport | ExperimentReport,
    rules: GateRules | Mapping[str, Any],
    baseline: EvalReport | ExperimentReport | None = None,
) -> GateResult:
    """Decide by intervals, not by the bare numbers, whether a run meets its rules.

    A floor is met if the whole interval is at or above it, and missed if the whole interval is below. A margin is kept
    if the lower bound of candidate - baseline is above -margin, and broken if the upper bound is below 0. Anything else
    is inconclusive, and so is the gate if too many trials are missing. With several rules all must be met, and a rule
    counts as missed only if it is so allowing for their number: one false alarm blocks a release.
    """
    rules = rules if isinstance(rules, GateRules) else GateRules.from_mapping(rules)
    rules.check_baseline(given=baseline is not None)
    example = 'name one, as in gate(report["terse"], rules)'
    against = None if baseline is None else source_of(baseline, example)
    record = gate_sources(source_of(candidate, example), rules, against)
    comparison = None if record.comparison is None else Comparison.of(record.comparison)
    return GateResult.of(record, comparison=comparison)
