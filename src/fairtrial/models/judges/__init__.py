"""Judges: models that score outputs, with prompts protected against injection."""

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
from fairtrial.models.judges.retrieval import (
    answer_relevance,
    context_precision,
    context_recall,
    faithfulness,
    semantic_similarity,
)
from fairtrial.models.judges.rubric import RubricItem, checklist, pairwise_judge, panel, rubric
from fairtrial.models.judges.short_answer import ShortAnswerSummary, short_answer_judge, short_answer_summary

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
