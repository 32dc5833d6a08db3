"""Judges: models that score outputs, with prompts protected against injection."""

from fairtrial.models.judges.checklist import checklist
from fairtrial.models.judges.checks import CanaryResult, JudgeCheck, check_judge, check_judge_sync
from fairtrial.models.judges.judge import (
    PASSING_RATINGS,
    RATING_VALUES,
    JudgeOutput,
    JudgeParams,
    LLMJudge,
    Rating,
    label_judge,
    llm_judge,
    numeric_judge,
)
from fairtrial.models.judges.pairwise import pairwise_judge
from fairtrial.models.judges.panel import panel
from fairtrial.models.judges.retrieval import answer_relevance, context_precision, context_recall, faithfulness
from fairtrial.models.judges.rubric import RubricItem, rubric
from fairtrial.models.judges.short_answer import ShortAnswerSummary, short_answer_judge, short_answer_summary
from fairtrial.models.judges.similarity import semantic_similarity

__all__ = [
    "PASSING_RATINGS",
    "RATING_VALUES",
    "CanaryResult",
    "JudgeCheck",
    "JudgeOutput",
    "JudgeParams",
    "LLMJudge",
    "Rating",
    "RubricItem",
    "ShortAnswerSummary",
    "answer_relevance",
    "check_judge",
    "check_judge_sync",
    "checklist",
    "context_precision",
    "context_recall",
    "faithfulness",
    "label_judge",
    "llm_judge",
    "numeric_judge",
    "pairwise_judge",
    "panel",
    "rubric",
    "semantic_similarity",
    "short_answer_judge",
    "short_answer_summary",
]
