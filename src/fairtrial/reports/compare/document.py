"""The document of a comparison: verdict, differences with intervals, and flipped samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from fairtrial.base import formatting
from fairtrial.reports.figures.figures import read_figures
from fairtrial.reports.figures.metrics import ExperimentSource, is_ratio, is_verdict, run_totals, verdict_column
from fairtrial.reports.figures.summaries import TotalsAnalysis
from fairtrial.reports.render import document, plots
from fairtrial.reports.render.safe_text import sample_of, sample_title, shown
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.reports.compare.comparison import (
        CandidateComparison,
        Comparison,
        Direction,
        Flip,
        FlippedSamples,
        MetricComparison,
        SliceComparison,
    )

TONES: dict[str, document.Tone] = {
    "better": "good",
    "worse": "bad",
    "higher": "",
    "lower": "",
    "as good as": "good",
    "no detectable difference": "",
    "unknown": "unsure",
}
SHORT = {
    "better": "better",
    "worse": "worse",
    "higher": "higher",
    "lower": "lower",
    "as good as": "as good",
    "no detectable difference": "open",
    "unknown": "-",
}
"""A verdict as a table has room for it."""
_SPOKEN_METRICS, _SPOKEN_CANDIDATES = 3, 2
SHOWN_REPEATS = 3
_LISTED = 6


def comparison_document(comparison: Comparison, cases: int, *, detailed: bool = False) -> document.Document:
    """Return the document, with at most `cases` flipped samples in each direction; pages show every detail."""
    detailed = detailed or cases > 0
    candidates = comparison.candidates
    is_single = len(candidates) == 1
    blocks: list[document.Block] = [*_verdicts(comparison, detailed=detailed), _differences(comparison)]
    if detailed:
        blocks.append(_tests(comparison))
    slices = [_slices(candidate, several=not is_single) for candidate in candidates if candidate.slices]
    blocks += slices
    if cases:
        blocks += _plots(comparison)
    if detailed:
        blocks.append(_sides(comparison))
    blocks.append(document.Remarks(tuple(comparison_remarks(comparison, detailed=detailed))))
    if cases and comparison.sources:
        blocks += _flips(comparison, cases)
    return document.Document(_title(comparison), tuple(_about(comparison)), tuple(blocks))


def _title(comparison: Comparison) -> str:
    """Return the title: candidate against baseline, with their runs; a run that both sides share is named once."""
    sides = [comparison.baseline, *(candidate.candidate for candidate in comparison.candidates)]
    names, prefix = [side.name for side in sides], ""
    if comparison.sources:
        sources = comparison.sources
        if len({source.run.run_id for source in sources}) == 1:
            prefix = f"{sources[0].run.name}: "
        else:
            names = [f"{source.run.name}:{source.name}" for source in sources]
    candidates = names[1] if len(names) == 2 else f"{len(names) - 1} candidates"
    return f"{prefix}{candidates} against {names[0]}"


def _about(comparison: Comparison) -> Iterator[str]:
    """Yield whether it is as planned, and how many samples were matched; one line if all candidates have as many."""
    if comparison.plan is not None:
        yield comparison.plan.sentence
    matched = [_matched(candidate) for candidate in comparison.candidates]
    if len(set(matched)) == 1:
        yield matched[0]
        return
    yield from (f"{candidate.name}: {text}" for candidate, text in zip(comparison.candidates, matched, strict=True))


def _shown(candidate: CandidateComparison) -> list[MetricComparison]:
    """Return the metrics, without those that have the same numbers as another."""
    return [metric for metric in candidate.metrics if metric.same_as is None]


def mean_of(metric: str, value: float | None) -> str:
    """Format a mean for a table: pass rates in percent."""
    return formatting.rate(value) if is_verdict(metric) else formatting.number(value)


def span(metric: str, low: float | None, high: float | None) -> str:
    """Format an interval of differences."""
    if low is None or high is None:
        return formatting.UNDEFINED
    return f"{change(metric, low)} to {change(metric, high)}"


def change(metric: str, value: float | None) -> str:
    """Format a difference in a metric: in points, in percent of the baseline, or as a number."""
    if is_ratio(metric):
        return formatting.change_text(value, percent=False, relative=True)
    return formatting.signed(value, percent=is_verdict(metric))


def _matched(candidate: CandidateComparison) -> str:
    left_out = candidate.only_baseline + candidate.only_candidate
    unmatched = (
        f"{candidate.only_baseline:,} only in the baseline and {candidate.only_candidate:,} only in the candidate "
        "are left out"
        if left_out
        else "none is on one side only"
    )
    changed = candidate.changed
    edited = "" if changed is None else f"; {changed.inputs + changed.expected:,} changed between the sides"
    return f"{formatting.count(candidate.matched, 'sample')} on both sides; {unmatched}{edited}"


def _verdicts(comparison: Comparison, *, detailed: bool) -> Iterator[document.Conclusion]:
    """A sentence for each verdict. Of many metrics the first and those that differ; of many candidates, the open ones
    of a metric share a sentence unless all details are asked for.
    """
    together = len(comparison.candidates) > _SPOKEN_CANDIDATES and not detailed
    undecided: dict[str, list[str]] = {}
    for candidate in comparison.candidates:
        distinct = _shown(candidate)
        for place, metric in enumerate(distinct):
            differs = metric.verdict in ("better", "worse", "higher", "lower")
            if together and metric.verdict == "no detectable difference":
                undecided.setdefault(metric.metric, []).append(candidate.name)
            elif differs or place == 0 or len(distinct) <= _SPOKEN_METRICS:
                sentence = metric.sentence.removeprefix(f"{metric.metric}: ")
                yield document.Conclusion(metric.metric, sentence, TONES[metric.verdict])
    for name, candidates in undecided.items():
        text = f"no detectable difference between {comparison.baseline.name} and {', '.join(candidates)}."
        yield document.Conclusion(name, text, TONES["no detectable difference"])


def headlines(comparison: Comparison, metric: str) -> tuple[document.Conclusion, ...]:
    """Return the verdicts on one metric in one or two sentences, as a report shows them.

    It is the primary metric of a plan, if there is one. With up to two candidates these are the first sentences of the
    comparison; more are listed by their verdict.
    """
    if comparison.plan is not None:
        metric = comparison.plan.primary
    found = [(candidate.name, _distinct(candidate, metric)) for candidate in comparison.candidates]
    if len(found) <= _SPOKEN_CANDIDATES:
        return tuple(
            document.Conclusion(one.metric, one.headline.removeprefix(f"{one.metric}: "), TONES[one.verdict])
            for _, one in found
        )
    by_verdict: dict[str, list[tuple[str, MetricComparison]]] = {}
    for name, one in found:
        by_verdict.setdefault(one.verdict, []).append((name, one))
    parts = [_together(verdict, by_verdict[verdict]) for verdict in TONES if verdict in by_verdict]
    is_primary = comparison.plan is not None and metric == comparison.plan.primary
    tests = count_tests(comparison)[0 if is_primary else 1]
    adjusted = f" p-values are adjusted for {tests} tests." if tests > 1 else ""
    tones = {TONES[verdict] for verdict in by_verdict}
    text = f"against {comparison.baseline.name}, {'; '.join(parts)}.{adjusted}"
    return (document.Conclusion(found[0][1].metric, text, tones.pop() if len(tones) == 1 else ""),)


def _distinct(candidate: CandidateComparison, metric: str) -> MetricComparison:
    """Return the comparison of a metric, or of the one with the same numbers."""
    one = candidate[metric] if any(one.metric == metric for one in candidate.metrics) else candidate.metrics[0]
    return one if one.same_as is None else candidate[one.same_as]


def _together(verdict: str, found: list[tuple[str, MetricComparison]]) -> str:
    """Return the candidates with one verdict, those that differ with their figures."""
    names = [name for name, _ in found]
    if verdict in ("better", "worse", "higher", "lower"):
        names = [
            f"{name} {change(one.metric, one.difference)}{' points' if is_verdict(one.metric) else ''} "
            f"({span(one.metric, one.low, one.high)}, {_p(one)})"
            for name, one in found
        ]
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    word = "no verdict" if verdict == "unknown" else verdict
    return f"{word}: {', '.join(names[:_LISTED])}{more}"


def _p(one: MetricComparison) -> str:
    return formatting.p_text(one.p if one.adjusted_p is None else one.adjusted_p)


def _rows(
    comparison: Comparison, row: Iterable[tuple[CandidateComparison, tuple[document.Content, ...]]]
) -> tuple[tuple[document.Content, ...] | document.Section, ...]:
    """Yield rows, under the name of their candidate if there are several."""
    rows: list[tuple[document.Content, ...] | document.Section] = []
    current: CandidateComparison | None = None
    for candidate, cells in row:
        if len(comparison.candidates) > 1 and candidate is not current:
            rows.append(document.Section(candidate.name))
            current = candidate
        rows.append(cells)
    return tuple(rows)


def _differences(comparison: Comparison) -> document.Table:
    unit = any(is_verdict(metric.metric) for candidate in comparison.candidates for metric in candidate.metrics)
    pairs = [(candidate, metric) for candidate in comparison.candidates for metric in _shown(candidate)]
    undeclared = all(metric.lower_is_better is None for _, metric in pairs)
    columns = (
        document.Column("metric", "left", name=True),
        document.Column("baseline"),
        document.Column("candidate"),
        document.Column("change"),
        document.Column(f"{formatting.level(1 - comparison.alpha)} interval"),
        document.Column("verdict", "left"),
        document.Column("higher" if undeclared else "won", optional=True),
        document.Column("lower" if undeclared else "lost", optional=True),
        document.Column("tied", optional=True),
        document.Column("below and above 0", "left", bar=True),
    )
    scale = _scale(metric for _, metric in pairs)
    rows = [
        (
            candidate,
            (
                metric.metric,
                mean_of(metric.metric, metric.baseline),
                mean_of(metric.metric, metric.candidate),
                document.Cell(change(metric.metric, metric.difference), TONES[metric.verdict]),
                span(metric.metric, metric.low, metric.high),
                document.Cell(SHORT[metric.verdict], TONES[metric.verdict]),
                *_wins_and_losses(metric, named=not undeclared),
                f"{metric.ties:,}",
                _bar(metric, scale),
            ),
        )
        for candidate, metric in pairs
    ]
    caption = "Differences, pass rates in percentage points" if unit else "Differences"
    return document.Table(caption, columns, _rows(comparison, rows))


def _wins_and_losses(metric: MetricComparison, *, named: bool) -> tuple[str, str]:
    """Format the numbers of samples with a higher and a lower value.

    Without a declared direction these are no wins and losses; in columns for those, they are `named`.
    """
    if named and metric.lower_is_better is None:
        return f"{metric.wins:,} higher", f"{metric.losses:,} lower"
    return f"{metric.wins:,}", f"{metric.losses:,}"


def _in_unit(metric: MetricComparison) -> bool:
    return metric.low is not None and metric.high is not None and -1 <= metric.low <= metric.high <= 1


def _scale(metrics: Iterable[MetricComparison]) -> float:
    """Return the half-width of a common axis, so that bars can be compared."""
    ends = [abs(end) for metric in metrics if _in_unit(metric) for end in (metric.low, metric.high) if end is not None]
    return max(ends, default=0.0) or 1.0


def _bar(metric: MetricComparison, scale: float) -> document.Bar | None:
    if metric.low is None or metric.high is None or metric.difference is None or not _in_unit(metric):
        return None
    return document.Bar(metric.low, metric.difference, metric.high, -scale, scale, mark=0.0)


def _tests(comparison: Comparison) -> document.Table:
    several = comparison.tests > 1
    columns = (
        document.Column("metric", "left", name=True),
        document.Column("pairs"),
        document.Column("p"),
        *([document.Column("adjusted\np")] if several else []),
        document.Column("smallest\ndetectable"),
        document.Column("samples to find\nwhat matters"),
    )
    rows = [
        (
            candidate,
            (
                metric.metric,
                f"{metric.n:,}",
                formatting.p_value(metric.p),
                *([formatting.p_value(metric.adjusted_p)] if several else []),
                change(metric.metric, metric.mde).lstrip("+"),
                formatting.UNDEFINED if metric.needed is None else formatting.samples_text(metric.needed),
            ),
        )
        for candidate in comparison.candidates
        for metric in _shown(candidate)
    ]
    return document.Table("Samples and tests", columns, _rows(comparison, rows))


def _slices(candidate: CandidateComparison, *, several: bool) -> document.Table:
    metrics = [metric.metric for metric in candidate.metrics if metric.same_as is None]
    undeclared = all(metric.lower_is_better is None for metric in candidate.metrics if metric.same_as is None)
    columns = (
        document.Column("slice", "left", name=True),
        document.Column("pairs"),
        document.Column("higher" if undeclared else "better"),
        document.Column("lower" if undeclared else "worse"),
        document.Column("difference"),
        document.Column("interval"),
        document.Column("verdict", "left"),
        document.Column("below and above 0", "left", bar=True),
    )
    rows: list[tuple[document.Content, ...] | document.Section] = []
    for name in metrics:
        figures = [(part, part[name]) for part in candidate.slices]
        scale = _scale(metric for _, metric in figures)
        if len(metrics) > 1:
            rows.append(document.Section(name))
        rows += [_slice(part, metric, scale, named=not undeclared) for part, metric in figures]
    whose = f" of {candidate.name}" if several else ""
    return document.Table(f"Slices{whose}", columns, tuple(rows))


def _slice(
    part: SliceComparison, metric: MetricComparison, scale: float, *, named: bool
) -> tuple[document.Content, ...]:
    return (
        part.name,
        f"{metric.n:,}",
        *_wins_and_losses(metric, named=named),
        document.Cell(change(metric.metric, metric.difference), TONES[metric.verdict]),
        span(metric.metric, metric.low, metric.high),
        document.Cell(SHORT[metric.verdict], TONES[metric.verdict]),
        _bar(metric, scale),
    )


def _sides(comparison: Comparison) -> document.Table:
    columns = (
        document.Column("side", "left", name=True),
        document.Column("run", "left", name=True),
        *(document.Column(title) for title in ("samples", "trials", "scored", "failed", "missing")),
    )
    sides = [comparison.baseline, *(candidate.candidate for candidate in comparison.candidates)]
    rows = [
        (
            side.name,
            side.run_id or formatting.UNDEFINED,
            *(f"{count:,}" for count in (side.samples, side.trials, side.scored, side.failures, side.missing)),
        )
        for side in sides
    ]
    return document.Table("Trials (failed: task errors and timeouts, which count as failures)", columns, tuple(rows))


def comparison_remarks(comparison: Comparison, *, detailed: bool) -> Iterator[str]:
    """Yield what has to be known to read a comparison: plan, warnings and, of what is asked for, tests."""
    yield from () if comparison.plan is None else comparison.plan.lines
    yield from () if comparison.looks is None else comparison.looks.sentences
    yield from comparison.warnings
    drawn = [metric.drawn for candidate in comparison.candidates for metric in candidate.metrics]
    if any(one is not None for one in drawn):
        subject = "If the labels were drawn at random, rates" if False in drawn else "Rates"
        yield f"{subject} are what people would say; won, lost and tied count the judge's verdicts."
    if comparison.tests > 1 and detailed:
        primary, others = count_tests(comparison)
        if not primary:
            yield f"Adjusted p-values allow for {comparison.tests} tests made together."
        elif primary > 1:
            yield f"Adjusted p-values of the primary metric allow for {primary} tests made together."
        if primary and others > 1:
            yield f"Adjusted p-values of the other metrics allow for {others} tests made together."
    sliced = [
        metric.adjusted_p
        for candidate in comparison.candidates
        for part in candidate.slices
        for metric in part.metrics
        if metric.same_as is None and metric.adjusted_p is not None
    ]
    if len(sliced) > 1 and detailed:
        yield (
            f"Adjusted p-values of slices allow for {len(sliced):,} tests: of the slices that are called different, at "
            f"most {formatting.level(comparison.alpha)} are expected to be false alarms."
        )
    for candidate in comparison.candidates:
        whose = f"{candidate.name}: " if len(comparison.candidates) > 1 else ""
        yield from (f"{whose}{test.sentence}" for test in candidate.slice_tests)
        for metric in candidate.metrics if detailed else ():
            if metric.same_as is not None and metric.metric != verdict_column(metric.same_as):
                yield f"{whose}{metric.metric} has the same numbers as {metric.same_as}."
            elif metric.same_as is None and metric.scored_only is not None and metric.scored_only.n != metric.n:
                yield f"{whose}{_scored_only(metric)}"
        yield from (f"{whose}{warning}" for warning in candidate.warnings)


def count_tests(comparison: Comparison) -> tuple[int, int]:
    """Return the numbers of tests of the primary metric of a plan, and of all others; 0 and all without a plan."""
    primary = 0
    for candidate in comparison.candidates:
        name = None if comparison.plan is None else comparison.plan.primary
        name = next((one.same_as or name for one in candidate.metrics if one.metric == name), None)
        primary += any(one.metric == name and one.p is not None for one in candidate.metrics)
    return primary, comparison.tests - primary


def _scored_only(metric: MetricComparison) -> str:
    scored = metric.scored_only
    if scored is None:
        return ""
    difference = change(metric.metric, scored.difference)
    return (
        f"{metric.metric} on the {formatting.count(scored.n, 'pair')} scored on both sides: {difference} "
        f"({span(metric.metric, scored.low, scored.high)}), {formatting.p_text(scored.p)}: {scored.verdict}."
    )


def _plots(comparison: Comparison) -> Iterator[document.Block]:
    several = len(comparison.candidates) > 1
    pairs = [(candidate, metric) for candidate in comparison.candidates for metric in _shown(candidate)]
    scale = _scale(metric for _, metric in pairs)
    rows = [
        plots.IntervalRow(
            f"{candidate.name}: {metric.metric}" if several else metric.metric, _bar(metric, scale), _describe(metric)
        )
        for candidate, metric in pairs
        if _in_unit(metric)
    ]
    if rows:
        yield document.Plot("Differences", plots.intervals(rows, "Differences with their intervals", percent=False))
    for candidate in comparison.candidates:
        whose = f": {candidate.name}" if several else ""
        first = candidate.metrics[0].metric
        found = [("all samples", candidate[first]), *((part.name, part[first]) for part in candidate.slices)]
        wins = [
            plots.WinsRow(name, metric_row.wins, metric_row.losses, metric_row.ties, _describe(metric_row))
            for name, metric_row in found
        ]
        undeclared = candidate[first].lower_is_better is None
        what, words = (
            ("Higher and lower", ("lower", "higher")) if undeclared else ("Wins and losses", ("worse", "better"))
        )
        caption = f"{what} by slice, {first}{whose}" if candidate.slices else f"{what}, {first}{whose}"
        yield document.Plot(caption, plots.wins_and_losses(wins, caption, words=words))
    sides = [comparison.baseline, *(candidate.candidate for candidate in comparison.candidates)]
    panels = [
        plots.Distribution(side.name, read_figures(source).distribution, sums.mean_score)
        for side, source in zip(sides, comparison.sources, strict=False)
        if (sums := _sums(source)).successful
    ]
    if panels:
        yield document.Plot("Scores", plots.distributions(panels, "How the scores of trials are distributed"))


def _sums(source: ExperimentSource) -> TotalsAnalysis:
    found = run_totals(source.store, source.run)
    return TotalsAnalysis(next(one for one in found if one.experiment == source.name))


def _describe(metric: MetricComparison) -> str:
    difference = change(metric.metric, metric.difference)
    return f"{difference} ({span(metric.metric, metric.low, metric.high)})"


_DIRECTIONS: tuple[tuple[str, Direction], ...] = (("Lost", "lost"), ("Gained", "gained"))


def _flips(comparison: Comparison, limit: int) -> Iterator[document.Block]:
    for candidate in comparison.candidates:
        whose = f" by {candidate.name}" if len(comparison.candidates) > 1 else ""
        for name, direction in _DIRECTIONS:
            flipped = comparison.flipped(direction, candidate.name)
            if len(flipped):
                showing = f", the first {limit:,} shown" if len(flipped) > limit else ""
                caption = f"{name}{whose}: {formatting.count(len(flipped), 'sample')}{showing}"
                cases = _read(flipped, limit, name.lower(), "bad" if name == "Lost" else "good")
                yield document.Cases(caption, len(flipped), min(limit, len(flipped)), cases)


def _read(flipped: FlippedSamples, limit: int, outcome: str, tone: document.Tone) -> Iterator[document.TrialDetails]:
    for flip in islice(flipped, limit):
        first = next(iter((*flip.baseline, *flip.candidate)), None)
        title = flip.sample_id if first is None else sample_title(flip.sample_id, sample_of(first).input)
        yield document.TrialDetails(title, outcome, tone, tuple(_facts(flip)))


def _facts(flip: Flip) -> Iterator[tuple[str, str]]:
    first = next(iter((*flip.baseline, *flip.candidate)), None)
    if first is not None:
        sample = sample_of(first)
        yield "input", shown(sample.input)
        if sample.has_expected:
            yield "expected", shown(sample.expected)
    several = max(len(flip.baseline), len(flip.candidate)) > 1
    # Both sides of a repeat together, so that a limit on the number of texts keeps both.
    for pair in islice(zip_longest(flip.baseline, flip.candidate), SHOWN_REPEATS):
        for side, result in zip(("baseline", "candidate"), pair, strict=True):
            if result is not None:
                yield f"{side}, repeat {result.repeat}" if several else side, _describe_result(result)


def _describe_result(result: EvalResult) -> str:
    if result.score is None:
        return f"{result.outcome.replace('_', ' ')}: {result.error or ''}"
    verdict = "passed" if result.score.passed else "failed"
    why = result.score.explain()
    reason = f": {why}" if why else ""
    return f"{verdict} with {result.score.value:g}{reason}\n{shown(result.output)}"
