"""Whether a figure of a suite's daily runs has dropped for good, with at most one false alarm in a promised time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime

import numpy as np

from fairtrial.base.formatting import count, mean_text
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.metrics import PASSED, ExperimentSource, Range, is_verdict, run_totals
from fairtrial.reports.figures.slicing import SMALL_SLICE
from fairtrial.reports.watch.changes import find_changes
from fairtrial.reports.watch.days import (
    ALL,
    ANCHOR,
    DailyScores,
    ScoredDay,
    WatchedMetric,
    bound_of,
    can_be_watched,
    day_of,
    judge_reader,
    mean_and_count,
    read_days,
    runs_to_watch,
    sums,
    system_reader,
    weights_of,
)
from fairtrial.reports.watch.watched import DetectableDrop, ReferencePeriod, WatchAlarm, WatchedDay, WatchedFigure
from fairtrial.stats.drift import FEWEST_REFERENCE, REFERENCE_RISK, DriftDetector, change_days, shared
from fairtrial.store.protocol import RunRecord, RunStore

EVERY = 1_000.0
"""At most one false alarm in this number of days, on average."""
REFERENCE = 1_000
"""The number of scores of the reference."""
FOUND = (0.05, 0.1)
"""The drops whose delay is reported, as shares of the range."""
LEVEL = 0.95
_WEEK = 7


def watch_alarm(
    store: RunStore,
    suite: str,
    *,
    experiment: str | None = None,
    metric: str = PASSED,
    every: float = EVERY,
    reference: int = REFERENCE,
    by: str | None = None,
    anchors: str | None = None,
    since: str = "",
    bounds: Mapping[str, Range | None] = EMPTY,
    now: float | None = None,
) -> WatchAlarm:
    """Decide whether a metric of a suite's daily runs has dropped for good. Days are those of UTC.

    The first days, until they have `reference` scores, are the reference. Every day after them adds evidence
    (`stats.drift`). Without a change, an alarm comes no more often than once in `every` days on average, over
    references and over days.

    Args:
        store: The store of the runs.
        suite: The suite; of its runs the finished ones count, without adaptive ones. Of imported
            runs, such as recorded traces, the newest rescoring counts, on the day on which they were recorded.
        experiment: The experiment; needed if there are several.
        metric: "passed", "value", or a metric with a range.
        every: At most one false alarm in this number of days, for the system and for the judge each.
        reference: Number of scores of the reference, at least 200.
        by: A metadata key whose slices are watched too; they share the false alarms.
        anchors: The suite whose samples have the metadata key "anchor" (true: people say it should pass, or false); by
            default this one. Anchor trials show whether the judge drifts, and are left out of the metric.
        since: The first day that counts, as "2026-11-17": after an alarm that was dealt with.
        bounds: Ranges of metrics that do not declare theirs.
        now: The present time, to say how old the newest run is.

    Raises:
        ConfigurationError: the suite has no runs, or the settings do not fit it.
    """
    since = _checked_day(every, reference, since)
    every_run = store.runs(suite=suite)
    runs = runs_to_watch(every_run)
    name = _experiment(runs, suite, experiment)
    newest = next((run for run in runs if can_be_watched(run) and name in run.experiments), None)
    watched = WatchedMetric(metric)
    if newest is not None:
        columns = read_columns(ExperimentSource(store, newest, name))
        watched = WatchedMetric.declared(metric, columns, bounds)
    keys = (ANCHOR,) if by is None else (ANCHOR, by)
    names = tuple(dict.fromkeys((metric, PASSED)))
    scores, anchored = read_days(
        store, runs, name, (system_reader(watched, by), judge_reader), metrics=names, keys=keys, since=since
    )
    if anchors is not None and anchors != suite:
        anchored = _read_anchors(store, anchors, name, since)
    if by is not None and scores.days and not any(len(day.scores) > 1 for day in scores.days):
        raise ConfigurationError(f"no sample of suite {suite!r} has {by!r} in its metadata: there are no slices")
    system = _watch(metric, scores, watched, every, reference)
    judge = _watch_judge(anchored, anchors, every)
    alarms = [one for one in (system, judge) if one is not None and one.status == "alarm"]
    changes = find_changes(store, scores.days, name, system) if system.status == "alarm" else ()
    return WatchAlarm(
        suite=suite,
        experiment=name,
        metric=metric,
        status="alarm" if alarms else system.status,
        every=every,
        system=system,
        judge=judge,
        changes=changes,
        remarks=(
            *scores.remarks,
            *_deleted(every_run, since),
            *_remarks(store, scores, system, time.time() if now is None else now),
        ),
    )


def _checked_day(every: float, reference: int, since: str) -> str:
    """Return the first day in its usual form; raises if a setting is out of range."""
    if not 1 <= every < math.inf:
        raise ConfigurationError(f"every must be at least 1 day (got {every:g})")
    if reference < FEWEST_REFERENCE:
        raise ConfigurationError(f"reference must be at least {FEWEST_REFERENCE} scores (got {reference})")
    try:
        return date.fromisoformat(since).isoformat() if since else ""
    except ValueError:
        raise ConfigurationError(f"since must be a day such as 2026-11-17 (got {since!r})") from None


def _experiment(runs: Sequence[RunRecord], suite: str, experiment: str | None) -> str:
    if not runs:
        raise ConfigurationError(f"there is no run of suite {suite!r} in this store")
    names = runs[0].experiments
    if experiment is None:
        if len(names) > 1:
            choices = " or ".join(f"{suite}:{name}" for name in names)
            raise ConfigurationError(f"suite {suite!r} has {len(names)} experiments\nchoose one: {choices}")
        return names[0]
    if not any(experiment in run.experiments for run in runs):
        raise ConfigurationError(f"no run of suite {suite!r} has an experiment {experiment!r}")
    return experiment


def _read_anchors(store: RunStore, suite: str, experiment: str, since: str) -> DailyScores:
    runs = runs_to_watch(store.runs(suite=suite))
    same = bool(runs) and experiment in runs[0].experiments
    name = _experiment(runs, suite, experiment if same else None)
    return read_days(store, runs, name, (judge_reader,), metrics=(PASSED,), keys=(ANCHOR,), since=since)[0]


def _watch_judge(scores: DailyScores, anchors: str | None, every: float) -> WatchedFigure | None:
    """Watch the agreement of the judge with people; None if no sample is an anchor."""
    if scores.days:
        name = "agreement of the judge with people"
        return _watch(name, scores, WatchedMetric(PASSED), every, FEWEST_REFERENCE)
    if anchors is not None:
        raise ConfigurationError(
            f"no sample of suite {anchors!r} has true or false as metadata {ANCHOR!r}: it has no anchors"
        )
    return None


def _watch(name: str, daily: DailyScores, metric: WatchedMetric, every: float, reference: int) -> WatchedFigure:
    """Compare the days after the reference with it, until an alarm."""
    reached = np.cumsum([0, *(day.scores[ALL].shape[1] for day in daily.days)])
    total = int(reached[-1])
    if total < reference:
        have = "is no score" if not total else f"are {count(total, 'score')} in {count(len(daily.days), 'day')}"
        return WatchedFigure(name, "too little data", f"the reference needs {reference:,} scores: there {have}", total)
    needed = int(np.searchsorted(reached, reference))
    first, later, total = daily.days[:needed], daily.days[needed:], int(reached[needed])
    sizes = {stream: mean_and_count(first, stream)[1] for stream in dict.fromkeys(k for d in first for k in d.scores)}
    later_slices = dict.fromkeys(stream for one in daily.days for stream in one.scores if stream != ALL)
    streams = [ALL, *(stream for stream in later_slices if sizes.get(stream, 0) >= SMALL_SLICE)]
    risks = REFERENCE_RISK * shared(len(streams))
    bounds = np.array([bound_of(first, stream, risk) for stream, risk in zip(streams, risks, strict=True)])
    period = ReferencePeriod(
        first[0].day,
        first[-1].day,
        len(first),
        total,
        metric.value(mean_and_count(first, ALL)[0]),
        metric.value(float(bounds[0])),
    )
    figure = WatchedFigure(
        name,
        "too little data",
        f"there is no day after the reference of {period.first} to {period.last}",
        total,
        period,
        detectable=_detectable(DriftDetector(bounds, every=every), daily.days),
        watched_slices=tuple(streams[1:]),
        small_slices=tuple(stream for stream in later_slices if stream not in streams),
    )
    if not later:
        return figure
    detector = DriftDetector(bounds, every=every)
    seen: list[WatchedDay] = []
    for day in later:
        detector.add_day(*day.tally(streams))
        evidence, (mean, number) = float(detector.share), mean_and_count([day], ALL)
        seen.append(WatchedDay(day.day, number, metric.value(mean), evidence))
        if evidence >= 1:
            break
    scores = total + sum(one.scores for one in seen)
    figure = replace(figure, days=tuple(seen), evidence=seen[-1].evidence, scores=scores)
    if seen[-1].evidence < 1:
        return replace(figure, status="quiet", sentence=_quiet(figure, every))
    stream = streams[int(np.argmax(detector.evidence))]
    return _alarm(figure, first, later[: len(seen)], stream, metric)


def _quiet(figure: WatchedFigure, every: float) -> str:
    days = count(len(figure.days), "day")
    needed = count(round(every), "day")
    return (
        f"no lasting change of {figure.name} for the worse in {days} up to {figure.days[-1].day}; without one, an "
        f"alarm comes at most once in {needed} on average"
    )


def _alarm(
    figure: WatchedFigure, first: Sequence[ScoredDay], seen: Sequence[ScoredDay], stream: str, metric: WatchedMetric
) -> WatchedFigure:
    """Name the likely day of the change, with its range."""
    before, before_scores = mean_and_count(first, stream)
    totals, counts = np.array(list(sums(seen, stream))).T
    likely, low, high = change_days(totals, counts, (before * before_scores, float(before_scores)), level=LEVEL)
    after, after_scores = mean_and_count(seen[likely:], stream)
    percent = is_verdict(metric.name)
    day = [seen[place].day for place in (likely, low, high)]
    where = "" if stream == ALL else f" where {stream}"
    sentence = (
        f"{figure.name}{where} has {'risen' if metric.lower else 'dropped'}, likely since {day[0]} (95% range {day[1]} "
        f"to {day[2]}): {mean_text(metric.value(after), percent=percent)} of {count(after_scores, 'score')} from then "
        f"to {seen[-1].day}, {mean_text(metric.value(before), percent=percent)} in the reference"
    )
    return replace(
        figure,
        status="alarm",
        sentence=sentence,
        alarm_on=seen[-1].day,
        slice=None if stream == ALL else stream,
        likely=day[0],
        earliest=day[1],
        latest=day[2],
        since=metric.value(after),
        since_scores=after_scores,
    )


def _detectable(detector: DriftDetector, days: Sequence[ScoredDay]) -> tuple[DetectableDrop, ...]:
    tallies = [day.tally([ALL]) for day in days]
    values, shares = (np.concatenate([tally[place] for tally in tallies]) for place in (0, 2))
    counts = np.concatenate([counts[0] for _, counts, _ in tallies]) / len(days)
    found = []
    for drop in FOUND:
        needed = detector.days_to_find(drop, values, counts, shares)
        found.append(DetectableDrop(drop, math.ceil(needed) if math.isfinite(needed) else None))
    return tuple(found)


def _deleted(runs: Sequence[RunRecord], since: str) -> Iterator[str]:
    """Say that the first runs are missing, as after `store prune`: the reference then moves to later days."""
    first = min(runs, key=lambda one: one.number)
    if first.number > 1 and min(map(day_of, runs)) > since:
        yield (
            f"Runs before {first.name} are not in this store: if they were deleted, the reference was another one "
            "before, and an alarm of that time is forgotten. --since DAY keeps a reference whose runs are kept."
        )


def _remarks(store: RunStore, daily: DailyScores, system: WatchedFigure, now: float) -> Iterator[str]:
    if daily.days:
        run = daily.days[-1].runs[-1]
        cached = sum(one.cache_hits for one in run_totals(store, run))
        if cached:
            calls = count(cached, "call")
            yield f"Of the newest run, the response cache answered {calls}: an old reply shows no change."
        last = date.fromisoformat(daily.days[-1].day)
        age = (datetime.fromtimestamp(now, UTC).date() - last).days
        if age > 1:
            yield f"The newest day with scores is {last}, {age:,} days ago: nothing was watched since."
    if any(weights_of(day.scores[ALL]) is not None for day in daily.days):
        yield (
            "Traces were sampled at several rates: each score counts by its weight, and the bets on a day with other "
            "weights are smaller, which finds a drop later."
        )
    unscored = sum(day.unscored for day in daily.days)
    if unscored:
        yield f"{count(unscored, 'trial')} could not be scored and {'is' if unscored == 1 else 'are'} left out."
    period = system.reference
    if period is not None and not daily.replayed and period.days < _WEEK:
        yield (
            f"The reference has {count(period.days, 'day')} of changing samples: a day of the week that differs from "
            "them looks like a change."
        )
    if system.small_slices:
        few = f"fewer than {SMALL_SLICE} scores in the reference"
        yield f"{count(len(system.small_slices), 'slice')} not watched, with {few}."
