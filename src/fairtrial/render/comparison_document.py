"""What a comparison says: the verdict first, then every difference with its interval, and the samples that flipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest

from fairtrial import formatting
from fairtrial.analysis.comparison import (
    CandidateComparison,
    ComparisonRecord,
    Flip,
    FlippedSamples,
    MetricComparison,
    SliceComparison,
)
from fairtrial.analysis.experiment import ExperimentAnalysis
from fairtrial.analysis.metrics import is_verdict, verdict_column
from fairtrial.render import plots
from fairtrial.render.document import (
    Bar,
    Block,
    Case,
    Cases,
    Cell,
    Column,
    Conclusion,
    Content,
    Document,
    Plot,
    Remarks,
    Section,
    Table,
    Tone,
)
from fairtrial.render.safe_text import shown
from fairtrial.trials.result import EvalResult

_TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "unknown": "unsure", "no detectable difference": ""}
_SPOKEN_METRICS = 3
SHOWN_REPEATS = 3


def comparison_document(comparison: ComparisonRecord, cases: int) -> Document:
    """What there is to say, with at most `cases` flipped samples each way to read."""
    candidates = comparison.candidates
    one = len(candidates) == 1
    title = f"{candidates[0].name if one else f'{len(candidates)} candidates'} against {comparison.baseline.name}"
    blocks: list[Block] = [*_verdicts(comparison), _differences(comparison), _tests(comparison)]
    slices = [_slices(candidate, several=not one) for candidate in candidates if candidate.slices]
    blocks += slices
    if cases:
        blocks += _plots(comparison)
    blocks += [_sides(comparison), Remarks(tuple(_remarks(comparison)))]
    if cases and comparison.sources:
        blocks += _flips(comparison, cases)
    about = [f"{_matched(candidate, several=not one)}" for candidate in candidates]
    return Document(title, tuple(about), tuple(blocks))


def _shown(candidate: CandidateComparison) -> list[MetricComparison]:
    """The metrics, but for verdicts on criteria that are 0 or 1: those have the numbers of the criterion itself."""
    return [
        metric
        for metric in candidate.metrics
        if metric.same_as is None or metric.metric != verdict_column(metric.same_as)
    ]


def _mean(metric: str, value: float | None) -> str:
    return formatting.rate(value) if is_verdict(metric) else formatting.number(value)


def span(metric: str, low: float | None, high: float | None) -> str:
    """An interval of differences in words."""
    if low is None or high is None:
        return formatting.UNDEFINED
    return (
        f"{formatting.signed(low, percent=is_verdict(metric))} to {formatting.signed(high, percent=is_verdict(metric))}"
    )


def _matched(candidate: CandidateComparison, *, several: bool) -> str:
    whose = f"{candidate.name}: " if several else ""
    left_out = candidate.only_baseline + candidate.only_candidate
    unmatched = (
        f"{candidate.only_baseline:,} only in the baseline and {candidate.only_candidate:,} only in the candidate "
        "are left out"
        if left_out
        else "none is on one side only"
    )
    return f"{whose}{formatting.count(candidate.matched, 'sample')} on both sides; {unmatched}"


def _verdicts(comparison: ComparisonRecord) -> Iterator[Conclusion]:
    """The first metric always speaks, the others if they are few or have something to say."""
    for candidate in comparison.candidates:
        distinct = [metric for metric in candidate.metrics if metric.same_as is None]
        for place, metric in enumerate(distinct):
            if place == 0 or len(distinct) <= _SPOKEN_METRICS or metric.verdict in ("better", "worse"):
                said = metric.sentence.removeprefix(f"{metric.metric}: ")
                yield Conclusion(metric.metric, said, _TONES[metric.verdict])


def _rows(
    comparison: ComparisonRecord, row: Iterable[tuple[CandidateComparison, tuple[Content, ...]]]
) -> tuple[tuple[Content, ...] | Section, ...]:
    """Rows under the name of their candidate, where there are several."""
    rows: list[tuple[Content, ...] | Section] = []
    current: CandidateComparison | None = None
    for candidate, cells in row:
        if len(comparison.candidates) > 1 and candidate is not current:
            rows.append(Section(candidate.name))
            current = candidate
        rows.append(cells)
    return tuple(rows)


def _differences(comparison: ComparisonRecord) -> Table:
    unit = any(is_verdict(metric.metric) for candidate in comparison.candidates for metric in candidate.metrics)
    columns = (
        Column("metric", "left", name=True),
        Column("baseline"),
        Column("candidate"),
        Column("difference"),
        Column(f"{formatting.level(1 - comparison.alpha)} interval"),
        Column("below and above 0", "left", bar=True),
    )
    pairs = [(candidate, metric) for candidate in comparison.candidates for metric in _shown(candidate)]
    scale = _scale(metric for _, metric in pairs)
    rows = [
        (
            candidate,
            (
                metric.metric,
                _mean(metric.metric, metric.baseline),
                _mean(metric.metric, metric.candidate),
                Cell(formatting.signed(metric.difference, percent=is_verdict(metric.metric)), _TONES[metric.verdict]),
                span(metric.metric, metric.low, metric.high),
                _bar(metric, scale),
            ),
        )
        for candidate, metric in pairs
    ]
    caption = "Differences, pass rates in percentage points" if unit else "Differences"
    return Table(caption, columns, _rows(comparison, rows))


def _in_unit(metric: MetricComparison) -> bool:
    return metric.low is not None and metric.high is not None and -1 <= metric.low <= metric.high <= 1


def _scale(metrics: Iterable[MetricComparison]) -> float:
    """How far a common axis reaches to either side, so that bars below each other can be compared."""
    ends = [abs(end) for metric in metrics if _in_unit(metric) for end in (metric.low, metric.high) if end is not None]
    return max(ends, default=0.0) or 1.0


def _bar(metric: MetricComparison, scale: float) -> Bar | None:
    if metric.low is None or metric.high is None or metric.difference is None or not _in_unit(metric):
        return None
    return Bar(metric.low, metric.difference, metric.high, -scale, scale, mark=0.0)


def _tests(comparison: ComparisonRecord) -> Table:
    several = comparison.tests > 1
    columns = (
        Column("metric", "left", name=True),
        Column("pairs"),
        Column("better"),
        Column("worse"),
        Column("tied"),
        Column("p"),
        *([Column("adjusted\np")] if several else []),
        Column("smallest\ndetectable"),
        Column("samples to\nsettle it"),
    )
    rows = [
        (
            candidate,
            (
                metric.metric,
                f"{metric.n:,}",
                f"{metric.wins:,}",
                f"{metric.losses:,}",
                f"{metric.ties:,}",
                formatting.p_value(metric.p),
                *([formatting.p_value(metric.adjusted_p)] if several else []),
                formatting.signed(metric.mde, percent=is_verdict(metric.metric)).lstrip("+"),
                _to_settle(metric),
            ),
        )
        for candidate in comparison.candidates
        for metric in _shown(candidate)
    ]
    return Table("Samples and tests", columns, _rows(comparison, rows))


def _to_settle(metric: MetricComparison) -> str:
    """How many samples would settle it; nothing where more would not help."""
    if metric.verdict in ("better", "worse"):
        return "settled"  # A number larger than that of the pairs would contradict the verdict.
    if metric.needed is None or metric.needed <= metric.n:
        return formatting.UNDEFINED
    return formatting.samples_text(metric.needed)


def _slices(candidate: CandidateComparison, *, several: bool) -> Table:
    columns = (
        Column("slice", "left", name=True),
        Column("pairs"),
        Column("better"),
        Column("worse"),
        Column("difference"),
        Column("interval"),
        Column("adjusted\np"),
        Column("below and above 0", "left", bar=True),
    )
    rows: list[tuple[Content, ...] | Section] = []
    metrics = [metric.metric for metric in candidate.metrics if metric.same_as is None]
    for name in metrics:
        found = [(part, part[name]) for part in candidate.slices]
        scale = _scale(metric for _, metric in found)
        if len(metrics) > 1:
            rows.append(Section(name))
        rows += [_slice(part, metric, scale) for part, metric in found]
    whose = f" of {candidate.name}" if several else ""
    return Table(f"Slices{whose}", columns, tuple(rows))


def _slice(part: SliceComparison, metric: MetricComparison, scale: float) -> tuple[Content, ...]:
    return (
        part.name,
        f"{metric.n:,}",
        f"{metric.wins:,}",
        f"{metric.losses:,}",
        Cell(formatting.signed(metric.difference, percent=is_verdict(metric.metric)), _TONES[metric.verdict]),
        span(metric.metric, metric.low, metric.high),
        formatting.p_value(metric.adjusted_p),
        _bar(metric, scale),
    )


def _sides(comparison: ComparisonRecord) -> Table:
    columns = (
        Column("side", "left", name=True),
        Column("run", "left", name=True),
        *(Column(title) for title in ("samples", "trials", "scored", "failed", "missing")),
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
    return Table("Trials (failed: task errors and timeouts, which count as failures)", columns, tuple(rows))


def _remarks(comparison: ComparisonRecord) -> Iterator[str]:
    yield from comparison.warnings
    if comparison.tests > 1:
        yield f"Adjusted p-values allow for {comparison.tests} tests made together."
    sliced = [
        metric.adjusted_p
        for candidate in comparison.candidates
        for part in candidate.slices
        for metric in part.metrics
        if metric.same_as is None and metric.adjusted_p is not None
    ]
    if len(sliced) > 1:
        yield (
            f"Adjusted p-values of slices allow for {len(sliced):,} tests: of the slices that are called different, at "
            f"most {formatting.level(comparison.alpha)} are expected to be false alarms."
        )
    for candidate in comparison.candidates:
        whose = f"{candidate.name}: " if len(comparison.candidates) > 1 else ""
        for metric in _shown(candidate):
            if metric.same_as is not None:
                yield f"{whose}{metric.metric} has the same numbers as {metric.same_as}."
            elif metric.scored_only is not None and metric.scored_only.n != metric.n:
                yield f"{whose}{_scored_only(metric)}"
        yield from (f"{whose}{warning}" for warning in candidate.warnings)


def _scored_only(metric: MetricComparison) -> str:
    found = metric.scored_only
    if found is None:
        return ""
    difference = formatting.signed(found.difference, percent=is_verdict(metric.metric))
    return (
        f"{metric.metric} on the {found.n:,} pairs scored on both sides: {difference} "
        f"({span(metric.metric, found.low, found.high)}), p {formatting.p_value(found.p)}: {found.verdict}."
    )


def _plots(comparison: ComparisonRecord) -> Iterator[Block]:
    several = len(comparison.candidates) > 1
    pairs = [(candidate, metric) for candidate in comparison.candidates for metric in _shown(candidate)]
    scale = _scale(metric for _, metric in pairs)
    rows = [
        plots.IntervalRow(
            f"{candidate.name}: {metric.metric}" if several else metric.metric, _bar(metric, scale), _said(metric)
        )
        for candidate, metric in pairs
        if _in_unit(metric)
    ]
    if rows:
        yield Plot("Differences", plots.intervals(rows, "Differences with their intervals", percent=False))
    for candidate in comparison.candidates:
        whose = f": {candidate.name}" if several else ""
        first = candidate.metrics[0].metric
        found = [("all samples", candidate[first]), *((part.name, part[first]) for part in candidate.slices)]
        wins = [plots.WinsRow(name, one.wins, one.losses, one.ties, _said(one)) for name, one in found]
        caption = (
            f"Wins and losses by slice, {first}{whose}" if candidate.slices else f"Wins and losses, {first}{whose}"
        )
        yield Plot(caption, plots.wins_and_losses(wins, caption))
    sides = [comparison.baseline, *(candidate.candidate for candidate in comparison.candidates)]
    panels = [
        plots.Distribution(side.name, part.figures.distribution, part.mean_score)
        for side, part in zip(sides, _parts(comparison), strict=False)
        if part.successful
    ]
    if panels:
        yield Plot("Scores", plots.distributions(panels, "How the scores of trials are distributed"))


def _parts(comparison: ComparisonRecord) -> list[ExperimentAnalysis]:
    """The experiments that were compared, baseline first; none if it was made of numbers alone."""
    sides = [gained.sides for gained, _ in comparison.sources]
    sources = [sides[0][0], *(candidate for _, candidate in sides)] if sides else []
    return [ExperimentAnalysis.read(source) for source in sources]


def _said(metric: MetricComparison) -> str:
    difference = formatting.signed(metric.difference, percent=is_verdict(metric.metric))
    return f"{difference} ({span(metric.metric, metric.low, metric.high)})"


def _flips(comparison: ComparisonRecord, limit: int) -> Iterator[Block]:
    for candidate, (gained, lost) in zip(comparison.candidates, comparison.sources, strict=True):
        whose = f" by {candidate.name}" if len(comparison.candidates) > 1 else ""
        for name, flipped in (("Lost", lost), ("Gained", gained)):
            if len(flipped):
                showing = f", the first {limit:,} shown" if len(flipped) > limit else ""
                caption = f"{name}{whose}: {formatting.count(len(flipped), 'sample')}{showing}"
                cases = _read(flipped, limit, name.lower(), "bad" if name == "Lost" else "good")
                yield Cases(caption, len(flipped), min(limit, len(flipped)), cases)


def _read(flipped: FlippedSamples, limit: int, outcome: str, tone: Tone) -> Iterator[Case]:
    for flip in islice(flipped, limit):
        yield Case(flip.sample_id, outcome, tone, tuple(_facts(flip)))


def _facts(flip: Flip) -> Iterator[tuple[str, str]]:
    first = next(iter((*flip.baseline, *flip.candidate)), None)
    if first is not None:
        yield "input", shown(first.sample.input)
        yield "expected", shown(first.sample.expected)
    several = max(len(flip.baseline), len(flip.candidate)) > 1
    # Both sides of a repeat together: where there is room for a few texts only, no side is left out.
    for pair in islice(zip_longest(flip.baseline, flip.candidate), SHOWN_REPEATS):
        for side, result in zip(("baseline", "candidate"), pair, strict=True):
            if result is not None:
                yield f"{side}, repeat {result.repeat}" if several else side, _came_of(result)


def _came_of(result: EvalResult) -> str:
    if result.score is None:
        return f"{result.outcome.replace('_', ' ')}: {result.error or ''}"
    verdict = "passed" if result.score.passed else "failed"
    why = result.score.explain()
    reason = f": {why}" if why else ""
    return f"{verdict} with {result.score.value:g}{reason}\n{shown(result.output)}"
