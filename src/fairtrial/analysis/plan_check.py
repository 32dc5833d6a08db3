"""Check analyses against the plan that was stored with a run before its first result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fairtrial.analysis.analysis_plan import AnalysisPlan, PlanCheck, date_text
from fairtrial.analysis.comparison import ComparisonRecord, MetricComparison
from fairtrial.analysis.gate_rules import GateRules
from fairtrial.analysis.metrics import is_ratio, is_verdict
from fairtrial.analysis.source import ExperimentSource
from fairtrial.errors import ConfigurationError
from fairtrial.formatting import bound_text, count, margin_text, rate, size_text
from fairtrial.store.notes import PlanNote
from fairtrial.store.protocol import RESUMABLE, RunRecord

_DECLARED = ("lower_is_better", "higher_is_better", "bounds")  # What is declared of metrics.


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan in force in a run, and its note."""

    run: RunRecord
    note: PlanNote
    plan: AnalysisPlan
    readable: bool = True  # False if a later version has stored it, or if it is damaged.

    @property
    def in_use(self) -> AnalysisPlan | None:
        """The plan, if this version can read it."""
        return self.plan if self.readable else None

    def check(self, deviations: Iterator[str]) -> PlanCheck:
        """Return the check of an analysis, with its deviations."""
        found = tuple(dict.fromkeys(deviations)) if self.readable else ("this version cannot read the plan",)
        return PlanCheck(self.note.digest, self.note.given_at, self.plan.primary, found, self.note.content)


def plan_of(run: RunRecord) -> RunPlan | None:
    """Return the plan in force: the last one before the first result, else the first one after it."""
    notes = run.noted.plans
    if not notes:
        return None
    note = next((note for note in reversed(notes) if not note.results), notes[0])
    try:
        return RunPlan(run, note, AnalysisPlan.from_mapping(note.content))
    except ConfigurationError:
        return RunPlan(run, note, AnalysisPlan(), readable=False)


def plan_of_sides(sources: Sequence[ExperimentSource]) -> RunPlan | None:
    """Return the plan of a comparison: that of the first candidate that has one, else the baseline's."""
    return next((plan for source in (*sources[1:], *sources[:1]) if (plan := plan_of(source.run))), None)


def check_run(run: RunRecord) -> PlanCheck | None:
    """Check a run against its plan; None without one."""
    planned = plan_of(run)
    return None if planned is None else planned.check(_of_run(run, planned, sized=True))


def check_comparison(
    planned: RunPlan | None, comparison: ComparisonRecord, slices: Sequence[str], chosen: Mapping[str, object]
) -> PlanCheck | None:
    """Check a comparison; `chosen` are settings that were asked for, by name, None where they were not."""
    return None if planned is None else planned.check(_of_comparison(planned, comparison, slices, chosen))


def check_gate(planned: RunPlan | None, rules: GateRules, sources: Sequence[ExperimentSource]) -> PlanCheck | None:
    """Check the rules of a gate, and the runs that it is about."""
    return None if planned is None else planned.check(_of_gate(planned, rules, sources))


def _of_run(run: RunRecord, planned: RunPlan, *, sized: bool) -> Iterator[str]:
    plan, note = planned.plan, planned.note
    if note.results:
        yield f"the plan was given to {run.name} after {count(note.results, 'result')}"
    for other in run.noted.plans:
        if other.results and other.digest != note.digest:
            yield (
                f"another plan ({other.digest[:8]}) was given to {run.name} on {date_text(other.given_at)}, after "
                f"{count(other.results, 'result')}; it is not used"
            )
    if note.earlier:
        yield f"{', '.join(note.earlier)} ran the same code on the same samples before {run.name} had a plan"
    if run.parent_run is not None:
        yield f"{run.name} scores the outputs of run {run.parent_run} again"
    if run.noted.is_adaptive:
        yield f"{run.name} used its own results to decide when to stop"
    elif run.status == "stopped" or run.status in RESUMABLE:
        yield f"{run.name} ended early ({run.status})"
    if sized and plan.samples is not None and run.dataset_size < plan.samples:
        yield f"{run.name} has {count(run.dataset_size, 'sample')}, planned were {plan.samples:,}"
    if run.repeats != plan.repeats:
        yield f"{run.name} has {count(run.repeats, 'repeat')}, planned was {plan.repeats:,}"


def _of_runs(planned: RunPlan, sources: Sequence[ExperimentSource]) -> Iterator[str]:
    """Yield what in the runs of several sides is not as planned."""
    for run in {source.run.run_id: source.run for source in sources}.values():
        own = plan_of(run)
        if own is None:
            yield f"{run.name} was run without this plan"
        elif own.note.digest != planned.note.digest:
            yield f"{run.name} has another plan ({own.note.digest[:8]})"
        else:
            yield from _of_run(run, own, sized=False)


def _of_comparison(
    planned: RunPlan, comparison: ComparisonRecord, slices: Sequence[str], chosen: Mapping[str, object]
) -> Iterator[str]:
    plan, candidates = planned.plan, comparison.candidates
    metrics = dict.fromkeys(metric.metric for one in candidates for metric in one.metrics)
    if plan.primary not in metrics:
        yield f"the primary metric {plan.primary} is not compared"
    yield from (f"{name} was planned and is not compared" for name in plan.secondary if name not in metrics)
    yield from (f"{name} was not planned" for name in metrics if name not in plan.metrics)
    yield from (f"slices by {name} were not planned" for name in slices if name not in plan.slices)
    yield from (f"slices by {name} were planned and are left out" for name in plan.slices if name not in slices)
    yield from _of_settings(plan, comparison.alpha, chosen)
    for metric in {metric.metric: metric for one in candidates for metric in one.metrics}.values():
        yield from _of_metric(plan, metric)
    if len(candidates) > plan.tests:
        yield f"{len(candidates)} candidates are compared, planned was {plan.tests}"
    fewest = min((one.matched for one in candidates), default=0)
    if plan.samples is not None and fewest < plan.samples:
        yield f"{count(fewest, 'sample is', 'samples are')} compared, planned were {plan.samples:,}"
    most = max((one.missing_share for one in candidates), default=0.0)
    allowed = plan.max_missing_share if plan.max_missing is None else plan.max_missing
    if most > allowed:
        yield f"{rate(most)} of the trials or pairs are missing, allowed were {rate(allowed)}"
    yield from _of_runs(planned, comparison.sources)


def _of_metric(plan: AnalysisPlan, metric: MetricComparison) -> Iterator[str]:
    name, percent = metric.metric, is_verdict(metric.metric)
    used, wanted = metric.smallest_difference, plan.smallest_difference(metric.metric)
    if name in plan.metrics and used is not None and used != wanted:
        texts = [size_text(value, percent=percent, relative=is_ratio(name)) for value in (used, wanted)]
        yield f"the smallest difference in {name} that matters is {texts[0]}, planned was {texts[1]}"
    if metric.labels is not None:
        yield f"labels correct {name}, which was not planned"


def _of_settings(plan: AnalysisPlan, alpha: float, chosen: Mapping[str, object]) -> Iterator[str]:
    cluster = chosen["cluster"]
    if alpha != plan.alpha:
        yield f"alpha is {alpha:g}, planned was {plan.alpha:g}"
    for name in _DECLARED:
        if chosen[name] and chosen[name] != getattr(plan, name):
            yield f"{name} is not that of the plan"
    if chosen.get("test") == "exact":
        yield "McNemar's exact test was asked for"
    if cluster is not None and cluster != plan.cluster:
        how = f"samples are clustered by {cluster}" if cluster else "clusters are not allowed for"
        yield (
            f"{how}, which was not planned" if plan.cluster is None else f"{how}, planned was {plan.cluster or 'none'}"
        )


def _of_gate(planned: RunPlan, rules: GateRules, sources: Sequence[ExperimentSource]) -> Iterator[str]:
    plan, wanted = planned.plan, planned.plan.rules
    kinds = (
        ("margin", rules.all_margins, wanted.all_margins),
        ("floor", rules.all_floors, wanted.all_floors),
        ("ceiling", rules.ceilings, wanted.ceilings),
    )
    for kind, used, bounds in kinds:
        for metric in dict.fromkeys((*used, *bounds)):
            yield from _of_rule(kind, metric, used.get(metric), bounds.get(metric))
    yield from (f"rules for slices by {rule.by} were not planned" for rule in rules.slices)
    chosen = {name: getattr(rules, name) for name in (*_DECLARED, "cluster")}
    yield from _of_settings(plan, rules.alpha, chosen)
    if (used_rule := _missing_rule(rules)) != (wanted_rule := _missing_rule(wanted)):
        yield f"{used_rule[0]}, planned was: {wanted_rule[1]}"
    fewest = min(source.run.dataset_size for source in sources)
    if plan.samples is not None and fewest < plan.samples:
        yield f"the run has {count(fewest, 'sample')}, planned were {plan.samples:,}"
    yield from _of_runs(planned, sources)


def _of_rule(kind: str, metric: str, used: float | None, wanted: float | None) -> Iterator[str]:
    percent = is_verdict(metric)

    def text(value: float) -> str:
        if kind == "margin":
            return margin_text(value, percent=percent, relative=is_ratio(metric))
        return bound_text(value, percent=percent)

    if used is None:
        yield f"the planned {kind} of {metric} is not checked"
    elif wanted is None:
        yield f"a {kind} of {metric} was not planned"
    elif used != wanted:
        yield f"the {kind} of {metric} is {text(used)}, planned was {text(wanted)}"


def _missing_rule(rules: GateRules) -> tuple[str, str]:
    """Return the rule for missing outcomes as a clause, and the same in short."""
    if rules.max_missing is not None:
        share = rate(rules.max_missing)
        return f"up to {share} missing outcomes are left out", f"up to {share} are left out"
    share = rate(rules.max_missing_share)
    return f"up to {share} missing outcomes are taken at their worst", f"up to {share} are taken at their worst"
