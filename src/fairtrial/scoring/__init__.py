"""Evaluators: plain functions that turn an output, and the session behind it, into a score."""

from fairtrial.scoring.behaviour import (
    SessionEvaluator,
    all_tools_succeeded,
    slice_contains,
    token_usage_under,
    tool_call_count,
    tool_called,
    tool_not_called,
)
from fairtrial.scoring.choice import ChoiceQuestion, ChoicesShown, extract_choice, multiple_choice
from fairtrial.scoring.combine import adapt, all_of, any_of, composite, negate, threshold, weighted
from fairtrial.scoring.evaluator import Case, EvalContext, Evaluator, Scorer, evaluator, resolve
from fairtrial.scoring.json_difference import json_diff
from fairtrial.scoring.mathematics import math_equal
from fairtrial.scoring.numeric import within_tolerance
from fairtrial.scoring.overlap import bleu, chrf, rouge
from fairtrial.scoring.score import Metric, Score
from fairtrial.scoring.squad import squad
from fairtrial.scoring.structure import json_schema, json_subset
from fairtrial.scoring.text import contains, exact_match, fuzzy_match, matches, one_of
from fairtrial.scoring.tool_calls import tool_calls_match

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
