"""Overlap with reference texts: ROUGE, BLEU and chrF by their reference implementations."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from typing import Any, Literal

from fairtrial.errors import ConfigurationError, MissingExtraError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import SHARE, Metric, Score
from fairtrial.scoring.text import text_of

type RougeKind = Literal["rouge1", "rouge2", "rouge3", "rouge4", "rougeL", "rougeLsum"]
_KINDS = ("rouge1", "rouge2", "rouge3", "rouge4", "rougeL", "rougeLsum")


def _check(name: str, package: str, pass_at: float) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(name, "text")
    if not 0.0 <= pass_at <= 1.0:
        raise ConfigurationError(f"pass_at of {name} must be from 0 to 1 (got {pass_at})")


def _references(name: str, expected: Any) -> list[str]:
    texts = [expected] if isinstance(expected, str) else list(expected) if isinstance(expected, Collection) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise TypeError(f"the expected value of {name} must be a text or a list of texts, not empty (got {expected!r})")
    return texts


def rouge(kind: RougeKind = "rougeL", *, pass_at: float = 0.5, stem: bool = False) -> Callable[[object, object], Score]:
    """The ROUGE F1 of the output with the best reference; metrics `precision` and `recall`.

    Computed by rouge-score (extra `text`). Lin (2004), ROUGE: A Package for Automatic Evaluation of Summaries.

    Args:
        kind: Common n-grams ("rouge1" to "rouge4") or the longest common subsequence ("rougeL", "rougeLsum").
        pass_at: The F1 from which it passes.
        stem: Compare the stems of English words.
    """
    _check("rouge", "rouge_score", pass_at)
    if kind not in _KINDS:
        raise ConfigurationError(f"the kind of rouge must be one of {', '.join(_KINDS)} (got {kind!r})")
    scorer: list[Any] = []  # Made on first use: its import takes long.

    @evaluator(name=kind, needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        if not scorer:
            from rouge_score.rouge_scorer import RougeScorer

            scorer.append(RougeScorer([kind], use_stemmer=stem))
        best = scorer[0].score_multi(_references("rouge", expected), text_of(output, "rouge"))[kind]
        metrics = [
            Metric("precision", best.precision, higher_is_better=True, bounds=SHARE),
            Metric("recall", best.recall, higher_is_better=True, bounds=SHARE),
        ]
        return Score(best.fmeasure, best.fmeasure >= pass_at, f"F1 {best.fmeasure:.3f}, needed {pass_at:g}", metrics)

    return score


def bleu(*, pass_at: float = 0.5) -> Callable[[object, object], Score]:
    """The sentence BLEU of the output with all references, from 0 to 1. A poor measure of a single text.

    BLEU was made for a corpus: over one sentence it depends on smoothing. Prefer `chrf`, or compare means of many
    samples. Computed by sacrebleu (extra `text`) with exponential smoothing and effective order. Papineni et al.
    (2002), BLEU; Post (2018), A Call for Clarity in Reporting BLEU Scores, arXiv:1804.08771.
    """
    _check("bleu", "sacrebleu", pass_at)

    @evaluator(name="bleu", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        from sacrebleu.metrics import BLEU  # type: ignore[attr-defined]

        found = BLEU(effective_order=True).sentence_score(text_of(output, "bleu"), _references("bleu", expected))
        return _of_percent(found.score, pass_at)

    return score


def chrf(*, word_order: int = 0, pass_at: float = 0.5) -> Callable[[object, object], Score]:
    """The chrF of the output with the best reference, from 0 to 1: the F2 of character n-grams.

    Computed by sacrebleu (extra `text`). Popović (2015), chrF: character n-gram F-score for automatic MT evaluation.

    Args:
        word_order: 2 for chrF++, which counts word n-grams too.
        pass_at: The value from which it passes.
    """
    _check("chrf", "sacrebleu", pass_at)

    @evaluator(name="chrf", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        from sacrebleu.metrics import CHRF  # type: ignore[attr-defined]

        found = CHRF(word_order=word_order).sentence_score(text_of(output, "chrf"), _references("chrf", expected))
        return _of_percent(found.score, pass_at)

    return score


def _of_percent(percent: float, pass_at: float) -> Score:
    value = min(max(percent / 100, 0.0), 1.0)
    return Score(value, value >= pass_at, f"{value:.3f}, needed {pass_at:g}")
