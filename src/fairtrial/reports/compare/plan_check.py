"""Check comparisons and gates against the plan that was stored with a run before its first result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fairtrial.base.formatting import bound_text, count, margin_text, rate, size_text
from fairtrial.data.splits import TEST
from fairtrial.reports.compare.comparison import Comparison, MetricComparison
from fairtrial.reports.figures.analysis_plan import AnalysisPlan, PlanCheck, RunPlan, plan_of, run_deviations
from fairtrial.reports.figures.metrics import ExperimentSource, is_ratio, is_verdict
from fairtrial.reports.figures.rules import GateRules

_DECLARED = ("lower_is_better", "higher_is_better", "bounds")  # What is declared of metrics.


def check_comparison(
    planned: RunPlan | None, comparison: Comparison, slices: Sequence[str], chosen: Mapping[str, object]
) -> PlanCheck | None:
    """Check a comparison; `chosen` are settings that were asked for, by name, None where they were not."""
    return None if planned is None else planned.check(_of_comparison(planned, comparison, slices, chosen))


def check_gate(planned: RunPlan | None, rules: GateRules, sources: Sequence[ExperimentSource]) -> PlanCheck | None:
    """Check the rules of a gate, and the runs that it is about."""
    return None if planned is None else planned.check(_of_gate(planned, rules, sources))


def _of_runs(planned: RunPlan, sources: Sequence[ExperimentSource]) -> Iterator[str]:
    """Yield what in the runs of several sides is not as planned."""
    splits = [source.run.noted.split for source in sources]
    if planned.plan.looks and len(sources) > 1 and any(one is None or one.name != TEST for one in splits):
        yield "the runs are not on a test split, so that looks at it are not allowed for"
    for run in {source.run.run_id: source.run for source in sources}.values():
        own = plan_of(run)
        if own is None:
            yield f"{run.name} was run without this plan"
        elif own.note.digest != planned.note.digest:
            yield f"{run.name} has another plan ({own.note.digest[:8]})"
        else:
            yield from run_deviations(run, own, sized=False)


def _of_comparison(
    planned: RunPlan, comparison: Comparison, slices: Sequence[str], chosen: Mapping[str, object]
) -> Iterator[str]:
    plan, candidates = planned.plan, comparison.candidates
    metrics = dict.fromkeys(metric.metric for one in candidates for metric in one.metrics)
    if plan.primary not in metrics:
        yield f"the primary metric {plan.primary} is not compared"
    yield from (f"{name} was planned and is not compared" for name in plan.secondary if name not in metrics)
    yield from (f"{name} was not planned" for name in metrics if name not in plan.metrics)
    yield from (f"slices by {name} were not planned" for name in slices if name not in plan.slices)
    yield from (f"slices by {name} were planned and are left out" for name in plan.slices if name not in slices)
    yield from _of_settings(plan, comparison.alpha if comparison.looks is None else comparison.looks.alpha, chosen)
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
