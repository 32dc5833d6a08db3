"""Judges of retrieval, and similarity of texts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairtrial.data.session.events import Retrieved
from fairtrial.data.session.views import JUDGE
from fairtrial.errors import ConfigurationError, ModelError, NothingToScoreError, OutputParseError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.base import BaseAdapter
from fairtrial.models.judges.judge import Judging, is_empty
from fairtrial.scoring.evaluator import Case
from fairtrial.scoring.score import SHARE, Metric, Score

COSINE = (-1.0, 1.0)
"""The bounds of a cosine."""


class SemanticSimilarity(Judging):
    """Compares the embeddings of the output and of its references."""

    __slots__ = ()

    async def score(self, case: Case) -> Score:
        """Embed the output and all references in one call."""
        references = _references(self.reference(case))
        if is_empty(case.output):
            return self.empty()
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
    criterion = "The output means the same as the reference."
    return SemanticSimilarity(adapter, criterion, include_input=False, pass_at=pass_at, name=name)


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement of a text, the reason, and whether the documents support it."""

    claim: str
    reason: str
    supported: Literal["yes", "no"]


@dataclass(frozen=True, slots=True)
class ClaimsOutput:
    """All statements of a text."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class DocumentVerdict:
    """The verdict on one document: its number, the reason, and whether it is useful."""

    document: int
    reason: str
    useful: Literal["yes", "no"]


@dataclass(frozen=True, slots=True)
class DocumentsOutput:
    """The verdicts on all documents."""

    documents: tuple[DocumentVerdict, ...]


@dataclass(frozen=True, slots=True)
class QuestionsOutput:
    """The questions that a text answers, and whether it avoids an answer."""

    questions: tuple[str, ...]
    evasive: Literal["yes", "no"]


_CLAIMS = (
    "Split the {text} into its statements of fact: short sentences that can be understood on their own, with every "
    "pronoun replaced. Leave out questions, greetings and remarks about itself. Then decide for each statement whether "
    "it follows from the retrieved documents alone. What you know otherwise does not count.\n\n"
    'Answer with a JSON object {{"claims": [...]}} that holds one object for each statement: "claim", the statement, '
    'then "reason", one sentence, then "supported", "yes" or "no". The list is empty if there is no statement.'
)
_DOCUMENTS = (
    "Decide for each retrieved document, in order, whether it contains something that helps to arrive at the {text} to "
    "the input.\n\n"
    'Answer with a JSON object {{"documents": [...]}} that holds one object for each document: "document", its number '
    'from 1, then "reason", one sentence, then "useful", "yes" or "no".'
)
_QUESTIONS = (
    "Write {count} different questions to which the output to assess would be a direct and complete answer. Do not "
    "guess at what was asked: use the output alone.\n\n"
    'Answer with a JSON object: "questions", a list of {count} questions, then "evasive", "yes" if the output '
    'declines, is vague or says that it does not know, else "no".'
)


def retrieved_documents(case: Case) -> list[str] | None:
    """Return the retrieved documents, in the order of retrieval, each once; None if no retrieval was recorded."""
    events = case.session[Retrieved].all()
    return list(dict.fromkeys(document for event in events for document in event.documents)) if events else None


_NOT_RETRIEVED = "nothing was retrieved; the judge was not asked"


class RetrievalJudge(Judging):
    """The base class of judges that read `Retrieved` events."""

    __slots__ = ()

    def __init__(self, adapter: ProviderAdapter | None, criterion: str, *, pass_at: float, name: str) -> None:
        if not 0.0 <= pass_at <= 1.0:
            raise ConfigurationError(f"pass_at of {name!r} must be from 0 to 1 (got {pass_at})")
        super().__init__(adapter, criterion, include_input=True, pass_at=pass_at, name=name)
        self.needs_session = True

    def documents(self, case: Case) -> list[str]:
        """Return the retrieved documents, in the order of retrieval, each once."""
        documents = retrieved_documents(case)
        if documents is None:
            raise NothingToScoreError(
                f"judge {self.name!r} needs what was retrieved, and the session has no Retrieved event\n"
                "record it in the task: ctx.session.record(Retrieved(query, documents))"
            )
        return documents

    def supported(self, case: Case, claims: Sequence[Claim], text: str, asked: tuple[Any, str]) -> Score:
        """Return the score of the share of supported statements.

        Raises:
            NothingToScoreError: there is no statement. A share of nothing is neither 0 nor 1.
        """
        if not claims:
            raise NothingToScoreError(f"judge {self.name!r} found no statement in the {text}, so there is no share")
        missed = [claim.claim for claim in claims if claim.supported == "no"]
        held = len(claims) - len(missed)
        metrics = [Metric("claims", len(claims)), Metric("supported", held, higher_is_better=True)]
        reason = "; ".join(f"not supported: {claim}" for claim in missed)[:2000]
        return self.share(case, held / len(claims), reason, asked, metrics)


class Faithfulness(RetrievalJudge):
    """The share of the output's statements that the documents support."""

    __slots__ = ()

    async def score(self, case: Case) -> Score:
        """Ask for all statements and their support in one call."""
        documents = self.documents(case)
        if is_empty(case.output):
            return self.empty()
        pieces = {"input": case.sample.input, "retrieved_documents": documents, "output_to_assess": case.output}
        question = _CLAIMS.format(text="output to assess")
        completion, output, asked = await self.ask(case, pieces, question, ClaimsOutput)
        return self.supported(case, output.claims, "output", (completion, asked))


class ContextRecall(RetrievalJudge):
    """The share of the reference's statements that the documents support."""

    __slots__ = ()

    async def score(self, case: Case) -> Score:
        """Ask for all statements and their support in one call."""
        documents, reference = self.documents(case), self.reference(case)
        if not documents:
            return self.verdict(0.0, False, _NOT_RETRIEVED)
        pieces = {"input": case.sample.input, "retrieved_documents": documents, "reference_answer": reference}
        question = _CLAIMS.format(text="reference answer")
        completion, output, asked = await self.ask(case, pieces, question, ClaimsOutput)
        return self.supported(case, output.claims, "reference answer", (completion, asked))


class ContextPrecision(RetrievalJudge):
    """The average precision of the ranking of the documents."""

    __slots__ = ()

    async def score(self, case: Case) -> Score:
        """Ask about all documents in one call."""
        documents, reference = self.documents(case), self.reference(case)
        if not documents:
            return self.verdict(0.0, False, _NOT_RETRIEVED)
        numbered = {str(number): document for number, document in enumerate(documents, 1)}
        pieces = {"input": case.sample.input, "retrieved_documents": numbered, "reference_answer": reference}
        question = _DOCUMENTS.format(text="reference answer")
        completion, output, asked = await self.ask(case, pieces, question, DocumentsOutput)
        numbers = [verdict.document for verdict in output.documents]
        self.check_numbers("documents", numbers, len(documents), completion)
        useful = [verdict.useful == "yes" for verdict in output.documents]
        missed = [str(number) for number, good in enumerate(useful, 1) if not good]
        reason = f"not useful: documents {', '.join(missed)}" if missed else ""
        metrics = [Metric("documents", len(useful)), Metric("useful", sum(useful), higher_is_better=True)]
        return self.share(case, average_precision(useful), reason, (completion, asked), metrics)


class AnswerRelevance(Judging):
    """How similar the questions that an output answers are to the input."""

    __slots__ = ("_count", "_embedder")

    def __init__(
        self, adapter: ProviderAdapter | None, embedder: BaseAdapter, *, count: int, pass_at: float, name: str
    ) -> None:
        if count < 1 or not 0.0 <= pass_at <= 1.0:
            raise ConfigurationError(
                f"answer_relevance: questions must be at least 1 and pass_at from 0 to 1 (got {count}, {pass_at})"
            )
        super().__init__(adapter, "The output answers the input.", include_input=False, pass_at=pass_at, name=name)
        self._embedder, self._count = embedder, count

    async def score(self, case: Case) -> Score:
        """Ask for questions without showing the input, then compare them with it."""
        if is_empty(case.sample.input):
            raise NothingToScoreError(f"the sample has no input, with which judge {self.name!r} compares")
        if is_empty(case.output):
            return self.empty()
        question = _QUESTIONS.format(count=self._count)
        completion, output, asked = await self.ask(case, {"output_to_assess": case.output}, question, QuestionsOutput)
        written = [text for text in output.questions if text.strip()]
        if not written:
            raise OutputParseError(f"judge {self.name!r} must write questions (got none)", raw=completion.raw)
        vectors = await self._embedder.embed(
            [str(case.sample.input), *written], session=case.recorder, actor=JUDGE, prompt_name=self.name
        )
        similar = math.fsum(cosine(vectors[0], vector) for vector in vectors[1:]) / len(written)
        evasive = output.evasive == "yes"
        value = 0.0 if evasive else min(max(similar, 0.0), 1.0)
        reason = "the output is evasive" if evasive else f"mean similarity {similar:.3f}, needed {self._pass_at:g}"
        metrics = [
            Metric("similarity", similar, higher_is_better=True, bounds=COSINE),
            Metric("evasive", float(evasive), higher_is_better=False, bounds=SHARE),
        ]
        return self.share(case, value, reason, (completion, asked), metrics)


def average_precision(useful: Sequence[bool]) -> float:
    """Return the mean of precision@k over the places k of useful documents; 0 if none is useful."""
    precisions = [sum(useful[:place]) / place for place, good in enumerate(useful, 1) if good]
    return math.fsum(precisions) / len(precisions) if precisions else 0.0


def faithfulness(adapter: ProviderAdapter, *, pass_at: float = 1.0, name: str = "faithfulness") -> Faithfulness:
    """The share of the output's statements that follow from the retrieved documents. Es et al. (2024)."""
    return Faithfulness(adapter, "The output follows from what was retrieved.", pass_at=pass_at, name=name)


def answer_relevance(
    adapter: ProviderAdapter,
    embedder: BaseAdapter,
    *,
    questions: int = 3,
    pass_at: float = 0.7,
    name: str = "answer relevance",
) -> AnswerRelevance:
    """How well the output answers the input, whether it is true or not. Es et al. (2024).

    A model writes questions that the output answers; the value is their mean cosine similarity with the input. An
    output that avoids an answer has the value 0.

    Args:
        adapter: The judge's model.
        embedder: An adapter with embeddings, as `OpenAIAdapter("text-embedding-3-small")`.
        questions: The number of questions.
        pass_at: The similarity from which it passes; it depends on the embedding model.
        name: Its name in reports.
    """
    return AnswerRelevance(adapter, embedder, count=questions, pass_at=pass_at, name=name)


def context_precision(
    adapter: ProviderAdapter, *, pass_at: float = 0.5, name: str = "context precision"
) -> ContextPrecision:
    """Whether useful documents were retrieved first: the average precision of their ranking, given the right answer."""
    return ContextPrecision(adapter, "Useful documents are retrieved first.", pass_at=pass_at, name=name)


def context_recall(adapter: ProviderAdapter, *, pass_at: float = 1.0, name: str = "context recall") -> ContextRecall:
    """The share of the reference answer's statements that follow from the retrieved documents."""
    return ContextRecall(adapter, "All that the answer needs is retrieved.", pass_at=pass_at, name=name)
