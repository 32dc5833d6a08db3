"""Decide whether a run passes, fails, or is inconclusive, and count the attempts before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fairtrial.base.formatting import margin_text
from fairtrial.base.frozen import EMPTY, JSON, first_is
from fairtrial.errors import ConfigurationError, StoreError
from fairtrial.reports.compare.caveats import about_runs
from fairtrial.reports.compare.compare import compare_columns, side_names, with_fresh_samples
from fairtrial.reports.compare.comparison import Comparison
from fairtrial.reports.compare.looks import TestLooks, look_at, spent_alpha
from fairtrial.reports.compare.pairing import ComparisonSettings, Pairs, pair
from fairtrial.reports.compare.plan_check import check_gate
from fairtrial.reports.figures.analysis_plan import PlanCheck, plan_of, plan_of_sides
from fairtrial.reports.figures.broken_users import check_same_users
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns, hashable, refuse_weighted
from fairtrial.reports.figures.labels import Labels, LabelUse, attach_labels, label_use
from fairtrial.reports.figures.metrics import (
    BUILT_IN,
    FAILED,
    MISSING,
    PASSED,
    SCORED,
    ExperimentSource,
    is_ratio,
    is_verdict,
    measured_metric,
    unknown_metric,
    verdict_column,
)
from fairtrial.reports.figures.rules import GateRules, SliceRule
from fairtrial.reports.figures.slicing import Slice, cut
from fairtrial.reports.gate.checks import Check, Floor, GateCheck, Margin, MissingRule, evaluate_checks
from fairtrial.reports.render.renderable import WithTestCases
from fairtrial.reports.report import EvalReport, ExperimentReport, source_of
from fairtrial.store.notes import GateNote, write_notes

if TYPE_CHECKING:
    from fairtrial.reports.render.document import Document

MANY_GATES = 20
"""From this many gates on, one baseline's luck has been shared by all of them."""

_RUNS_READ = 200  # Number of newest runs that are searched for earlier gates.


@dataclass(frozen=True, slots=True)
class GateAttempt:
    """The attempt number of a gate (from 1), the note to store if it is new, and warnings."""

    number: int = 1
    note: GateNote | None = None
    warnings: tuple[str, ...] = ()


def count_attempts(
    candidate: ExperimentSource,
    baseline: ExperimentSource,
    trials: int,
    margins: Mapping[str, float],
    *,
    spends: bool,
) -> GateAttempt:
    """Count the gates of the same code from the notes in the runs of the baseline's suite.

    An attempt is a gate of the same code, experiment and data, against this baseline or a newer run of it.
    Looking at the same results again is none: they are the same if the run is and the number of its trials. Another
    margin is named.
    """
    store, run = baseline.store, baseline.store.get_run(baseline.run.run_id)
    own = run.noted.gates
    entry = GateNote(
        baseline.name,
        candidate.run.run_id,
        candidate.name,
        candidate.run.code_hash,
        candidate.run.dataset_fingerprint,
        trials,
        dict(margins),
    )
    new, plain = entry not in own, _without_margins(entry)
    runs = store.runs(suite=run.suite, limit=_RUNS_READ)
    others = [one for other in runs for one in dict.fromkeys(map(_without_margins, other.noted.gates))]
    attempt = 1 + sum(_is_attempt(one, plain) for one in others if one != plain)
    warnings = _about_margins([one for other in runs for one in other.noted.gates if _is_attempt(one, entry)], margins)
    if attempt > 1 and not spends:
        warnings.append(
            f"This is attempt {attempt} to pass this gate with the same code. Each further attempt makes it more "
            "likely that a bad run passes by chance: set spend_alpha to allow for it."
        )
    used = sum(one.baseline == baseline.name for one in dict.fromkeys([*map(_without_margins, own), plain]))
    if used >= MANY_GATES:
        warnings.append(
            f"This baseline has been used in {used:,} gates. If it was lucky or unlucky by chance, all of them are "
            "affected: run a new baseline."
        )
    return GateAttempt(attempt, entry if new else None, tuple(warnings))


def _is_attempt(one: GateNote, entry: GateNote) -> bool:
    """True if an earlier gate was about the same code; without a hash, only the same run counts."""
    if (one.baseline, one.experiment) != (entry.baseline, entry.experiment):
        return False
    return (one.code, one.data) == (entry.code, entry.data) if entry.code else one.run == entry.run


def _without_margins(note: GateNote) -> GateNote:
    return replace(note, margins=None)


def _about_margins(earlier: Sequence[GateNote], margins: Mapping[str, float]) -> list[str]:
    """Return a line for each metric whose margin was another one in an earlier gate of the same code."""
    lines = []
    for metric in dict.fromkeys(name for one in (*(note.margins or {} for note in earlier), margins) for name in one):
        before = dict.fromkeys(note.margins.get(metric) for note in earlier if note.margins is not None)
        texts = [_margin(metric, value) for value in before if value != margins.get(metric)]
        if texts:
            now = _margin(metric, margins.get(metric))
            lines.append(f"An earlier gate of this code had another margin: {', '.join(texts)} in {metric}; now {now}.")
    return lines


def _margin(metric: str, value: float | None) -> str:
    return "none" if value is None else margin_text(value, percent=is_verdict(metric), relative=is_ratio(metric))


type GateStatus = Literal["pass", "fail", "inconclusive"]

_EXIT_CODES: Mapping[GateStatus, int] = {"pass": 0, "fail": 1, "inconclusive": 3}


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class GateResult(WithTestCases):
    """The decision of a gate, rule by rule; "inconclusive" means that the data are compatible with both.

    `reasons` say why it did not pass, or what it passed on. `needed` is the largest number of samples that an open rule
    about all samples asks for; rules of slices have their own, in samples of the slice (`GateCheck.needed`).
    `missing_share` is the largest of any rule. `attempt` counts the gates of this code against this baseline. `plan`
    says whether the rules are as planned before the first result; None without a plan. `looks` are those at the test
    split that the gate is on, if any.
    """

    json_format: ClassVar[str] = "fairtrial.gate/1"

    status: GateStatus
    checks: tuple[GateCheck, ...]
    reasons: tuple[str, ...]
    needed: int | None
    missing_share: float
    candidate: str
    baseline: str | None
    warnings: tuple[str, ...]
    comparison: Comparison | None = None
    attempt: int = 1
    plan: PlanCheck | None = None
    looks: TestLooks | None = None

    @property
    def passed(self) -> bool:
        """True if the run passes."""
        return self.status == "pass"

    @property
    def exit_code(self) -> int:
        """0 for pass, 1 for fail, 3 for inconclusive."""
        return _EXIT_CODES[self.status]

    def document(self, cases: int) -> Document:
        """Return what is shown, with at most `cases` flipped samples in each direction."""
        from fairtrial.reports.gate.document import gate_document

        return gate_document(self, cases)

    def to_json(self) -> dict[str, JSON]:
        """Return all figures as JSON values; docs/reference/json.md describes them."""
        figures = WithTestCases.to_json(self)
        comparison = figures.pop("comparison")
        return {**figures, "exit_code": self.exit_code, "comparison": comparison}

    def write_junit(self, file: IO[str]) -> None:
        """Write a test case for each rule: a failed rule is a failure, an inconclusive one an error."""
        from fairtrial.reports.gate.document import write_rules

        write_rules(self, file)

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
    result, note = gate_sources(source, rules, against, use)
    return result if against is None or note is None else _keep_note(result, note, against)


def planned_rules(source: ExperimentSource) -> GateRules:
    """Return the rules of the plan of a run; without a plan there are none."""
    planned = plan_of(source.run)
    plan = None if planned is None else planned.in_use
    return GateRules() if plan is None else plan.rules


def _keep_note(result: GateResult, note: GateNote, baseline: ExperimentSource) -> GateResult:
    """Record the decision in the baseline's run; return the decision, with a warning if that failed."""
    store, run_id = baseline.store, baseline.run.run_id
    try:
        store.update_run(run_id, notes=write_notes(gates=(*store.get_run(run_id).noted.gates, note)))
    except StoreError as error:
        warning = f"The gate could not be recorded in run {run_id}: {error}"
        return replace(result, warnings=(warning, *result.warnings))
    return result


def gate_sources(
    candidate: ExperimentSource,
    rules: GateRules,
    baseline: ExperimentSource | None = None,
    labels: LabelUse | None = None,
) -> tuple[GateResult, GateNote | None]:
    """Decide from intervals whether an experiment meets the rules; rules with a margin need a baseline.

    Returns the decision, and the note of it for the baseline's run, if it has none yet: the caller stores it there,
    so that the next gate can tell how often it has been tried.
    """
    rules.check_baseline(given=baseline is not None)
    sources = [candidate] if baseline is None else [candidate, baseline]
    if not rules.other_users:
        check_same_users(sources)
    run_plan = plan_of_sides(sources[::-1])
    plan = None if run_plan is None else run_plan.in_use
    check = check_gate(run_plan, rules, sources)
    metrics = {*rules.metrics, *(() if labels is None else (labels.metric,)), PASSED}
    keys = tuple(dict.fromkeys(rule.by for rule in rules.slices))
    columns = [
        read_columns(source, metrics=metrics, cluster=rules.cluster, keys=keys, name=name).analysed_prefix()
        for source, name in zip(sources, side_names(sources), strict=True)
    ]
    _check_metrics(rules, sources, columns)
    columns = attach_labels(sources, columns, labels)
    attempt, looks = GateAttempt(), None
    if baseline is not None:
        looks = look_at([baseline, candidate], rules.alpha, spends=plan is not None and plan.looks)
        trials = columns[0].count(SCORED, FAILED)
        attempt = count_attempts(candidate, baseline, trials, rules.all_margins, spends=rules.spend_alpha)
        if rules.spend_alpha:
            rules = replace(rules, alpha=spent_alpha(rules.alpha, attempt.number))
        if looks is not None:  # Each attempt on a test split is a look, so that one of the two allows for both.
            rules = replace(rules, alpha=min(rules.alpha, looks.spent))
    against = columns[1] if baseline is not None else None
    settings = ComparisonSettings(primary=None if check is None else check.primary)
    result = gate_columns(columns[0], rules, against, settings=settings, sources=sources)
    if looks is not None and result.comparison is not None:
        looks = with_fresh_samples(looks, result.comparison, _settings(rules, settings), columns[::-1])
    about_looks = () if looks is None else looks.sentences
    warnings = (*about_looks, *about_runs(sources), *attempt.warnings, *result.warnings)
    return replace(result, warnings=warnings, attempt=attempt.number, plan=check, looks=looks), attempt.note


def _check_metrics(rules: GateRules, sources: Sequence[ExperimentSource], columns: Sequence[Columns]) -> None:
    """Raise if a rule is about a metric that no trial has; without scored trials, no metric is known yet."""
    absent = [name for name in rules.metrics if name not in BUILT_IN and not any(name in one.values for one in columns)]
    if not absent or not any(one.count(SCORED) for one in columns):
        return
    known: dict[str, None] = {}
    for source in sources:
        for name, totals in source.store.metric_totals(source.run.run_id).get(source.name, {}).items():
            known[name] = None
            if totals.judged:
                known[verdict_column(name)] = None
    raise unknown_metric(absent[0], known)


def gate_columns(
    candidate: Columns,
    rules: GateRules,
    baseline: Columns | None = None,
    *,
    settings: ComparisonSettings | None = None,
    sources: Sequence[ExperimentSource] = (),
) -> GateResult:
    """Evaluate rules on columns: a pure function, except that `sources` locate the results."""
    refuse_weighted((candidate,), "a gate")
    settings = _settings(rules, settings or ComparisonSettings()).declared_by(
        candidate, *([] if baseline is None else [baseline])
    )
    margins = [*rules.all_margins, *(name for rule in rules.slices for name in rule.all_margins)]
    for metric in margins:
        if settings.lower(metric) is None:
            raise ConfigurationError(
                f"a margin on {metric!r} needs to know which way is better: name it in lower_is_better or "
                "higher_is_better, or declare it in the evaluator with Metric(..., higher_is_better=...)"
            )
    candidate = settings.declare(candidate)
    baseline = None if baseline is None else settings.declare(baseline)
    pairs = None if baseline is None else pair(candidate, baseline)
    checks = evaluate_checks(list(_checks(candidate, pairs, rules)), settings)
    comparison = None
    if baseline is not None and pairs is not None:
        comparison = compare_columns(
            baseline,
            [candidate],
            metrics=tuple(rules.all_margins) or (PASSED,),
            settings=settings,
            sources=tuple(reversed(sources)),
        )
    status = _overall(checks)
    needed = [check.needed for check in checks if check.slice is None and check.needed is not None]
    return GateResult(
        status=status,
        checks=checks,
        reasons=tuple(check.reason for check in checks if check.status in (status, "fail")),
        needed=max(needed, default=None),
        missing_share=max((check.missing_share for check in checks), default=0.0),
        candidate=candidate.name,
        baseline=None if baseline is None else baseline.name,
        warnings=(
            *_about_unscored(candidate, checks),
            *(_remarks(candidate) if comparison is None else comparison.candidates[0].warnings),
        ),
        comparison=comparison,
    )


def _settings(rules: GateRules, settings: ComparisonSettings) -> ComparisonSettings:
    return replace(
        settings,
        alpha=rules.alpha,
        lower_is_better=frozenset(rules.lower_is_better),
        bounds=rules.bounds,
        smallest_difference_that_matters=rules.smallest_difference_that_matters,
        higher_is_better=frozenset(rules.higher_is_better),
    )


def _remarks(candidate: Columns) -> tuple[str, ...]:
    return () if candidate.repeated_inputs is None else (candidate.repeated_inputs.remark,)


def _about_unscored(candidate: Columns, checks: Sequence[GateCheck]) -> Iterator[str]:
    """Yield why the pass rate of the report differs: scorer errors and dead letters are missing here."""
    unscored = candidate.count(MISSING)
    if unscored and any(check.kind != "margin" and is_verdict(check.metric) for check in checks):
        trials, they, them = "1 trial has a scorer error or is a dead letter", "it", "it"
        if unscored > 1:
            trials, they, them = f"{unscored:,} trials have scorer errors or are dead letters", "they", "them"
        yield (
            f"{trials}. Whether {they} would have passed is not known: the gate counts {them} as missing and other "
            'errors as failures. The report shows the pass rate of scored trials, and under "errors as failures" '
            "counts every error."
        )


def _overall(checks: Sequence[GateCheck]) -> GateStatus:
    found = {check.status for check in checks}
    return "fail" if "fail" in found else "inconclusive" if "inconclusive" in found else "pass"


def _checks(candidate: Columns, pairs: Pairs | None, rules: GateRules) -> Iterator[Check]:
    yield from _of(rules, candidate, pairs, None, _missing(rules, rules))
    unknown = candidate.planned - len(candidate.ids)  # Samples that were not run: their slice is unknown.
    for rule in rules.slices:
        slices = _slices(rule, candidate)
        paired = {} if pairs is None else {part.name: part for part in _slices(rule, pairs.baseline, pairs.candidate)}
        for name in dict.fromkeys([*(part.name for part in slices), *paired]):
            here = next((part.rows for part in slices if part.name == name), np.zeros(len(candidate.ids), np.bool_))
            both = None
            if pairs is not None:
                part = paired.get(name)
                both = pairs.take(np.zeros(pairs.rows, np.bool_) if part is None else part.rows)
            part_of = candidate.take(here)
            part_of = replace(part_of, planned=part_of.planned + unknown)
            yield from _of(rule, part_of, both, name, _missing(rule, rules))
        if not slices and not paired:
            nobody = candidate.take(np.zeros(len(candidate.ids), np.bool_))
            none_paired = None if pairs is None else pairs.take(np.zeros(pairs.rows, np.bool_))
            yield from _of(rule, nobody, none_paired, f"{rule.by} = {rule.value}", _missing(rule, rules))


def _missing(rule: GateRules | SliceRule, rules: GateRules) -> MissingRule:
    """Return the treatment of missing values; the setting of a slice rule overrides the general one."""
    own = rule.max_missing if rule.max_missing is not None else rules.max_missing
    return MissingRule(rules.max_missing_share) if own is None else MissingRule(own, at_random=True)


def _of(
    rules: GateRules | SliceRule, candidate: Columns, pairs: Pairs | None, name: str | None, missing: MissingRule
) -> Iterator[Check]:
    for ceiling, bounds in ((False, rules.all_floors), (True, rules.ceilings)):
        for metric, bound in bounds.items():
            declared = candidate.declare(
                EMPTY, {measured_metric(metric): not ceiling}
            )  # The rule says which way is worse.
            yield Floor(metric, name, bound, declared, ceiling=ceiling, missing=missing)
    if pairs is not None:
        for metric, margin in rules.all_margins.items():
            yield Margin(metric, name, margin, pairs, missing)


def _slices(rule: SliceRule, *sides: Columns) -> list[Slice]:
    labels = next((side.groups[rule.by] for side in sides if rule.by in side.groups), ())
    if all(label is None for label in labels):
        return []
    found = list(cut((rule.by,), *sides))
    if rule.value is None:
        return [part for part in found if part.value is not None]
    wanted = hashable(rule.value)
    return [part for part in found if part.value == wanted and isinstance(part.value, bool) == isinstance(wanted, bool)]
