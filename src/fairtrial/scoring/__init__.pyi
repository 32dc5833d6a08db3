from fairtrial.scoring.answers import (
    ChoiceQuestion as ChoiceQuestion,
    ChoicesShown as ChoicesShown,
    bleu as bleu,
    chrf as chrf,
    extract_choice as extract_choice,
    math_equal as math_equal,
    multiple_choice as multiple_choice,
    rouge as rouge,
    squad as squad,
)
from fairtrial.scoring.behaviour import (
    SessionEvaluator as SessionEvaluator,
    all_tools_succeeded as all_tools_succeeded,
    slice_contains as slice_contains,
    token_usage_under as token_usage_under,
    tool_call_count as tool_call_count,
    tool_called as tool_called,
    tool_calls_match as tool_calls_match,
    tool_correctness as tool_correctness,
    tool_not_called as tool_not_called,
)
from fairtrial.scoring.combine import (
    adapt as adapt,
    all_of as all_of,
    any_of as any_of,
    composite as composite,
    negate as negate,
    threshold as threshold,
    weighted as weighted,
)
from fairtrial.scoring.evaluator import (
    Case as Case,
    EvalContext as EvalContext,
    Evaluator as Evaluator,
    Scorer as Scorer,
    evaluator as evaluator,
    resolve as resolve,
)
from fairtrial.scoring.golden import (
    GOLDEN_RULES as GOLDEN_RULES,
    GOLDEN_SETS as GOLDEN_SETS,
    golden_set as golden_set,
    replay as replay,
)
from fairtrial.scoring.pii import pii_leakage as pii_leakage
from fairtrial.scoring.score import Metric as Metric, Score as Score
from fairtrial.scoring.structure import (
    json_correctness as json_correctness,
    json_diff as json_diff,
    json_schema as json_schema,
    json_subset as json_subset,
    within_tolerance as within_tolerance,
)
from fairtrial.scoring.text import (
    contains as contains,
    exact_match as exact_match,
    fuzzy_match as fuzzy_match,
    matches as matches,
    one_of as one_of,
)

__all__: list[str]
