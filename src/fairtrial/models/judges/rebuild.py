"""Rebuild the prompt that a judge was given: from its question, which a run keeps once, and from the trial.

The fence around the material is a hash of it, so the rebuilt prompt is the same to the last character, or its hash
differs from the one that was stored with the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fairtrial.data.sample import Sample
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import DataError
from fairtrial.models.judges.judge import Judging, fenced_messages, material_of, prompt_digest
from fairtrial.models.judges.pairwise import PairwiseJudge, pair_of
from fairtrial.scoring.combine import Combined
from fairtrial.scoring.evaluator import Scorer
from fairtrial.store.notes import JudgeNote


def judge_notes(scorer: Scorer) -> tuple[JudgeNote, ...]:
    """Return what the judges in an evaluator ask. Judges with a template of their own are left out."""
    return tuple(dict.fromkeys(_notes(scorer)))


def _notes(scorer: Scorer) -> Iterator[JudgeNote]:
    if isinstance(scorer, Combined):
        for member in scorer.members:
            yield from _notes(member)
    elif isinstance(scorer, Judging) and scorer.question is not None:
        yield JudgeNote(scorer.name, scorer.question, scorer.include_input, isinstance(scorer, PairwiseJudge))


def rebuild_prompt(
    notes: Iterable[JudgeNote], sample: Sample[Any, Any], output: Any, sha256: str
) -> list[ChatMessage] | None:
    """Return the prompt with this hash; None if no judge of the run made it from this trial.

    Args:
        notes: What the judges of the run ask.
        sample: The sample of the trial.
        output: Its output.
        sha256: The hash that was stored with the verdict.
    """
    for note in notes:
        for pieces in _materials(note, sample, output):
            try:
                messages = fenced_messages(pieces, note.question)
            except DataError:
                continue
            if prompt_digest(messages) == sha256:
                return messages
    return None


def _materials(note: JudgeNote, sample: Sample[Any, Any], output: Any) -> Iterator[dict[str, Any]]:
    if not note.pairs:
        yield material_of(sample, output, include_input=note.include_input)
        return
    for first, second in ((output, sample.expected), (sample.expected, output)):
        yield pair_of(sample, first, second, include_input=note.include_input)
