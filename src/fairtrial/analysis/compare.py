"""Candidates against a baseline on the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairtrial.analysis.caveats import about_pairs, about_runs
from fairtrial.analysis.columns import Columns, read_columns
from fairtrial.analysis.comparison import (
    SHOWN,
    CandidateComparison,
    ComparisonRecord,
    FlippedSamples,
    Flips,
    MetricComparison,
    ScoredOnly,
    Side,
    SliceComparison,
)
from fairtrial.analysis.metrics import BUILT_IN, COSTS, FAILED, PASSED, REWARD, SCORED, VALUE
from fairtrial.analysis.pairing import ComparisonSettings, Pairs, Scores, changes, difference, pair, scores_of
from fairtrial.analysis.slices import SliceBy
from fairtrial.analysis.slicing import Slice, cut, needs, normalize_slices
from fairtrial.analysis.source import ExperimentSource
from fairtrial.analysis.verdicts import (
    AdjustedDifference,
    adjust,
    detectable,
    samples_needed,
    sentence,
    verdict_of,
)
from fairtrial.errors import ConfigurationError
from fairtrial.formatting import count
from fairtrial.frozen import EMPTY
from fairtrial.stats import PairedDifference

DEFAULT_METRICS = (PASSED, VALUE, REWARD)
"""What is compared unless metrics are named: rewards only if those of one side differ from its values."""


def read_sides(
    sources: Sequence[ExperimentSource],
    metrics: Sequence[str] | None,
    cluster: str | None,
    slice_by: SliceBy | Sequence[SliceBy],
) -> list[Columns]:
    """The columns of a baseline and its candidates; how samples are grouped is read once, from the baseline."""
    needed = needs(normalize_slices(slice_by))
    read = None if metrics is None else {*metrics, *needed.metrics, PASSED}
    return [
        read_columns(
            source,
            metrics=read,
            # A choice made here is the baseline's to answer for; "" keeps the candidates' own clusters out of it.
            cluster=cluster if place == 0 or cluster is None else "",
            keys=needed.keys if place == 0 else (),
            inputs=needed.inputs if place == 0 else EMPTY,
            name=name,
        ).looked_at()
        for place, (source, name) in enumerate(zip(sources, side_names(sources), strict=True))
    ]


def side_names(sources: Sequence[ExperimentSource]) -> list[str]:
    """What to call each side: the experiment, with the run's number or id where that is not enough."""
    choices = (
        [source.name for source in sources],
        [f"{source.name} #{source.run.number}" for source in sources],
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
) -> ComparisonRecord:
    """Compare columns: a pure function of numbers, but for `sources`, which say where results can be read."""
    settings = settings or ComparisonSettings()
    if metrics is None or metrics is DEFAULT_METRICS:
        baseline, *candidates = _with_rewards([baseline, *candidates])
    names = _known_metrics([baseline, *candidates], metrics)
    ways = normalize_slices(slice_by)
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
    flipped: list[tuple[FlippedSamples, FlippedSamples]] = []
    for place, (side, one, parts) in enumerate(zip(candidates, whole, sliced, strict=True)):
        made, gained, lost = _candidate(side, baseline, one, parts, settings, sources[place + 1] if sources else None)
        compared.append(made)
        if sources:
            flipped.append(
                (
                    FlippedSamples(gained, sources[0], sources[place + 1]),
                    FlippedSamples(lost, sources[0], sources[place + 1]),
                )
            )
    return ComparisonRecord(
        baseline=_side(baseline, sources[0] if sources else None),
        candidates=tuple(compared),
        alpha=settings.alpha,
        tests=tests,
        warnings=tuple(about_runs(sources)),
        sources=tuple(flipped),
    )


@dataclass(slots=True)
class _Metric:
    """One metric of one pair of sides: its numbers, what they say, and the earlier metric they are the same as."""

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
            if failures and scored_too and name not in COSTS:
                scored = difference(scores_of(pairs, name, "scored", settings), pairs, settings)
            self.metrics.append(_Metric(scores, AdjustedDifference(found), AdjustedDifference(scored), None))

    def found(self) -> Iterator[AdjustedDifference]:
        """The distinct tests."""
        return (one.found for one in self.metrics if one.same_as is None)

    def found_scored(self) -> Iterator[AdjustedDifference]:
        """The distinct tests on what was scored on both sides."""
        return (one.scored for one in self.metrics if one.same_as is None)


def _candidate(
    side: Columns,
    baseline: Columns,
    one: _Compared,
    parts: Sequence[tuple[Slice, _Compared]],
    settings: ComparisonSettings,
    source: ExperimentSource | None,
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
        flips=Flips(tuple(gained[:SHOWN]), tuple(lost[:SHOWN]), len(gained), len(lost)),
        warnings=tuple(about_pairs(one.pairs, metrics, slices, names, share)),
    )
    return made, gained, lost


def _record(
    metric: _Metric, names: tuple[str, str], settings: ComparisonSettings, *, sliced: bool = False
) -> MetricComparison:
    name, found = metric.scores.metric, metric.found.difference
    lower = settings.lower(name)
    verdict = verdict_of(metric.found, settings, lower)
    # What one slice among many could show depends on the others; its own reach is the honest figure.
    tests = 1 if sliced else metric.found.tests
    mde = detectable(found, tests, settings, metric.scores.bounds)
    needed = samples_needed(found, tests, settings)
    notes = [*found.notes, *([found.reason] if found.reason else [])]
    if metric.scores.left_out:
        failures = count(metric.scores.left_out, "failed trial")
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


def _scored_only(found: AdjustedDifference, settings: ComparisonSettings, lower: bool) -> ScoredOnly:
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
