"""Decide whether a run passes, fails, or is inconclusive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fairtrial.base.frozen import first_is
from fairtrial.errors import StoreError
from fairtrial.reports.compare.compare import Comparison
from fairtrial.reports.figures.labels import Labels, label_use
from fairtrial.reports.figures.metrics import PASSED, ExperimentSource
from fairtrial.reports.figures.rules import GateRules
from fairtrial.reports.gate.decision import GateRecord, gate_sources
from fairtrial.reports.plan.plan_check import plan_of
from fairtrial.reports.renderable import RenderableRecord, WithTestCases
from fairtrial.reports.report import EvalReport, ExperimentReport, source_of
from fairtrial.store.notes import GateNote, write_notes


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class GateResult(GateRecord, RenderableRecord, WithTestCases):
    """The decision of a gate, rule by rule; "inconclusive" means that the data are compatible with both.

    `reasons` say why it did not pass, or what it passed on. `needed` is the largest number of samples that an open rule
    about all samples asks for; rules of slices have their own, in samples of the slice. `missing_share` is the largest
    of any rule. `attempt` counts the gates of this code against this baseline. `plan` says whether the rules are as
    planned.
    """

    comparison: Comparison | None = None

    def __repr__(self) -> str:
        return f"<GateResult: {self.status}, {len(self.checks)} check{'' if len(self.checks) == 1 else 's'}>"


def gate(
    candidate: EvalReport | ExperimentReport,
    rules: GateRules | Mapping[str, Any] | None = None,
    baseline: EvalReport | ExperimentReport | None = None,
    *,
    labels: Labels | bool = False,
    label_metric: str = PASSED,
    label_name: str | None = None,
    labels_by_verdict: bool = False,
    labels_drawn: bool = False,
) -> GateResult:
    """Decide from intervals whether a run meets its rules.

    A floor is met if the whole interval is at or above it, and missed if the whole interval is below. A margin is kept
    if the whole interval of candidate - baseline is above -margin, and broken if it is below. Anything else is
    inconclusive. Missing numbers are taken at their worst, and too many of them leave a rule undecided. With several
    rules all must be met, and a rule counts as missed only if it is so allowing for their number: one false alarm
    blocks a release. A gate with a baseline is noted in the baseline's run. Without `rules`, those of the plan are
    applied that was given to the candidate's run (`AnalysisPlan`).

    `labels` of the candidate, and of the baseline if there is one, correct what a judge says, as in `compare`: floors
    and margins are then about what people would say. Labels decide nothing unless their trials were drawn at random:
    by a review, or declared with `labels_by_verdict`, weights or `labels_drawn`.
    """
    example = 'name one, as in gate(report["terse"], rules)'
    source = source_of(candidate, example)
    if rules is None:
        rules = planned_rules(source)
    rules = rules if isinstance(rules, GateRules) else GateRules.from_mapping(rules)
    rules.check_baseline(given=baseline is not None)
    against = None if baseline is None else source_of(baseline, example)
    use = label_use(labels, label_metric, label_name, by_verdict=labels_by_verdict, drawn=labels_drawn)
    record, note = gate_sources(source, rules, against, use)
    if against is not None and note is not None:
        record = _keep_note(record, note, against)
    comparison = None if record.comparison is None else Comparison.of(record.comparison)
    return GateResult.of(record, comparison=comparison)


def planned_rules(source: ExperimentSource) -> GateRules:
    """Return the rules of the plan of a run; without a plan there are none."""
    planned = plan_of(source.run)
    plan = None if planned is None else planned.in_use
    return GateRules() if plan is None else plan.rules


def _keep_note(record: GateRecord, note: GateNote, baseline: ExperimentSource) -> GateRecord:
    """Record the decision in the baseline's run; return the decision, with a warning if that failed."""
    store, run_id = baseline.store, baseline.run.run_id
    try:
        store.update_run(run_id, notes=write_notes(gates=(*store.get_run(run_id).noted.gates, note)))
    except StoreError as error:
        told = f"The gate could not be recorded in run {run_id}: {error}"
        return replace(record, warnings=(told, *record.warnings))
    return record
