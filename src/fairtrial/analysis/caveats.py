"""What a reader of a comparison must bear in mind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fairtrial.analysis.comparison import MetricComparison, SliceComparison
from fairtrial.analysis.pairing import Pairs
from fairtrial.analysis.slicing import SMALL_SLICE
from fairtrial.analysis.source import ExperimentSource, adaptive_note
from fairtrial.formatting import count, number_word
from fairtrial.store.protocol import RESUMABLE

FEW_PAIRS = 30
"""Below this many pairs a comparison says that it is small."""

MISSING_WARNED = 0.05
"""Above this share of missing trials a comparison says so, and a gate does not decide."""


def about_pairs(
    pairs: Pairs,
    metrics: Sequence[MetricComparison],
    slices: Sequence[SliceComparison],
    names: tuple[str, str],
    share: float,
) -> Iterator[str]:
    """What of a candidate and its baseline gives reason for care."""
    candidate, baseline = names
    if pairs.repeated_ids:
        yield (
            f"{count(pairs.repeated_ids, 'sample id')} occurs more than once on a side: nothing tells which results "
            "belong together, so they are left out."
        )
    if not pairs.matched:
        yield f"{candidate} and {baseline} have no sample in common: they were run on different data."
    elif pairs.only_baseline or pairs.only_candidate:
        yield (
            f"{count(pairs.only_baseline, 'sample')} only in {baseline} and {pairs.only_candidate:,} only in "
            f"{candidate} are left out; {pairs.matched:,} are compared."
        )
    if 0 < pairs.matched < FEW_PAIRS:
        yield f"Only {count(pairs.matched, 'pair')}: only large differences can show."
    if share > MISSING_WARNED:
        yield (
            f"{share:.1%} of the trials or pairs are missing (not run, or not scored through no fault of the system): "
            "if they are not like the others, the difference is not what it seems."
        )
    yield from dict.fromkeys(note for metric in metrics for note in metric.notes if note.startswith("Only "))
    for metric in metrics:
        if metric.scored_only is not None and metric.scored_only.verdict != metric.verdict and metric.same_as is None:
            yield (
                f"{metric.metric}: {metric.verdict} with task errors and timeouts as failures, but "
                f"{metric.scored_only.verdict} on the {count(metric.scored_only.n, 'pair')} scored on both sides: "
                "the errors make the difference."
            )
    small = [part for part in slices if part.n < SMALL_SLICE]
    if small:
        shown = ", ".join(f"{part.name} ({part.n})" for part in small[:5])
        more = f" and {len(small) - 5} more" if len(small) > 5 else ""
        yield f"Slices of fewer than {SMALL_SLICE} samples show only large differences: {shown}{more}."


def about_runs(sources: Sequence[ExperimentSource]) -> Iterator[str]:
    """What the runs themselves give a reader to bear in mind."""
    if not sources:
        return
    for run in {source.run.run_id: source.run for source in sources}.values():
        if run.code_versions > 1:
            yield f"Run {run.run_id} has results of {number_word(run.code_versions)} code versions."
        if run.status == "running" or run.status in RESUMABLE:
            yield f"Run {run.run_id} is not finished ({run.status}): these are not its final numbers."
        elif adaptive_note(run) is not None:
            yield (
                f"Run {run.run_id} looked at its own results to know when to end: what is said here is valid for it, "
                "and more cautious than for a run of fixed length."
            )
        elif run.status == "stopped":
            yield f"Run {run.run_id} was stopped early: if its numbers were the reason, intervals here are too narrow."
    evaluators = dict.fromkeys(source.run.evaluator for source in sources)
    if len(evaluators) > 1:
        yield (
            f"The sides were scored by different evaluators ({', '.join(evaluators)}): source of the difference may be "
            "theirs."
        )
    if len({source.run.dataset_fingerprint for source in sources}) > 1:
        yield "The runs are of different datasets, or versions of one: an id must mean the same sample in all of them."
    seen = {(source.run.run_id, source.name) for source in sources}
    if len(seen) < len(sources):
        yield "An experiment is compared with itself."
