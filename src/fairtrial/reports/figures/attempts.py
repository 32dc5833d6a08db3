"""Count gates of the same code: repeated attempts make a wrong pass more likely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fairtrial.base.formatting import margin_text
from fairtrial.reports.figures.metrics import is_ratio, is_verdict
from fairtrial.reports.figures.source import ExperimentSource
from fairtrial.store.notes import GateNote

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


def spent_alpha(alpha: float, attempt: int) -> float:
    """Return the part of alpha for the k-th attempt, alpha/(k(k + 1)); all parts sum to alpha."""
    return alpha / (attempt * (attempt + 1))
