"""Rank more than two systems on the same samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairtrial import stats
from fairtrial.base.formatting import count, level, listed, mean_text
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import ConfigurationError
from fairtrial.reports.compare import caveats, pairing
from fairtrial.reports.compare.compare import known_metrics, read_sides
from fairtrial.reports.compare.comparison import Verdict
from fairtrial.reports.compare.looks import look_at_all
from fairtrial.reports.figures import metrics
from fairtrial.reports.figures.broken_users import check_same_users
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns, FloatArray, IntArray, refuse_weighted
from fairtrial.reports.leaderboard.table import (
    BaselineDifference,
    Leaderboard,
    LeaderboardEntry,
    RankedSuite,
    SystemPair,
)
from fairtrial.reports.report import EvalReport, ExperimentReport, source_of, sources_of

__all__ = ["Leaderboard", "leaderboard"]

_NAMED = 4  # Maximum number of systems in a sentence.


def leaderboard(
    *reports: EvalReport | ExperimentReport,
    metric: str = metrics.PASSED,
    baseline: str | None = None,
    cluster: str | None = None,
    weights: Mapping[str, float] | None = None,
    alpha: float = 0.05,
    lower_is_better: Collection[str] = (),
    higher_is_better: Collection[str] = (),
    smallest_difference_that_matters: float | Mapping[str, float] = metrics.SMALLEST_DIFFERENCE,
    bounds: Mapping[str, tuple[float, float] | None] = EMPTY,
    seed: int = 0,
    other_users: bool = False,
) -> Leaderboard:
    """Rank systems that were run on the same samples, with rank intervals that hold for all of them together.

    A report stands for all its experiments. Samples are joined on their id, and only those that every system has a
    score on are used; how many were left out is said. Task errors and timeouts count as failures. Runs of several
    datasets are taken together: experiments of the same name are one system, and its mean is the weighted mean over the
    datasets.

    Args:
        *reports: Runs, or experiments of runs: `leaderboard(report)`, `leaderboard(old["plain"], new)`.
        metric: "passed", "value", "reward", "latency_ms", "tokens", "cost_usd", or a metric by name.
        baseline: The system whose differences from all others are shown, with intervals that hold together.
        cluster: The metadata key whose value samples share that are not independent; None for the runs' own, "" for
            none.
        weights: The weight of each dataset by name, if there are several; by default equal ones.
        alpha: The accepted chance that a rank interval, or an interval of a difference, misses the truth; over all
            looks at a test split if the analysis plan of the systems has `looks`.
        lower_is_better: Metrics of which less is better, besides latency, tokens and cost.
        higher_is_better: Metrics of which more is better, besides "passed", "value" and "reward".
        smallest_difference_that_matters: A system whose difference from the baseline is smaller is as good as it.
        bounds: Ranges of metrics that do not declare theirs, such as {"f1": (0, 1)}; None for a metric without limits.
        seed: Of the random draws, so that the same data always give the same answer.
        other_users: Rank runs whose conversations had other simulated users, too, which is refused otherwise.
    """
    sources = [source for report in reports for source in sources_of(report)]
    if not other_users:
        check_same_users(sources)
    return rank_sources(
        sources,
        metric=metric,
        baseline=baseline,
        cluster=cluster,
        weights=weights,
        settings=pairing.ComparisonSettings.of(
            alpha=alpha,
            lower_is_better=lower_is_better,
            higher_is_better=higher_is_better,
            bounds=bounds,
            seed=seed,
            smallest_difference_that_matters=smallest_difference_that_matters,
        ),
    )


def rank_sources(
    sources: Sequence[metrics.ExperimentSource],
    *,
    metric: str = metrics.PASSED,
    baseline: str | None = None,
    cluster: str | None = None,
    weights: Mapping[str, float] | None = None,
    settings: pairing.ComparisonSettings | None = None,
) -> Leaderboard:
    """Rank experiments: each is a system; over several datasets, those with the same name are one system."""
    refuse_adaptive(sources, "a leaderboard")
    groups: dict[str, list[metrics.ExperimentSource]] = {}
    for source in sources:
        groups.setdefault(source.run.dataset_name, []).append(source)
    if len(groups) == 1:
        suites = {name: read_sides(group, [metric], cluster, ()) for name, group in groups.items()}
    else:
        suites = {name: _columns_by_name(name, group, sources, metric, cluster) for name, group in groups.items()}
    settings, about_looks = _look(groups, settings or pairing.ComparisonSettings())
    return rank_columns(
        suites,
        metric=metric,
        baseline=baseline,
        weights=weights,
        settings=settings,
        warnings=(*about_looks, *(line for group in groups.values() for line in caveats.about_runs(group))),
    )


def _look(
    groups: Mapping[str, Sequence[metrics.ExperimentSource]], settings: pairing.ComparisonSettings
) -> tuple[pairing.ComparisonSettings, list[str]]:
    """Record the looks at test splits, which all pairs of systems are; return the level that is left, and sentences."""
    found = [(name, looks) for name, group in groups.items() for looks in look_at_all(group, settings.alpha)]
    alpha = min((looks.spent for _, looks in found), default=settings.alpha)
    several = len(groups) > 1
    lines = [f"{name}: {line}" if several else line for name, looks in found for line in looks.sentences]
    return replace(settings, alpha=alpha), lines


def refuse_adaptive(sources: Sequence[metrics.ExperimentSource], what: str) -> None:
    """Raise for runs that used their own results to stop: ordinary intervals are not valid for them."""
    for source in sources:
        if source.run.noted.is_adaptive:
            raise ConfigurationError(
                f"{what} needs runs of fixed length, but run {source.run.run_id} looked at its own results to know "
                "when to end\nrun it without stop_when, or compare it with one other: compare(a, b)"
            )


def _columns_by_name(
    dataset: str,
    group: Sequence[metrics.ExperimentSource],
    sources: Sequence[metrics.ExperimentSource],
    metric: str,
    cluster: str | None,
) -> list[Columns]:
    """Return the columns of one of several datasets, in the order of the systems' names."""
    names = list(dict.fromkeys(source.name for source in sources))
    found = Counter(source.name for source in group)
    for name in names:
        if found[name] != 1:
            what = "has no experiment" if not found[name] else "has more than one experiment"
            raise ConfigurationError(
                f"over several datasets a system is what has the same experiment name in each, and {dataset!r} {what} "
                f"{name!r}\nname one experiment of each system in each dataset, or rank the datasets one by one"
            )
    ordered = sorted(group, key=lambda source: names.index(source.name))
    return [
        replace(side, name=name) for side, name in zip(read_sides(ordered, [metric], cluster, ()), names, strict=True)
    ]


def rank_columns(
    suites: Mapping[str, Sequence[Columns]],
    *,
    metric: str = metrics.PASSED,
    baseline: str | None = None,
    weights: Mapping[str, float] | None = None,
    settings: pairing.ComparisonSettings | None = None,
    warnings: Sequence[str] = (),
) -> Leaderboard:
    """Rank columns, in each suite the same systems in the same order: a pure function of numbers."""
    everything = [side for sides in suites.values() for side in sides]
    refuse_weighted(everything, "a leaderboard")
    names = [side.name for side in next(iter(suites.values()), ())]
    if len(names) < 2:
        raise ConfigurationError(
            f"a leaderboard needs at least two systems (got {len(names)})\nname several runs or experiments"
        )
    settings = (settings or pairing.ComparisonSettings()).declared_by(*everything)
    known_metrics(everything, [metric])
    if not metrics.is_mean(metric):
        raise ConfigurationError(
            f"a leaderboard ranks by means (got {metric!r})\n"
            f"name {metrics.measured_metric(metric)!r}, or compare two systems"
        )
    lower = settings.lower(metric)
    if lower is None:
        raise ConfigurationError(
            f"no system can be the best in {metric!r}, because which way is better is not declared\n"
            "declare it with lower_is_better or higher_is_better (--lower-is-better, --higher-is-better), or in the "
            f"evaluator: Metric({metric!r}, ..., higher_is_better=False)"
        )
    if baseline is not None and baseline not in names:
        raise ConfigurationError(
            f"baseline must be one of the systems (got {baseline!r})\nthe systems are {', '.join(names)}"
        )
    parts = [_Part.of(name, [*map(settings.declare, sides)], metric, settings) for name, sides in suites.items()]
    shares = suite_weights(weights, list(suites))
    ranking = stats.rank_systems(
        *(part.scores for part in parts),
        weights=shares,
        higher_is_better=not lower,
        baseline=None if baseline is None else names.index(baseline),
        level=settings.level,
        draws=settings.draws,
        seed=settings.seed,
    )
    if isinstance(ranking, stats.Undefined):
        raise ConfigurationError(
            f"the systems cannot be ranked by {metric!r}: {ranking.reason[:1].lower()}{ranking.reason[1:]}"
        )
    means = [part.means(settings.level) for part in parts]
    overall = [
        stats.weighted_mean([one[place] for one in means], shares, bounds=_common_bounds(parts), level=settings.level)
        for place in range(len(names))
    ]
    missing = float(np.average([part.missing / (part.n + part.missing) for part in parts], weights=shares))
    against = (
        {}
        if ranking.against is None
        else _differences(ranking.against, ranking, settings, metric, _common_bounds(parts), missing, lower)
    )
    entries = [
        _entry(place, name, ranking, overall[place], parts, everything, against.get(place))
        for place, name in enumerate(names)
    ]
    entries.sort(key=lambda entry: entry.rank)
    return Leaderboard(
        metric=metric,
        lower_is_better=lower,
        systems=tuple(entries),
        baseline=baseline,
        alpha=settings.alpha,
        n=ranking.n,
        clusters=ranking.clusters,
        suites=tuple(
            RankedSuite(part.name, share / sum(shares), part.n, part.left_out, part.missing, part.changed)
            for part, share in zip(parts, shares, strict=True)
        ),
        pairs=tuple(_pairs(ranking.pairs, names)),
        method=ranking.method,
        sentence=_sentence(metric, entries, ranking),
        warnings=(*warnings, *_warnings(parts, metric, entries, ranking, lower)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The samples of one suite with a score for every system."""

    name: str
    sides: tuple[Columns, ...]
    repeats: tuple[stats.Repeats, ...]
    clusters: IntArray | None
    bounds: tuple[float, float] | None
    left_out: int
    repeated_ids: int
    missing: int
    uncounted: int  # Failures without a value in this metric.
    scored_means: tuple[float | None, ...]
    changed: pairing.ChangedSamples | None
    unknown: tuple[str, ...]  # A caveat about samples that only ids say to be the same.

    @property
    def n(self) -> int:
        """The number of samples used."""
        return int(self.repeats[0].counts.size)

    @property
    def scores(self) -> stats.SystemScores:
        """A row for each sample, a column for each system."""
        table: FloatArray = np.column_stack([one.means for one in self.repeats])
        repeated = not all(one.single for one in self.repeats)
        return stats.SystemScores(table, self.clusters, self.bounds, repeated)

    def means(self, at_level: float) -> list[stats.MeanEstimate]:
        """The mean of each system with its interval."""
        return [
            stats.mean_interval(one, clusters=self.clusters, bounds=self.bounds, level=at_level) for one in self.repeats
        ]

    @classmethod
    def of(cls, name: str, sides: Sequence[Columns], metric: str, settings: pairing.ComparisonSettings) -> _Part:
        """Join the sides on sample id; ids that occur twice on a side are left out."""
        doubles = {one for side in sides for one, times in Counter(side.ids).items() if times > 1}
        common = set(sides[0].ids).difference(doubles).intersection(*(side.ids for side in sides[1:]))
        union = set().union(*(side.ids for side in sides))
        order = [one for one in sides[0].ids if one in common]
        joined = []
        for side in sides:
            where = {one: place for place, one in enumerate(side.ids)}
            joined.append(side.take(np.asarray([where[one] for one in order], dtype=np.intp)))
        same, changed = pairing.without_changed(joined)
        bounds, worst = settings.range_of(metric), settings.worst_of(metric)
        counted = [side.scores(metric, "system", worst=worst) for side in same]
        usable = np.all([one.counts > 0 for one in counted], axis=0) if order else np.zeros(0, dtype=np.bool_)
        clusters = next((side.clusters for side in joined if side.clusters is not None), None)
        scored = [side.scores(metric, "scored") for side in same]
        return cls(
            name=name,
            sides=tuple(same),
            repeats=tuple(one.only(usable) for one in counted),
            clusters=None if clusters is None else pairing.shared_clusters(clusters[usable]),
            bounds=bounds,
            left_out=len(union) - len(order) - len(doubles),
            repeated_ids=len(doubles),
            missing=len(order) - int(np.count_nonzero(usable)),
            uncounted=0
            if worst is not None or metric in metrics.COSTS
            else sum(side.count(metrics.FAILED) for side in same),
            scored_means=tuple(
                float(one.only(one.counts > 0).means.mean()) if one.counts.any() else None for one in scored
            ),
            changed=pairing.changed_samples(order, changed),
            unknown=tuple(caveats.about_unknown(changed)),
        )


def suite_weights(weights: Mapping[str, float] | None, suites: Sequence[str]) -> list[float]:
    """Return the weights of datasets in order (default: equal)."""
    if weights is None:
        return [1.0] * len(suites)
    strange = [name for name in weights if name not in suites]
    if strange or len(weights) < len(suites):
        raise ConfigurationError(
            f"weights must name every dataset once (got {', '.join(weights)})\nthe datasets are {', '.join(suites)}"
        )
    if min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise ConfigurationError("weights must be at least 0, and one of them above 0")
    return [float(weights[name]) for name in suites]


def _common_bounds(parts: Sequence[_Part]) -> tuple[float, float] | None:
    bounds = {part.bounds for part in parts}
    return bounds.pop() if len(bounds) == 1 else None


def _entry(
    place: int,
    name: str,
    ranking: stats.Ranking,
    overall: stats.WeightedMean,
    parts: Sequence[_Part],
    everything: Sequence[Columns],
    against: BaselineDifference | None,
) -> LeaderboardEntry:
    own = everything[place :: len(everything) // len(parts)]
    return LeaderboardEntry(
        name=name,
        rank=int(ranking.ranks[place]),
        rank_low=int(ranking.best_ranks[place]),
        rank_high=int(ranking.worst_ranks[place]),
        mean=float(ranking.means[place]),
        low=None if overall.interval is None else overall.interval.low,
        high=None if overall.interval is None else overall.interval.high,
        best=float(ranking.best_chances[place]) if ranking.decided else None,
        suite_means=tuple(float(part.repeats[place].means.mean()) for part in parts),
        failures=sum(side.count(metrics.FAILED) for side in own),
        missing=sum(side.missing for side in own),
        against_baseline=against,
    )


def _differences(
    found: stats.SimultaneousDifferences,
    ranking: stats.Ranking,
    settings: pairing.ComparisonSettings,
    metric: str,
    bounds: tuple[float, float] | None,
    missing: float,
    lower: bool,
) -> dict[int, BaselineDifference]:
    """Return the differences from the baseline; `missing` is the share of the samples without a score of both.

    "As good as" must hold whatever those would have been: they move a mean by their share of the range at most.
    """
    matters = settings.matters(metric, bounds)
    moved = 0.0 if not missing else np.inf if bounds is None else missing * (bounds[1] - bounds[0])
    made = {}
    for place, system in enumerate(found.first.tolist()):
        low, high = float(found.low[place]), float(found.high[place])
        verdict: Verdict = "no detectable difference"
        if not ranking.decided or not np.isfinite([low, high]).all():
            verdict = "unknown"
        elif low > 0 or high < 0:
            verdict = "better" if (low > 0) is not lower else "worse"
        elif matters is not None and -matters < low - moved <= high + moved < matters:
            verdict = "as good as"
        made[system] = BaselineDifference(
            float(found.differences[place]), _finite(low), _finite(high), float(found.p_values[place]), verdict
        )
    return made


def _pairs(found: stats.SimultaneousDifferences, names: Sequence[str]) -> Iterator[SystemPair]:
    columns = (found.first, found.second, found.differences, found.low, found.high, found.p_values)
    for first, second, difference, low, high, p in zip(*(column.tolist() for column in columns), strict=True):
        yield SystemPair(names[first], names[second], difference, _finite(low), _finite(high), p)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _sentence(metric: str, entries: Sequence[LeaderboardEntry], ranking: stats.Ranking) -> str:
    """Return a sentence on which systems may be the best."""
    percent = metrics.is_verdict(metric)
    systems = f"{len(entries)} systems"
    ahead = [one.name for one in entries if one.rank == entries[0].rank]
    lead = "leads" if len(ahead) == 1 else "lead"
    leads = f"{_named(ahead)} {lead} with {mean_text(entries[0].mean, percent=percent)}"
    if not ranking.decided:
        return f"{metric}: the order of {systems} is open: {' '.join(ranking.notes)} {leads}."
    first = [one for one in entries if one.rank_low == 1]
    if len(first) == 1:
        best = first[0]
        return (
            f"{metric}: {best.name} is the best of {systems} with {mean_text(best.mean, percent=percent)} (at "
            f"{level(ranking.level)}, no other may be)."
        )
    if len(first) == len(entries):
        return f"{metric}: any of {systems} may be the best; {leads}."
    named = ", ".join(f"{one.name} ({mean_text(one.mean, percent=percent)})" for one in first[:_NAMED])
    more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    return f"{metric}: {len(first)} of {systems} may be the best: {named}{more}."


def _named(names: Sequence[str]) -> str:
    """Return names as a list in words, of many only the first."""
    return listed(names if len(names) <= _NAMED else (*names[:_NAMED], f"{len(names) - _NAMED} more"))


def _warnings(
    parts: Sequence[_Part], metric: str, entries: Sequence[LeaderboardEntry], ranking: stats.Ranking, lower: bool
) -> Iterator[str]:
    several = len(parts) > 1
    for part in parts:
        where = f"{part.name}: " if several else ""
        if part.repeated_ids:
            yield (
                f"{where}{count(part.repeated_ids, 'sample id occurs', 'sample ids occur')} more than once in a run: "
                "nothing tells which results belong together, so these results are left out."
            )
        if part.left_out:
            not_shared = f"that not every system has {'is' if part.left_out == 1 else 'are'} left out"
            yield f"{where}{count(part.left_out, 'sample')} {not_shared}; {count(part.n, 'is', 'are')} used."
        if part.changed is not None:
            yield f"{where}{part.changed.remark}"
        yield from (f"{where}{line}" for line in part.unknown)
        if part.missing:
            share = part.missing / (part.n + part.missing)
            care = ": if they differ from the others, the order is biased" if share > caveats.MISSING_WARNED else ""
            are = "is" if part.missing == 1 else "are"
            yield f"{where}{count(part.missing, 'sample')} without a score of every system {are} left out{care}."
        if part.uncounted:
            yield f"{where}{caveats.uncounted_failures(metric, part.uncounted)}."
    if ranking.n < caveats.FEWEST_PAIRS:
        yield f"Only {count(ranking.n, 'sample')}: even the largest possible difference might be missed."
    elif ranking.n < caveats.FEW_PAIRS:
        yield f"Only {count(ranking.n, 'sample')}: only large differences can be detected."
    means = [
        None if None in own else float(np.mean([one for one in own if one is not None]))
        for own in zip(*(part.scored_means for part in parts), strict=True)
    ]
    if metric not in metrics.COSTS and any(entry.failures for entry in entries) and None not in means and not several:
        known = [one for one in means if one is not None]
        best = min(known) if lower else max(known)
        names = [side.name for side, mean in zip(parts[0].sides, known, strict=True) if np.isclose(mean, best)]
        if all(entry.rank > 1 for entry in entries if entry.name in names):
            lead = f"{_named(names)} would lead with {mean_text(best, percent=metrics.is_verdict(metric))}"
            yield f"Without task errors and timeouts, which count as failures here, {lead}."


@dataclass(frozen=True, slots=True)
class SuitesMean:
    """The mean of one system over several suites: `found.macro.mean`, `found.macro.interval`.

    `suites` has the mean of each dataset. In `macro` every dataset weighs the same, in `micro` every sample; `weighted`
    has the weights that were given, and is None without.
    """

    metric: str
    suites: Mapping[str, stats.MeanEstimate]
    macro: stats.WeightedMean
    micro: stats.WeightedMean
    weighted: stats.WeightedMean | None


def mean_over_suites(
    *reports: EvalReport | ExperimentReport,
    metric: str = metrics.PASSED,
    weights: Mapping[str, float] | None = None,
    level: float = 0.95,
) -> SuitesMean:
    """Compute the mean of one system over several suites with its interval: macro, micro, or weighted.

    Suites are strata: SE^2 = sum(w^2 SE^2), with Satterthwaite's degrees of freedom. Task errors and timeouts count as
    the worst value of the metric, if it has one. Of one suite it is the mean and the interval of the suite itself.

    Args:
        *reports: One experiment of each suite: `mean_over_suites(math["careful"], code["careful"])`.
        metric: "passed", "value", "latency_ms", or a metric by name.
        weights: The weight of each suite by the name of its dataset.
        level: The confidence of all intervals.
    """
    example = 'name one experiment of each, as in mean_over_suites(math["careful"], code["careful"])'
    sources = [source_of(report, example) for report in reports]
    if not sources:
        raise ConfigurationError("a mean over suites needs at least one report (got 0)")
    refuse_adaptive(sources, "a mean over suites")
    means: dict[str, stats.MeanEstimate] = {}
    ranges = set()
    for source in sources:
        name = source.run.dataset_name
        if name in means:
            raise ConfigurationError(
                f"each dataset must be given once (got {name!r} twice)\nname one experiment of each suite"
            )
        columns = read_columns(source, metrics=(metric,))
        refuse_weighted((columns,), "a mean over suites")
        settings = pairing.ComparisonSettings().declared_by(columns)
        bounds = settings.range_of(metric)
        scores = columns.scores(metric, "system", worst=settings.worst_of(metric))
        means[name] = stats.mean_interval(scores, clusters=columns.clusters, bounds=bounds, level=level)
        if not means[name].n:
            raise ConfigurationError(f"no trial of {source.name!r} on {name!r} has a value for {metric!r}")
        ranges.add(bounds)
    common = ranges.pop() if len(ranges) == 1 else None
    estimates = list(means.values())
    own = None if weights is None else suite_weights(weights, list(means))
    return SuitesMean(
        metric,
        means,
        stats.weighted_mean(estimates, bounds=common, level=level),
        stats.weighted_mean(estimates, [one.n for one in estimates], bounds=common, level=level),
        None if own is None else stats.weighted_mean(estimates, own, bounds=common, level=level),
    )
