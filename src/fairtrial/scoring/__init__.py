"""Evaluators: plain functions that turn an output, and the session behind it, into a score."""

from typing import TYPE_CHECKING

from fairtrial.base.lazy import lazy_names
from fairtrial.scoring.behaviour import (
    SessionEvaluator,
    all_tools_succeeded,
    slice_contains,
    token_usage_under,
    tool_call_count,
    tool_called,
    tool_calls_match,
    tool_not_called,
)
from fairtrial.scoring.combine import adapt, all_of, any_of, composite, negate, threshold, weighted
from fairtrial.scoring.evaluator import Case, EvalContext, Evaluator, Scorer, evaluator, resolve
from fairtrial.scoring.score import Metric, Score
from fairtrial.scoring.structure import json_schema, json_subset, within_tolerance
from fairtrial.scoring.text import contains, exact_match, fuzzy_match, matches, one_of

if TYPE_CHECKING:
    from fairtrial.scoring.answers import (
        ChoiceQuestion,
        ChoicesShown,
        bleu,
        chrf,
        extract_choice,
        math_equal,
        multiple_choice,
        rouge,
        squad,
    )
    from fairtrial.scoring.structure import json_diff

# The scorers of benchmarks, which most suites do without.
_WHERE = {
    "ChoiceQuestion": "answers",
    "ChoicesShown": "answers",
    "bleu": "answers",
    "chrf": "answers",
    "extract_choice": "answers",
    "json_diff": "structure",
    "math_equal": "answers",
    "multiple_choice": "answers",
    "rouge": "answers",
    "squad": "answers",
}

if not TYPE_CHECKING:  # A type checker would take this to mean that every name exists.
    __getattr__, __dir__ = lazy_names(__name__, _WHERE)

__all__ = [
    "Case",
    "ChoiceQuestion",
    "ChoicesShown",
    "EvalContext",
    "Evaluator",
    "Metric",
    "Score",
    "Scorer",
    "SessionEvaluator",
    "adapt",
    "all_of",
    "all_tools_succeeded",
    "any_of",
    "bleu",
    "chrf",
    "composite",
    "contains",
    "evaluator",
    "exact_match",
    "extract_choice",
    "fuzzy_match",
    "json_diff",
    "json_schema",
    "json_subset",
    "matches",
    "math_equal",
    "multiple_choice",
    "negate",
    "one_of",
    "resolve",
    "rouge",
    "slice_contains",
    "squad",
    "threshold",
    "token_usage_under",
    "tool_call_count",
    "tool_called",
    "tool_calls_match",
    "tool_not_called",
    "weighted",
    "within_tolerance",
]
