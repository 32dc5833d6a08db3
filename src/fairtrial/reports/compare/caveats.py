"""Caveats of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fairtrial.base.formatting import count, number_word, range_text, rate
from fairtrial.data.splits import FAILURES
from fairtrial.reports.compare.pairing import Pairs, changed_samples
from fairtrial.reports.figures.broken_users import about_users
from fairtrial.reports.figures.columns import ChangedContents
from fairtrial.reports.figures.metrics import COSTS, ExperimentSource, code_versions, is_verdict
from fairtrial.reports.figures.slicing import SMALL_SLICE
from fairtrial.store.protocol import RESUMABLE, RunRecord

if TYPE_CHECKING:
    from fairtrial.reports.compare.comparison import MetricComparison, SliceComparison, Verdict

FEW_PAIRS = 30
"""Below this many pairs a comparison says that it is small."""

MISSING_WARNED, MISSING_OF_WIDTH = 0.05, 0.1
"""A comparison names missing trials above this share, or where the share is above this part of an interval's width.

Missing outcomes that were all failures move the difference by their share; by a fifth of the half-width, the interval
still contains the truth in 93% of runs.
"""


FEWEST_PAIRS = 6
"""Below this many pairs no difference of pass rates can be detected, however large."""

OPEN: tuple[Verdict, ...] = ("no detectable difference", "as good as")


def _beyond_0(metric: MetricComparison) -> bool:
    return metric.low is not None and metric.high is not None and not metric.low <= 0 <= metric.high


def uncounted_failures(metric: str, failures: int, why: str = "has no worst value") -> str:
    """Return that failures have no value in a metric, as the start of a sentence."""
    return f"{metric} {why}: {count(failures, 'failed trial')} could not be counted in it"


def uncounted_remark(metric: MetricComparison) -> str:
    """Return a remark about failures that a metric has no worst value for."""
    why, missing = "has no worst value", "bounds"
    if metric.lower_is_better is None:
        why, missing = "declares no direction and so no worst value", "direction and its bounds"
    start = uncounted_failures(metric.metric, metric.uncounted, why)
    return f"{start}, which leaves {count(metric.n, 'pair')}. Declare its {missing} to count them."


def about_pairs(
    pairs: Pairs,
    metrics: Sequence[MetricComparison],
    slices: Sequence[SliceComparison],
    names: tuple[str, str],
    share: float,
) -> Iterator[str]:
    """Yield caveats about a candidate and its baseline."""
    candidate, baseline = names
    if pairs.repeated_ids:
        yield (
            f"{count(pairs.repeated_ids, 'sample id occurs', 'sample ids occur')} more than once on a side: nothing "
            "tells which results belong together, so these results are left out."
        )
    changed = changed_samples(pairs.baseline.ids, pairs.changed)
    if changed is not None:
        yield changed.remark
    yield from about_unknown(pairs.changed)
    if not pairs.matched:
        yield f"{candidate} and {baseline} have no sample in common: they were run on different data."
    elif pairs.only_baseline or pairs.only_candidate:
        yield (
            f"{count(pairs.only_baseline, 'sample')} only in {baseline} and {pairs.only_candidate:,} only in "
            f"{candidate} are left out; {count(pairs.matched, 'is', 'are')} compared."
        )
    repeated = pairs.baseline.repeated_inputs or pairs.candidate.repeated_inputs
    if repeated is not None:
        yield repeated.remark
    most = max((metric.n for metric in metrics), default=pairs.matched)
    if FEWEST_PAIRS <= most < FEW_PAIRS:
        yield f"Only {count(most, 'pair')}: only large differences can be detected."
    widths = [
        one.high - one.low
        for one in metrics
        if one.low is not None and one.high is not None and one.smallest_difference is not None
    ]
    if pairs.matched and share > min([MISSING_WARNED, *(MISSING_OF_WIDTH * width for width in widths)]):
        of_changed = "" if changed is None else ", or of changed samples"
        worst = ", ".join(
            f"{range_text(*metric.worst, percent=is_verdict(metric.metric))} in {metric.metric}"
            for metric in metrics
            if metric.worst is not None and metric.same_as is None
        )
        yield f"{rate(share)} of the trials or pairs are missing (not run, or not scored{of_changed})" + (
            f". Whatever they would have been, the interval of the difference is {worst}."
            if worst
            else ": if they differ from the others, the difference is biased."
        )
    yield from dict.fromkeys(note for metric in metrics for note in metric.notes if note.startswith("Only "))
    yield from (uncounted_remark(metric) for metric in metrics if metric.uncounted)
    for metric in metrics:
        if metric.scored_only is not None and metric.scored_only.verdict != metric.verdict and metric.same_as is None:
            scored = metric.scored_only
            yield f"{metric.metric}: {metric.verdict} with task errors and timeouts as failures" + (
                f", but {scored.verdict} on the {count(scored.n, 'pair')} scored on both sides: the errors make the "
                "difference."
                if scored.n
                else "; no pair is scored on both sides."
            )
    judged = [metric for metric in metrics if metric.smallest_difference is not None and metric.same_as is None]
    if len(judged) > 1 and any(metric.verdict == "as good as" for metric in judged):
        yield (
            f"Whether a metric is as good is decided for each of {len(judged):,} on its own: a wrong answer about one "
            "of several is more likely than about one alone."
        )
    apart = sum(any(_beyond_0(one) and one.verdict in OPEN for one in part.metrics) for part in slices)
    if apart:
        those = count(apart, "slice has", "slices have")
        among = f"among {len(slices):,} slices that may be chance"
        yield f"{those} an interval without 0 and no verdict of a difference: {among}."
    small = [part for part in slices if part.n < SMALL_SLICE]
    if small:
        shown = ", ".join(f"{part.name} ({part.n})" for part in small[:5])
        more = f" and {len(small) - 5} more" if len(small) > 5 else ""
        yield f"Slices of fewer than {SMALL_SLICE} samples show only large differences: {shown}{more}."


def about_unknown(changed: ChangedContents | None) -> Iterator[str]:
    """Yield that only ids say that samples of different datasets are the same."""
    if changed is not None and changed.unknown:
        yield (
            "The runs are of different datasets, or versions of one, and the inputs of "
            f"{count(changed.unknown, 'sample')} are not stored: an id must mean the same sample in all of them."
        )


def about_labels(pairs: Pairs, metrics: Sequence[MetricComparison]) -> Iterator[str]:
    """Yield caveats about the labels that correct a judge."""
    if pairs.candidate.labels is None:
        return
    sides = [(side, side.labels) for side in (pairs.candidate, pairs.baseline)]
    why = {side.name: labels.undrawn for side, labels in sides if labels is not None and labels.undrawn}
    if why and any(metric.labels is not None for metric in metrics):
        yield from dict.fromkeys(
            reason if len(set(why.values())) == 1 and len(why) == 2 else f"{name}: {reason}"
            for name, reason in why.items()
        )
    raw = [metric.metric for metric in metrics if metric.labels is None and metric.metric not in COSTS]
    if raw:
        what = pairs.candidate.labels.metric
        yield f"The labels are about {what}: {', '.join(raw)} {'is' if len(raw) == 1 else 'are'} not corrected."
    if any(metric.labels is not None for metric in metrics):
        yield from dict.fromkeys(note for metric in metrics for note in metric.notes if note.startswith("No trial "))


def about_runs(sources: Sequence[ExperimentSource]) -> Iterator[str]:
    """Yield caveats about the compared runs."""
    if not sources:
        return
    runs = {source.run.run_id: source for source in sources}
    for source in runs.values():
        run, versions = source.run, code_versions(source.store, source.run)
        if versions > 1:
            yield f"Run {run.run_id} has results of {number_word(versions)} code versions."
        if run.status == "running" or run.status in RESUMABLE:
            yield f"Run {run.run_id} is not finished ({run.status}): these are not its final numbers."
        elif (adaptive := run.noted.adaptive) is not None:
            if adaptive.rule.decides is not None:
                yield (
                    f"Run {run.run_id} used its own results to decide when to stop: the results here allow for "
                    "that, and are more cautious than for a run of fixed length."
                )
        elif run.status == "stopped":
            yield f"Run {run.run_id} was stopped early: if its numbers were the reason, intervals here are too narrow."
    if any(run.noted.split is not None and run.noted.split.name == FAILURES for run in (s.run for s in sources)):
        yield (
            "The samples were chosen because a run failed them: against that run, any other one looks better by "
            "chance. Compare two later runs."
        )
    yield from _package_changes([source.run for source in runs.values()])
    evaluators = dict.fromkeys(source.run.evaluator for source in sources)
    outputs = {(source.run.parent_run or source.run.run_id, source.name) for source in sources}
    if len(outputs) == 1 and len(runs) > 1:
        yield "The sides score the same outputs: the difference is how far the evaluator moved, not the system."
    elif len(evaluators) > 1:
        yield (
            f"The sides were scored by different evaluators ({', '.join(evaluators)}): they may cause the difference."
        )
    yield from about_users(sources)
    seen = {(source.run.run_id, source.name) for source in sources}
    if len(seen) < len(sources):
        yield "An experiment is compared with itself."


def about_choice(sources: Sequence[ExperimentSource]) -> Iterator[str]:
    """Yield that some of the experiments of a run were chosen for a comparison, for which no p-value allows."""
    compared: dict[str, set[str]] = {}
    for source in sources:
        compared.setdefault(source.run.run_id, set()).add(source.name)
    for run in {source.run.run_id: source.run for source in sources}.values():
        if 1 < len(compared[run.run_id]) < len(run.experiments):
            yield (
                f"Run {run.run_id} has {len(run.experiments)} experiments, and {len(compared[run.run_id])} are "
                "compared: no adjustment was made for choosing them. If their results were the reason, quote the "
                "leaderboard of all of them."
            )


def _package_changes(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield the packages of which the runs used different versions."""
    recorded = [found for run in runs if isinstance(found := (run.identity or {}).get("packages"), Mapping) and found]
    changes = []
    for name in sorted(set().union(*recorded)):
        versions = dict.fromkeys(str(found[name]) for found in recorded if name in found)
        if len(versions) > 1:
            changes.append(f"{name} {' and '.join(versions)}")
    if changes:
        yield f"The runs used different versions of packages: {'; '.join(changes)}."
