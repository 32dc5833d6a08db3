"""Compare candidates with a baseline on the same samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fairtrial.base.formatting import p_text
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import ConfigurationError
from fairtrial.reports.compare.caveats import about_choice, about_labels, about_pairs, about_runs
from fairtrial.reports.compare.comparison import (
    SHOWN,
    CandidateComparison,
    Comparison,
    Flips,
    MetricComparison,
    ScoredOnly,
    Side,
    SliceComparison,
    SliceTest,
)
from fairtrial.reports.compare.looks import MANY_LOOKS, TestLooks, look_at
from fairtrial.reports.compare.pairing import (
    NOTHING_SCORED,
    ComparisonSettings,
    Pairs,
    SampleChanges,
    Scores,
    changed_samples,
    changes,
    difference,
    difference_with_missing,
    names_of,
    pair,
    scores_of,
)
from fairtrial.reports.compare.plan_check import check_comparison
from fairtrial.reports.compare.verdicts import (
    AdjustedDifference,
    adjust,
    detectable,
    samples_needed,
    sentences,
    verdict_of,
)
from fairtrial.reports.figures.analysis_plan import AnalysisPlan, plan_of_sides
from fairtrial.reports.figures.broken_users import check_same_users
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns, IntArray
from fairtrial.reports.figures.labels import Labels, LabelUse, attach_labels, label_use
from fairtrial.reports.figures.metrics import (
    BUILT_IN,
    COSTS,
    FAILED,
    PASSED,
    REWARD,
    SCORED,
    VALUE,
    ExperimentSource,
    SingleExperiment,
    is_mean,
    is_ratio,
    measured_metric,
    source_of,
    unknown_metric,
)
from fairtrial.reports.figures.slicing import Slice, SliceBy, cut, name_of_slices, needs, normalize_slices
from fairtrial.stats import Heterogeneity, PairedDifference, Undefined, heterogeneity, holm

__all__ = ["DEFAULT_METRICS", "Comparison", "compare"]

DEFAULT_METRICS = (PASSED, VALUE, REWARD)
"""What is compared unless metrics are named: rewards only if those of one side differ from its values."""


def compare(
    baseline: SingleExperiment,
    *candidates: SingleExperiment,
    metrics: Sequence[str] | str | None = DEFAULT_METRICS,
    cluster: str | None = None,
    slice_by: SliceBy | Sequence[SliceBy] = (),
    alpha: float | None = None,
    lower_is_better: Collection[str] = (),
    higher_is_better: Collection[str] = (),
    smallest_difference_that_matters: float | Mapping[str, float] | None = None,
    bounds: Mapping[str, tuple[float, float] | None] = EMPTY,
    test: Literal["midp", "exact"] = "midp",
    seed: int = 0,
    labels: Labels | bool = False,
    label_metric: str = PASSED,
    label_name: str | None = None,
    labels_by_verdict: bool = False,
    labels_drawn: bool = False,
    other_users: bool = False,
) -> Comparison:
    """Compare one or more candidates with a baseline, sample by sample.

    Sides are reports, or experiments of one report: `compare(report["plain"], report["terse"])`. Samples are joined
    on their id; one with another input or expected value on the other side is missing. Task errors and timeouts count
    as failures of the system; scorer errors, dead letters and trials that were not run are missing, and every verdict
    is repeated on what was scored on both sides. If the runs have an `AnalysisPlan`, it replaces the defaults below,
    and `Comparison.plan` lists what is not as planned.

    Args:
        baseline: The report or experiment that the candidates are compared with.
        *candidates: The reports or experiments to compare with the baseline.
        metrics: "passed", "value", "reward", "latency_ms", "tokens", "cost_usd", the names of metrics, and for the
            pass rate of a criterion "passed:" before its name. None for all of them but latency, tokens and cost.
            By default "passed", "value" and, if rewards differ from values, "reward".
        cluster: The metadata key that groups samples that are not independent; None for that of the runs
            (`EvalConfig.cluster`), "" for none.
        slice_by: Metadata keys, `by_input`, `by_metric` or functions of the input: the comparison is repeated on each
            slice.
        alpha: The accepted chance of calling equal systems different, over all metrics and candidates: .05 by default.
            With a plan, once for the primary metric and once for all others.
        lower_is_better: Metrics of which less is better, besides latency, tokens and cost.
        higher_is_better: Metrics of which more is better, besides "passed", "value" and "reward". Metrics may declare
            it themselves (`Metric.higher_is_better`); others are reported as higher or lower instead of better.
        smallest_difference_that_matters: One number for shares (.05 by default), or one for each metric by name. Two
            sides whose interval lies within it are reported as equally good, and the number of samples to detect it
            is shown.
        bounds: Ranges of metrics, such as {"f1": (0, 1)}; None for a metric without limits. By default what metrics
            declare themselves (`Metric.bounds`); no range is guessed from values.
        test: "exact" for McNemar's exact test instead of the mid-p one.
        seed: The seed of the random draws, so that the same data always give the same result.
        labels: People's labels of some trials of every side, which correct the scores of a judge: True for the labels
            in the store, else labels by TrialKey, as `Label` records, or by sample id under the name of each
            experiment. If no metrics are named, only `label_metric` is compared.
        label_metric: What the labels are about.
        label_name: Which labels of the store are meant, if they have several names.
        labels_by_verdict: Trials to label were drawn at random within each verdict of the judge (see `calibrate`).
        labels_drawn: Trials to label were drawn at random. That is known of the labels of a review; of others, figures
            are conditional on it unless it is declared.
        other_users: Compare runs whose conversations had other simulated users, too, which is refused otherwise.
    """
    example = 'compare its experiments, as in compare(report["plain"], report["terse"])'
    sources = [source_of(side, example) for side in (baseline, *candidates)]
    if len(sources) < 2:
        raise ConfigurationError("a comparison needs a baseline and at least one candidate")
    if not other_users:
        check_same_users(sources)
    run_plan = plan_of_sides(sources)
    plan = None if run_plan is None else run_plan.in_use
    default = plan or AnalysisPlan()
    lower, higher = names_of(lower_is_better), names_of(higher_is_better)
    matters = smallest_difference_that_matters
    settings = ComparisonSettings.of(
        alpha=default.alpha if alpha is None else alpha,
        lower_is_better=lower or default.lower_is_better,
        higher_is_better=higher or default.higher_is_better,
        bounds=bounds or default.bounds,
        test=test,
        seed=seed,
        smallest_difference_that_matters=default.smallest_difference_that_matters if matters is None else matters,
        primary=None if plan is None else plan.primary,
    )
    use = label_use(labels, label_metric, label_name, by_verdict=labels_by_verdict, drawn=labels_drawn)
    wanted = (metrics,) if isinstance(metrics, str) else metrics
    if wanted is DEFAULT_METRICS and use is not None:
        wanted = (label_metric,)
    follows = wanted is DEFAULT_METRICS and plan is not None
    ways: Sequence[SliceBy] = normalize_slices(slice_by)
    planned_slices = () if ways else default.slices
    read = default.metrics if follows else wanted
    key = default.cluster if cluster is None else cluster
    columns = read_sides(sources, read, key, ways or planned_slices, use)
    if follows:  # What no trial or sample has cannot be compared; the check of the plan names it.
        wanted = _present(default.metrics, columns) or wanted
    groups = columns[0].groups
    ways = ways or [name for name in planned_slices if any(label is not None for label in groups[name])]
    looks = look_at(sources, settings.alpha, spends=default.looks)
    settings = settings if looks is None else replace(settings, alpha=looks.spent)
    made = compare_columns(columns[0], columns[1:], metrics=wanted, slice_by=ways, settings=settings, sources=sources)
    made = replace(made, looks=with_fresh_samples(looks, made, settings, columns))
    slices = [name_of_slices(way) for way in normalize_slices(ways)]
    chosen = {"cluster": cluster, "lower_is_better": lower, "higher_is_better": higher, "bounds": bounds, "test": test}
    return replace(made, plan=check_comparison(run_plan, made, slices, chosen))


def with_fresh_samples(
    looks: TestLooks | None, made: Comparison, settings: ComparisonSettings, columns: Sequence[Columns]
) -> TestLooks | None:
    """Return looks with the number of fresh samples that the first metric needs, once there were many looks."""
    if looks is None or max(looks.numbers) < MANY_LOOKS:
        return looks
    first = [made.candidates[0].metrics[0].metric]
    fresh = replace(settings, alpha=looks.fresh_alpha)
    again = compare_columns(columns[0], columns[1:], metrics=first, settings=fresh)
    return replace(looks, fresh=max((one.metrics[0].needed or 0 for one in again.candidates), default=0) or None)


def _present(metrics: Sequence[str], sides: Sequence[Columns]) -> tuple[str, ...]:
    known = {PASSED, VALUE, *COSTS}.union(*(side.values for side in sides))
    return tuple(name for name in metrics if measured_metric(name) in known)


def read_sides(
    sources: Sequence[ExperimentSource],
    metrics: Sequence[str] | None,
    cluster: str | None,
    slice_by: SliceBy | Sequence[SliceBy],
    labels: LabelUse | None = None,
) -> list[Columns]:
    """Read the columns of a baseline and its candidates; groups are read once, from the baseline."""
    needed = needs(normalize_slices(slice_by))
    about = () if labels is None else (labels.metric,)
    read = None if metrics is None else {*map(measured_metric, metrics), *needed.metrics, *about, PASSED}
    columns = [
        read_columns(
            source,
            metrics=read,
            # The baseline's clusters are used; "" disables those of the candidates.
            cluster=cluster if place == 0 or cluster is None else "",
            keys=needed.keys if place == 0 else (),
            inputs=needed.inputs if place == 0 else EMPTY,
            name=name,
        ).analysed_prefix()
        for place, (source, name) in enumerate(zip(sources, side_names(sources), strict=True))
    ]
    return attach_labels(sources, columns, labels)


def side_names(sources: Sequence[ExperimentSource]) -> list[str]:
    """What to call each side: the experiment, with the run's name or id where that is not enough."""
    choices = (
        [source.name for source in sources],
        [f"{source.run.name}:{source.name}" for source in sources],
        [f"{source.name} of {source.run.run_id}" for source in sources],
    )
    for names in choices:
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({place})" for place, name in enumerate(choices[-1], 1)]


def compare_columns(
    baseline: Columns,
    candidates: Sequence[Columns],
    *,
    metrics: Sequence[str] | None = DEFAULT_METRICS,
    slice_by: SliceBy | Sequence[SliceBy] = (),
    settings: ComparisonSettings | None = None,
    sources: Sequence[ExperimentSource] = (),
) -> Comparison:
    """Compare columns: a pure function, except that `sources` locate the results."""
    settings = (settings or ComparisonSettings()).declared_by(baseline, *candidates)
    baseline, *candidates = map(settings.declare, (baseline, *candidates))
    if metrics is None or metrics is DEFAULT_METRICS:
        baseline, *candidates = _with_rewards([baseline, *candidates])
    names = known_metrics([baseline, *candidates], metrics)
    ways = normalize_slices(slice_by)
    joined = [pair(candidate, baseline) for candidate in candidates]
    whole = [_Compared(pairs, names, settings) for pairs in joined]
    sliced = [
        [(part, _Compared(pairs.take(part.rows), names, settings, scored_too=False)) for part in slices]
        for pairs in joined
        for slices in [list(cut(ways, pairs.baseline, pairs.candidate))]
    ]
    # Holm, not Benjamini-Hochberg: one false alarm here blocks a release. Slices are only a list to inspect.
    tests = 0
    for of_primary in (True, False):  # The primary metric of a plan has an alpha of its own.
        tested = [metric for one in whole for metric in one.distinct(settings.primary, of_primary=of_primary)]
        tests += adjust([metric.found for metric in tested], "holm")
        adjust([metric.scored for metric in tested], "holm")
    adjust([metric.found for parts in sliced for _, one in parts for metric in one.distinct()], "bh")
    slice_tests = _slice_tests(whole, [[part for part, _ in parts] for parts in sliced], settings)
    compared: list[CandidateComparison] = []
    changed: list[SampleChanges] = []
    for place, (side, one, parts) in enumerate(zip(candidates, whole, sliced, strict=True)):
        made, change = _candidate(side, baseline, one, parts, settings, sources[place + 1] if sources else None)
        compared.append(replace(made, slice_tests=slice_tests[place]))
        changed.append(change)
    return Comparison(
        baseline=_side(baseline, sources[0] if sources else None),
        candidates=tuple(compared),
        alpha=settings.alpha,
        tests=tests,
        warnings=(*about_runs(sources), *about_choice(sources)),
        changes=tuple(changed),
        sources=tuple(sources),
    )


@dataclass(slots=True)
class _Metric:
    """One metric of one pair of sides: its numbers, its tests, and an earlier metric with the same numbers."""

    scores: Scores
    found: AdjustedDifference
    scored: AdjustedDifference
    same_as: str | None


class _Compared:
    """All metrics of one pair of sides."""

    def __init__(
        self, pairs: Pairs, names: Sequence[str], settings: ComparisonSettings, *, scored_too: bool = True
    ) -> None:
        self.pairs = pairs
        self.metrics: list[_Metric] = []
        failures = pairs.candidate.count(FAILED) + pairs.baseline.count(FAILED)
        for name in names:
            scores = scores_of(pairs, name, "system", settings)
            twin = next((m for m in self.metrics if m.same_as is None and m.scores.same_as(scores)), None)
            if twin is not None and settings.lower(name) == settings.lower(twin.scores.metric):
                self.metrics.append(_Metric(scores, twin.found, twin.scored, twin.scores.metric))
                continue
            found = scored = difference(scores, pairs, settings)
            if failures and scored_too and measured_metric(name) not in COSTS:
                scored = difference(scores_of(pairs, name, "scored", settings), pairs, settings)
            self.metrics.append(_Metric(scores, AdjustedDifference(found), AdjustedDifference(scored), None))

    def distinct(self, primary: str | None = None, *, of_primary: bool = False) -> list[_Metric]:
        """The metrics that are tests of their own: those of the primary one, or the others.

        A metric with the same numbers as the primary one is the same test.
        """
        named = next((one.same_as or primary for one in self.metrics if one.scores.metric == primary), None)
        return [one for one in self.metrics if one.same_as is None and (one.scores.metric == named) is of_primary]


def _candidate(
    side: Columns,
    baseline: Columns,
    one: _Compared,
    parts: Sequence[tuple[Slice, _Compared]],
    settings: ComparisonSettings,
    source: ExperimentSource | None,
) -> tuple[CandidateComparison, SampleChanges]:
    names = (side.name, baseline.name)
    metrics = tuple(_record(metric, one.pairs, names, settings) for metric in one.metrics)
    slices = tuple(
        SliceComparison(
            part.name,
            part.by,
            int(np.count_nonzero(part.rows)),
            tuple(_record(metric, compared.pairs, names, settings, sliced=True) for metric in compared.metrics),
        )
        for part, compared in parts
    )
    change = changes(one.pairs)
    gained, lost = change.ids_of("gained")[:SHOWN], change.ids_of("lost")[:SHOWN]
    about = _side(side, source)
    share = max(one.pairs.missing_share, about.missing_share, _side(baseline, None).missing_share)
    made = CandidateComparison(
        candidate=about,
        matched=one.pairs.matched,
        only_baseline=one.pairs.only_baseline,
        only_candidate=one.pairs.only_candidate,
        missing_share=share,
        metrics=metrics,
        slices=slices,
        flips=Flips(tuple(gained), tuple(lost), change.count("gained"), change.count("lost")),
        warnings=(*about_pairs(one.pairs, metrics, slices, names, share), *about_labels(one.pairs, metrics)),
        changed=changed_samples(one.pairs.baseline.ids, one.pairs.changed),
    )
    return made, change


def _slice_tests(
    whole: Sequence[_Compared], slices: Sequence[Sequence[Slice]], settings: ComparisonSettings
) -> list[tuple[SliceTest, ...]]:
    """Whether slices differ from each other, by candidate; adjusted together, as one false alarm sends people looking.

    A run that looked at its own results, and rates that labels correct, have no such test.
    """
    found: list[tuple[int, str, str, Heterogeneity]] = []
    for place, (one, parts) in enumerate(zip(whole, slices, strict=True)):
        for by in () if one.pairs.watched else dict.fromkeys(part.by for part in parts):
            codes = np.full(len(one.pairs.baseline.ids), -1, dtype=np.intp)
            for code, part in enumerate(part for part in parts if part.by == by):
                codes[part.rows] = code
            for metric in one.metrics:
                if metric.same_as is None and metric.scores.labelled is None and is_mean(metric.scores.metric):
                    tested = _heterogeneity(one.pairs, metric.scores, codes, settings)
                    if isinstance(tested, Heterogeneity):
                        found.append((place, by, metric.scores.metric, tested))
    adjusted = holm([tested.p_value for *_, tested in found]).tolist()
    made: list[list[SliceTest]] = [[] for _ in whole]
    for (place, by, name, tested), p in zip(found, adjusted, strict=True):
        differ = p <= settings.alpha
        verdict = "differ from each other" if differ else "do not differ detectably from each other"
        among = f", adjusted for {len(found)} tests" if len(found) > 1 else ""
        text = f"{name}: changes by {by} {verdict} ({p_text(p)}{among})."
        made[place].append(SliceTest(by, name, tested.groups, tested.n, tested.p_value, p, differ, text))
    return [tuple(tests) for tests in made]


def _heterogeneity(
    pairs: Pairs, scores: Scores, codes: IntArray, settings: ComparisonSettings
) -> Heterogeneity | Undefined:
    known = (scores.candidate.counts > 0) & (scores.baseline.counts > 0) & (codes >= 0)
    change = scores.candidate.only(known).means - scores.baseline.only(known).means
    clusters = None if pairs.clusters is None else pairs.clusters[known]
    return heterogeneity(change, codes[known], clusters=clusters, seed=settings.seed)


def _record(
    metric: _Metric, pairs: Pairs, names: tuple[str, str], settings: ComparisonSettings, *, sliced: bool = False
) -> MetricComparison:
    name, found = metric.scores.metric, metric.found.difference
    lower = settings.lower(name)
    matters = settings.matters(name, metric.scores.bounds)
    verdict = verdict_of(metric.found, settings, lower, matters)
    missing = pairs.missing_values(name)
    worst = _worst_case(metric, pairs, settings) if missing and (verdict == "as good as" or not sliced) else None
    unproven = (
        bool(missing) and not pairs.watched and not (matters and worst and -matters < worst[0] <= worst[1] < matters)
    )
    if verdict == "as good as" and unproven:
        verdict = "no detectable difference"
    # For slices, the unadjusted detectable difference: the adjusted one would depend on the other slices.
    tests = 1 if sliced else metric.found.tests
    labelled = metric.scores.labelled
    labels = None if labelled is None else labelled.counts
    drawn = None if labelled is None else labelled.drawn
    mde = detectable(found, tests, settings, metric.scores.bounds)
    needed = samples_needed(found, tests, settings, matters, metric.scores.repeats, ratio=is_ratio(name))
    notes = [*found.notes, *([found.reason] if found.reason else [])]
    if not found.n and (absent := _absent(metric.scores, pairs, names)):
        notes = [absent]
    first, more = sentences(name, names, metric.found, verdict, mde, needed, notes, settings, matters, labels, drawn)
    return MetricComparison(
        metric=name,
        lower_is_better=lower,
        n=found.n,
        clusters=found.clusters,
        baseline=_plain(found.mean_b),
        candidate=_plain(found.mean_a),
        wins=found.losses if lower else found.wins,
        losses=found.wins if lower else found.losses,
        ties=found.ties,
        difference=_plain(found.difference),
        low=None if found.interval is None else float(found.interval.low),
        high=None if found.interval is None else float(found.interval.high),
        p=_plain(found.p_value),
        adjusted_p=_plain(metric.found.adjusted),
        method=None if found.interval is None else found.interval.method,
        test=found.test,
        mde=mde,
        needed=needed,
        verdict=verdict,
        sentence=f"{first} {more}".rstrip(),
        scored_only=None if sliced else _scored_only(metric.scored, settings, lower, None if unproven else matters),
        same_as=metric.same_as,
        notes=tuple(notes),
        smallest_difference=matters,
        labels=labels,
        missing=missing,
        worst=worst,
        drawn=drawn,
        uncounted=metric.scores.left_out,
        headline=first,
    )


def _worst_case(metric: _Metric, pairs: Pairs, settings: ComparisonSettings) -> tuple[float, float] | None:
    """Return the interval whatever the missing pairs would have been; None without a declared range.

    That of a run that used its own results to decide when to stop allows for them already.
    """
    name, interval = metric.scores.metric, metric.found.difference.interval
    fill = None if pairs.watched else settings.range_of(name)
    if interval is None or fill is None:
        return None
    whole = difference_with_missing(pairs, name, interval, fill, settings)
    return None if whole is None else (float(whole.low), float(whole.high))


def _scored_only(
    found: AdjustedDifference, settings: ComparisonSettings, lower: bool | None, matters: float | None
) -> ScoredOnly:
    one: PairedDifference = found.difference
    return ScoredOnly(
        one.n,
        _plain(one.difference),
        None if one.interval is None else float(one.interval.low),
        None if one.interval is None else float(one.interval.high),
        _plain(one.p_value),
        verdict_of(found, settings, lower, matters),
    )


def _absent(scores: Scores, pairs: Pairs, names: tuple[str, str]) -> str | None:
    """Return why there is no pair: no sample in common, or a side without a value in this metric."""
    if not pairs.matched:
        return "they have no sample in common."
    if not pairs.has_scores(scores.metric):
        return NOTHING_SCORED
    empty = [not side.counts.any() for side in (scores.candidate, scores.baseline)]
    if all(empty):
        return f"neither {names[0]} nor {names[1]} has a trial with a value for {scores.metric}."
    for name, nothing in zip(names, empty, strict=True):
        if nothing:
            return f"no trial of {name} has a value for {scores.metric}."
    return None


def _with_rewards(sides: Sequence[Columns]) -> list[Columns]:
    """Return the sides with rewards if those of one side differ from its values, else without."""
    values = [side.values for side in sides]
    differ = any(REWARD in one and not np.array_equal(one[REWARD], one[VALUE], equal_nan=True) for one in values)
    made = []
    for side, one in zip(sides, values, strict=True):
        others = {name: array for name, array in one.items() if name != REWARD}
        own = {REWARD: one.get(REWARD, one[VALUE])} if differ and VALUE in one else {}
        made.append(replace(side, values={**others, **own}))
    return made


def known_metrics(sides: Sequence[Columns], metrics: Sequence[str] | None) -> list[str]:
    """Return the metrics to compare; raises if no side has one of them."""
    known = list(dict.fromkeys(name for side in sides for name in side.values))
    main = [PASSED, VALUE, *([REWARD] if REWARD in known else [])]
    if metrics is DEFAULT_METRICS:
        return main
    if metrics is None:
        return [*main, *(name for name in known if name not in BUILT_IN)]
    if not metrics:
        raise ConfigurationError("name at least one metric to compare, such as passed")
    names = list(dict.fromkeys(metrics))
    for name in names:
        if measured_metric(name) not in (*known, PASSED, VALUE, *COSTS):
            raise unknown_metric(name, known)
    return names


def _side(columns: Columns, source: ExperimentSource | None) -> Side:
    return Side(
        name=columns.name,
        run_id="" if source is None else source.run.run_id,
        experiment=columns.name if source is None else source.name,
        samples=columns.planned,
        trials=columns.trials,
        scored=columns.count(SCORED),
        failures=columns.count(FAILED),
        missing=columns.missing,
    )


def _plain(value: float | None) -> float | None:
    return None if value is None else float(value)
