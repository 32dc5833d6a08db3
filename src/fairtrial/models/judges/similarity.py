"""Semantic similarity: the cosine of embeddings."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from fairtrial.data.session.views import JUDGE
from fairtrial.errors import ConfigurationError, ModelError
from fairtrial.models.base import BaseAdapter
from fairtrial.models.judges.judge import Judging
from fairtrial.scoring.evaluator import Case
from fairtrial.scoring.score import Metric, Score

COSINE = (-1.0, 1.0)
"""The bounds of a cosine."""


class SemanticSimilarity(Judging):
    """Compares the embeddings of the output and of its references."""

    __slots__ = ("_pass_at",)

    def __init__(self, adapter: BaseAdapter, *, pass_at: float, name: str) -> None:
        super().__init__(adapter, "The output means the same as the reference.", include_input=False, name=name)
        self._pass_at = pass_at

    async def score(self, case: Case) -> Score:
        """Embed the output and all references in one call."""
        references = _references(self.reference(case))
        guarded = self.guarded(case)
        if guarded is not None:
            return guarded
        model = self.adapter
        if not isinstance(model, BaseAdapter):
            raise ConfigurationError(f"{self.name!r} needs an adapter with embed(), such as OpenAIAdapter")
        texts = [str(case.output), *references]
        vectors = await model.embed(texts, session=case.recorder, actor=JUDGE, prompt_name=self.name)
        best = max(cosine(vectors[0], reference) for reference in vectors[1:])
        value = min(max(best, 0.0), 1.0)
        details = {"judge_model": model.model}
        metrics = [Metric("cosine", best, higher_is_better=True, bounds=COSINE)]
        reason = f"cosine {best:.3f}, needed {self._pass_at:g}"
        return self.verdict(value, value >= self._pass_at, reason, details, metrics)


def _references(expected: Any) -> list[str]:
    texts = [expected] if isinstance(expected, str) else list(expected) if isinstance(expected, Collection) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise TypeError(f"the expected value of semantic_similarity must be one text or more (got {expected!r})")
    return texts


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors.

    Raises:
        ModelError: one of them is 0, and has no direction.
    """
    product = math.sumprod(one, other)
    lengths = math.hypot(*one) * math.hypot(*other)
    if not lengths:
        raise ModelError("an embedding must not be all zeros: it has no direction to compare")
    return min(max(product / lengths, -1.0), 1.0)  # Rounding may leave the range.


def semantic_similarity(
    adapter: BaseAdapter, *, pass_at: float = 0.8, name: str = "semantic similarity"
) -> SemanticSimilarity:
    """The cosine similarity of the output and the best reference, from 0 to 1, by an embedding model.

    Thresholds depend on the model: look at a few pairs of your own before you choose one. Reimers and Gurevych (2019),
    Sentence-BERT, arXiv:1908.10084.

    Args:
        adapter: An adapter with embeddings, as `OpenAIAdapter("text-embedding-3-small")`.
        pass_at: The similarity from which it passes.
        name: Its name in reports.
    """
    if not 0.0 <= pass_at <= 1.0:
        raise ConfigurationError(f"pass_at of semantic_similarity must be from 0 to 1 (got {pass_at})")
    return SemanticSimilarity(adapter, pass_at=pass_at, name=name)
