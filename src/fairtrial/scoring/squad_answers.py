"""Exact match and token F1 of short answers, as the SQuAD script computes them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import SHARE, Metric, Score
from fairtrial.scoring.text import text_of

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case a text and remove ASCII punctuation, English articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(output: str, reference: str) -> float:
    """Return the F1 of the normalised words of two texts. If one has no words, they must both have none."""
    said, wanted = normalize_answer(output).split(), normalize_answer(reference).split()
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))


def squad(pass_at: float | None = None) -> Callable[[object, object], Score]:
    """The best token F1 over the references. Passes an exact match after normalisation, or an F1 of `pass_at`.

    The expected value is one text or several; an empty text, or none, means that the question has no answer. Metrics:
    `exact_match` and `f1`.

    Rajpurkar et al. (2016), SQuAD, arXiv:1606.05250; Rajpurkar et al. (2018), Know What You Don't Know,
    arXiv:1806.03822.
    """
    if pass_at is not None and not 0.0 < pass_at <= 1.0:
        raise ConfigurationError(f"pass_at of squad must be above 0 and at most 1 (got {pass_at})")

    @evaluator(inline=True, name="squad", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        references = _references(expected)
        said = text_of(output, "squad")
        exact = any(normalize_answer(said) == normalize_answer(reference) for reference in references)
        best = max(references, key=lambda reference: token_f1(said, reference))
        f1 = token_f1(said, best)
        passed = exact if pass_at is None else f1 >= pass_at
        metrics = [
            Metric("exact_match", float(exact), higher_is_better=True, bounds=SHARE),
            Metric("f1", f1, higher_is_better=True, bounds=SHARE),
        ]
        return Score(f1, passed, "" if exact else f"F1 {f1:.2f} with {best[:80]!r}", metrics)

    return score


def _references(expected: Any) -> list[str]:
    if isinstance(expected, str):
        return [expected]
    texts = list(expected) if isinstance(expected, Collection) and not isinstance(expected, bytes) else [expected]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"the expected value of squad must be a text or a list of texts (got {expected!r})")
    # An answer without words matches no output, unless it is the only one: then the question has no answer.
    return [text for text in texts if normalize_answer(text)] or [""]
