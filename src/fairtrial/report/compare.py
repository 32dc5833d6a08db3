"""Candidates against a baseline on the same samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fairtrial.errors import ConfigurationError
from fairtrial.frozen import EMPTY
from fairtrial.report.caveats import about_pairs, about_runs
from fairtrial.report.columns import (
    BUILT_IN,
    COSTS,
    FAILED,
    PASSED,
    REWARD,
    SCORED,
    VALUE,
    Columns,
    one_experiment,
    read_columns,
)
from fairtrial.report.comparison import (
    SHOWN,
    CandidateComparison,
    Comparison,
    FlippedSamples,
    Flips,
    MetricComparison,
    ScoredOnly,
    Side,
    SliceComparison,
)
from fairtrial.report.pairs import Pairs, changes, difference, pair, scores_of
from fairtrial.report.report import EvalReport, ExperimentReport
from fairtrial.report.scores import Scores, Settings
from fairtrial.report.slices import SliceBy
from fairtrial.report.slicing import Slice, cut, needs, settled
from fairtrial.report.verdicts import Found, adjust, detectable, samples_needed, sentence, verdict_of
from fairtrial.report.words import counted
from fairtrial.stats import PairedDifference

__all__ = ["Comparison", "compare", "compare_columns"]


DEFAULT_METRICS = (PASSED, VALUE, REWARD)
"""What is compared unless metrics are named: rewards only if those of one side differ from its values."""


def compare(
    baseline: EvalReport | ExperimentReport,
    *candidates: EvalReport | ExperimentReport,
    metrics: Sequence[str] | str | None = DEFAULT_METRICS,
    cluster: str | None = None,
    slice_by: SliceBy | Sequence[SliceBy] = (),
    alpha: float = 0.05,
    lower_is_better: Collection[str] = (),
    bounds: Mapping[str, tuple[float, float] | None] = EMPTY,
    test: Literal["midp", "exact"] = "midp",
    seed: int = 0,
) -> Comparison:
    """Compare one or more candidates with a baseline, sample by sample.

    Sides are reports, or experiments of one report: `compare(report["plain"], report["terse"])`. Samples are joined
    on their id. Task errors and timeouts count as failures of the system; scorer errors, dead letters and trials that
    were not run are missing, and every verdict is repeated on what was scored on both sides.

    Args:
        baseline: What the candidates are held against.
        *candidates: What may be better or worse.
        metrics: "passed", "value", "reward", "latency_ms", "tokens", "cost_usd", the names of metrics, and for the
            pass rate of a criterion "passed:" before its name. None for all of them but latency, tokens and cost.
            Unless given, "passed", "value" and, where rewards differ from values, "reward".
        cluster: The metadata key whose value samples share that are not independent; None for the runs' own
            (`EvalConfig.cluster`), "" for none.
        slice_by: Metadata keys, `by_input`, `by_metric` or functions of the input: the comparison is repeated on each
            slice.
        alpha: The chance of calling equal systems different that is accepted, over all metrics and candidates.
        lower_is_better: Metrics of which less is better, besides latency, tokens and cost.
        bounds: Ranges of metrics where they are not 0 to 1; None for a metric without limits. Unless told otherwise, a
            metric that was never seen outside 0 to 1 is taken to lie there.
        test: "exact" for McNemar's exact test in place of the mid-p one.
        seed: Of the random draws, so that the same data always give the same answer.
    """
    example = 'compare its experiments, as in compare(report["plain"], report["terse"])'
    parts = [one_experiment(side, example) for side in (baseline, *candidates)]
    if len(parts) < 2:
        raise ConfigurationError("a comparison needs a baseline and at least one candidate")
    if not 0 < alpha < 1:
        raise ConfigurationError(f"alpha is the accepted chance of a false alarm, such as 0.05, not {alpha}")
    wanted = (metrics,) if isinstance(metrics, str) else metrics
    columns = read_sides(parts, wanted, cluster, slice_by)
    lower = (lower_is_better,) if isinstance(lower_is_better, str) else lower_is_better
    settings = Settings(alpha, 0.8, frozenset((*lower, *COSTS)), bounds, test, None, seed)
    return compare_columns(columns[0], columns[1:], metrics=wanted, slice_by=slice_by, settings=settings, reports=parts)


def read_sides(
    parts: Sequence[ExperimentReport],
    metrics: Sequence[str] | None,
    cluster: str | None,
    slice_by: SliceBy | Sequence[SliceBy],
) -> list[Columns]:
    """The columns of a baseline and its candidates; how samples are grouped is read once, from the baseline."""
    needed = needs(settled(slice_by))
    read = None if metrics is None else {*metrics, *needed.metrics, PASSED}
    return [
        read_columns(
            part,
            metrics=read,
            # A choice made here is the baseline's to answer for; "" keeps the candidates' own clusters out of it.
            cluster=cluster if place == 0 or cluster is None else "",
            keys=needed.keys if place == 0 else (),
            inputs=needed.inputs if place == 0 else EMPTY,
            name=name,
        ).looked_at()
        for place, (part, name) in enumerate(zip(parts, side_names(parts), strict=True))
    ]


def side_names(parts: Sequence[ExperimentReport]) -> list[str]:
    """What to call each side: the experiment, with the run's number or id where that is not enough."""
    choices = (
        [part.name for part in parts],
        [f"{part.name} #{part.run.number}" for part in parts],
        [f"{part.name} of {part.run.run_id}" for part in parts],
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
    settings: Settings | None = None,
    reports: Sequence[ExperimentReport] = (),
) -> Comparison:
    """`compare` for columns: a pure function of numbers, but for `reports`, which say where results can be read."""
    settings = settings or Settings()
    if metrics is None or metrics is DEFAULT_METRICS:
        baseline, *candidates = _with_rewards([baseline, *candidates])
    names = _known_metrics([baseline, *candidates], metrics)
    ways = settled(slice_by)
    joined = [pair(candidate, baseline) for candidate in candidates]
    whole = [_Compared(pairs, names, settings) for pairs in joined]
    sliced = [
        [(part, _Compared(pairs.take(part.rows), names, settings, scored_too=False)) for part in slices]
        for pairs in joined
        for slices in [list(cut(ways, pairs.baseline, pairs.candidate))]
    ]
    # Holm, not Benjamini and Hochberg: one false alarm here blocks a release. A list of slices is read through.
    tests = adjust([found for one in whole for found in one.found()], "holm")
    adjust([found for one in whole for found in one.found_scored()], "holm")
    adjust([found for parts in sliced for _, one in parts for found in one.found()], "bh")
    compared: list[CandidateComparison] = []
    sources: list[tuple[FlippedSamples, FlippedSamples]] = []
    for place, (side, one, parts) in enumerate(zip(candidates, whole, sliced, strict=True)):
        made, gained, lost = _candidate(side, baseline, one, parts, settings, reports[place + 1] if reports else None)
        compared.append(made)
        if reports:
            sources.append(
                (
                    FlippedSamples(gained, reports[0], reports[place + 1]),
                    FlippedSamples(lost, reports[0], reports[place + 1]),
                )
            )
    return Comparison(
        baseline=_side(baseline, reports[0] if reports else None),
        candidates=tuple(compared),
        alpha=settings.alpha,
        tests=tests,
        warnings=tuple(about_runs(reports)),
        sources=tuple(sources),
    )


@dataclass(slots=True)
class _Metric:
    """One metric of one pair of sides: its numbers, what they say, and the earlier metric they are the same as."""

    scores: Scores
    found: Found
    scored: Found
    same_as: str | None


class _Compared:
    """All metrics of one pair of sides."""

    def __init__(self, pairs: Pairs, names: Sequence[str], settings: Settings, *, scored_too: bool = True) -> None:
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
            if failures and scored_too and name not in COSTS:
                scored = difference(scores_of(pairs, name, "scored", settings), pairs, settings)
            self.metrics.append(_Metric(scores, Found(found), Found(scored), None))

    def found(self) -> Iterator[Found]:
        """The distinct tests."""
        return (one.found for one in self.metrics if one.same_as is None)

    def found_scored(self) -> Iterator[Found]:
        """The distinct tests on what was scored on both sides."""
        return (one.scored for one in self.metrics if one.same_as is None)


def _candidate(
    side: Columns,
    baseline: Columns,
    one: _Compared,
    parts: Sequence[tuple[Slice, _Compared]],
    settings: Settings,
    report: ExperimentReport | None,
) -> tuple[CandidateComparison, list[str], list[str]]:
    names = (side.name, baseline.name)
    metrics = tuple(_record(metric, names, settings) for metric in one.metrics)
    slices = tuple(
        SliceComparison(
            part.name,
            part.by,
            int(np.count_nonzero(part.rows)),
            tuple(_record(metric, names, settings, sliced=True) for metric in compared.metrics),
        )
        for part, compared in parts
    )
    change = changes(one.pairs)
    order = np.argsort(-np.abs(change), kind="stable")
    gained, lost = (
        [one.pairs.baseline.ids[place] for place in order[(sign * change[order]) > 0].tolist()] for sign in (1, -1)
    )
    about = _side(side, report)
    share = max(one.pairs.missing_share, about.missing_share, _side(baseline, None).missing_share)
    made = CandidateComparison(
        candidate=about,
        matched=one.pairs.matched,
        only_baseline=one.pairs.only_baseline,
        only_candidate=one.pairs.only_candidate,
        missing_share=share,
        metrics=metrics,
        slices=slices,
        flips=Flips(tuple(gained[:SHOWN]), tuple(lost[:SHOWN]), len(gained), len(lost)),
        warnings=tuple(about_pairs(one.pairs, metrics, slices, names, share)),
    )
    return made, gained, lost


def _record(metric: _Metric, names: tuple[str, str], settings: Settings, *, sliced: bool = False) -> MetricComparison:
    name, found = metric.scores.metric, metric.found.difference
    lower = settings.lower(name)
    verdict = verdict_of(metric.found, settings, lower)
    # What one slice among many could show depends on the others; its own reach is the honest figure.
    tests = 1 if sliced else metric.found.tests
    mde = detectable(found, tests, settings, metric.scores.bounds)
    needed = samples_needed(found, tests, settings)
    notes = [*found.notes, *([found.reason] if found.reason else [])]
    if metric.scores.left_out:
        failures = counted(metric.scores.left_out, "failed trial")
        notes.append(f"{name} has no worst value, so {failures} could not be counted in it.")
    if not found.n and (absent := _absent(metric.scores, names)):
        notes = [absent]
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
        sentence=sentence(name, names, metric.found, verdict, mde, needed, notes, settings),
        scored_only=None if sliced else _scored_only(metric.scored, settings, lower),
        same_as=metric.same_as,
        notes=tuple(notes),
    )


def _scored_only(found: Found, settings: Settings, lower: bool) -> ScoredOnly:
    one: PairedDifference = found.difference
    return ScoredOnly(
        one.n,
        _plain(one.difference),
        None if one.interval is None else float(one.interval.low),
        None if one.interval is None else float(one.interval.high),
        _plain(one.p_value),
        verdict_of(found, settings, lower),
    )


def _absent(scores: Scores, names: tuple[str, str]) -> str | None:
    """Why there is no pair at all, where one side has nothing in this metric."""
    empty = [not side.counts.any() for side in (scores.candidate, scores.baseline)]
    if all(empty):
        return f"neither {names[0]} nor {names[1]} has a trial that says anything about {scores.metric}."
    for name, nothing in zip(names, empty, strict=True):
        if nothing:
            return f"no trial of {name} says anything about {scores.metric}."
    return None


def _with_rewards(sides: Sequence[Columns]) -> list[Columns]:
    """The sides, all of them with rewards if one has any that differ from its values, else none."""
    values = [side.values for side in sides]
    differ = any(REWARD in one and not np.array_equal(one[REWARD], one[VALUE], equal_nan=True) for one in values)
    made = []
    for side, one in zip(sides, values, strict=True):
        others = {name: array for name, array in one.items() if name != REWARD}
        own = {REWARD: one.get(REWARD, one[VALUE])} if differ and VALUE in one else {}
        made.append(replace(side, values={**others, **own}))
    return made


def _known_metrics(sides: Sequence[Columns], metrics: Sequence[str] | None) -> list[str]:
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
        if name not in known and name not in (PASSED, VALUE, *COSTS):
            have = ", ".join(sorted({PASSED, VALUE, *known}))
            raise ConfigurationError(f"no side has a metric {name!r}; there are {have}")
    return names


def _side(columns: Columns, report: ExperimentReport | None) -> Side:
    return Side(
        name=columns.name,
        run_id="" if report is None else report.run.run_id,
        experiment=columns.name if report is None else report.name,
        samples=columns.planned,
        trials=columns.trials,
        scored=columns.count(SCORED),
        failures=columns.count(FAILED),
        missing=columns.missing,
    )


def _plain(value: float | None) -> float | None:
    return None if value is None else float(value)
