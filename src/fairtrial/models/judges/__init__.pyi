from fairtrial.models.judges.checks import (
    CanaryResult as CanaryResult,
    JudgeCheck as JudgeCheck,
    check_judge as check_judge,
    check_judge_sync as check_judge_sync,
)
from fairtrial.models.judges.judge import (
    JudgeOutput as JudgeOutput,
    JudgeParams as JudgeParams,
    LLMJudge as LLMJudge,
    label_judge as label_judge,
    llm_judge as llm_judge,
    numeric_judge as numeric_judge,
)
from fairtrial.models.judges.metrics import (
    MetricJudge as MetricJudge,
    answer_correctness as answer_correctness,
    bias as bias,
    goal_reached as goal_reached,
    hallucination as hallucination,
    kept_role as kept_role,
    remembered as remembered,
    summarization as summarization,
    task_completion as task_completion,
    toxicity as toxicity,
)
from fairtrial.models.judges.retrieval import (
    answer_relevance as answer_relevance,
    context_precision as context_precision,
    context_recall as context_recall,
    faithfulness as faithfulness,
    semantic_similarity as semantic_similarity,
)
from fairtrial.models.judges.rubric import (
    RubricItem as RubricItem,
    checklist as checklist,
    pairwise_judge as pairwise_judge,
    panel as panel,
    rubric as rubric,
)
from fairtrial.models.judges.short_answer import (
    ShortAnswerSummary as ShortAnswerSummary,
    short_answer_judge as short_answer_judge,
    short_answer_summary as short_answer_summary,
)
from fairtrial.models.judges.users import (
    USER_QUESTIONS as USER_QUESTIONS,
    UserChecked as UserChecked,
    user_check as user_check,
)
from fairtrial.scoring.score import (
    PASSING_RATINGS as PASSING_RATINGS,
    RATING_VALUES as RATING_VALUES,
    Rating as Rating,
)

__all__: list[str]
