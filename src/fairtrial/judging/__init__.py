"""Judges: models that score outputs, with prompts protected against injection."""

from fairtrial.judging.checklist import checklist
from fairtrial.judging.checks import CanaryResult, JudgeCheck, check_judge, check_judge_sync
from fairtrial.judging.judge import (
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
from fairtrial.judging.pairwise import pairwise_judge
from fairtrial.judging.panel import panel
from fairtrial.judging.retrieval import answer_relevance, context_precision, context_recall, faithfulness
from fairtrial.judging.rubric import RubricItem, rubric
from fairtrial.judging.short_answer import ShortAnswerSummary, short_answer_judge, short_answer_summary
from fairtrial.judging.similarity import semantic_similarity

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
