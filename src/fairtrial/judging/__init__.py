"""Models that score: judges whose questions cannot be rewritten by what they judge."""

from fairtrial.judging.checklist import checklist
from fairtrial.judging.checks import CanaryResult, JudgeCheck, check_judge
from fairtrial.judging.judge import RATING_VALUES, JudgeOutput, LLMJudge, Rating, label_judge, llm_judge, numeric_judge
from fairtrial.judging.pairwise import pairwise_judge
from fairtrial.judging.panel import panel

__all__ = [
    "RATING_VALUES",
    "CanaryResult",
    "JudgeCheck",
    "JudgeOutput",
    "LLMJudge",
    "Rating",
    "check_judge",
    "checklist",
    "label_judge",
    "llm_judge",
    "numeric_judge",
    "pairwise_judge",
    "panel",
]
