"""Fairtrial: evaluate prompts, agents and models; get numbers you can defend."""

from importlib import import_module
from typing import TYPE_CHECKING

from fairtrial._version import __version__
from fairtrial.data import Attachment, BlobFolder, Dataset, Sample, load_jsonl
from fairtrial.errors import (
    CodecError,
    ConfigurationError,
    DataError,
    DatasetError,
    EnvironmentMismatchError,
    FairtrialError,
    MissingExtraError,
    RunMismatchError,
    SessionError,
    StoreError,
)
from fairtrial.scoring import (
    EvalContext,
    Evaluator,
    Metric,
    Score,
    adapt,
    all_of,
    all_tools_succeeded,
    any_of,
    composite,
    contains,
    evaluator,
    exact_match,
    fuzzy_match,
    json_schema,
    json_subset,
    matches,
    negate,
    one_of,
    slice_contains,
    threshold,
    token_usage_under,
    tool_call_count,
    tool_called,
    tool_calls_match,
    tool_not_called,
    weighted,
    within_tolerance,
)
from fairtrial.session import (
    ChatMessage,
    PromptExecuted,
    Session,
    SessionView,
    SliceView,
    TokenUsage,
    ToolCall,
    ToolInvoked,
    Trajectory,
    restore_session,
)
from fairtrial.trials import (
    Environment,
    EnvironmentRegistry,
    EvalConfig,
    EvalResult,
    Experiment,
    Outcome,
    StopWhen,
    Task,
    TrialContext,
    TrialKey,
    current_trial,
    task,
)

if TYPE_CHECKING:
    from fairtrial.analysis.gate_rules import GateRules
    from fairtrial.fleet import (
        EvalLoop,
        EvalLoopConfig,
        EvalRequest,
        MainLoop,
        MainLoopRequest,
        MainLoopResult,
        collect_results,
        collect_results_sync,
        submit_dataset,
        submit_dataset_sync,
    )
    from fairtrial.report import EvalReport, ExperimentReport, group_by, summarize
    from fairtrial.report.calibrate import Calibration, calibrate
    from fairtrial.report.compare import Comparison, compare
    from fairtrial.report.gate import GateResult, gate
    from fairtrial.runs import EvalRunCompleted, EvalRunStarted, Observer, SampleEvaluated, TrialStarted
    from fairtrial.store import RunStore, open_store
    from fairtrial.suites import EvalSuite, evaluate, evaluate_sync

# What only runs and reports need is loaded when it is first asked for: tests of evaluators stay quick to start.
_LATER = {
    "fairtrial.fleet": (
        "EvalLoop",
        "EvalLoopConfig",
        "EvalRequest",
        "MainLoop",
        "MainLoopRequest",
        "MainLoopResult",
        "collect_results",
        "collect_results_sync",
        "submit_dataset",
        "submit_dataset_sync",
    ),
    "fairtrial.analysis.gate_rules": ("GateRules",),
    "fairtrial.report": ("EvalReport", "ExperimentReport", "group_by", "summarize"),
    "fairtrial.report.calibrate": ("Calibration", "calibrate"),
    "fairtrial.report.compare": ("Comparison", "compare"),
    "fairtrial.report.gate": ("GateResult", "gate"),
    "fairtrial.runs": ("EvalRunCompleted", "EvalRunStarted", "Observer", "SampleEvaluated", "TrialStarted"),
    "fairtrial.store": ("RunStore", "open_store"),
    "fairtrial.suites": ("EvalSuite", "evaluate", "evaluate_sync"),
}
_HOME = {name: module for module, names in _LATER.items() for name in names}


if not TYPE_CHECKING:  # A type checker would take this to mean that every name exists.

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'fairtrial' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Attachment",
    "BlobFolder",
    "Calibration",
    "ChatMessage",
    "CodecError",
    "Comparison",
    "ConfigurationError",
    "DataError",
    "Dataset",
    "DatasetError",
    "Environment",
    "EnvironmentMismatchError",
    "EnvironmentRegistry",
    "EvalConfig",
    "EvalContext",
    "EvalLoop",
    "EvalLoopConfig",
    "EvalReport",
    "EvalRequest",
    "EvalResult",
    "EvalRunCompleted",
    "EvalRunStarted",
    "EvalSuite",
    "Evaluator",
    "Experiment",
    "ExperimentReport",
    "FairtrialError",
    "GateResult",
    "GateRules",
    "MainLoop",
    "MainLoopRequest",
    "MainLoopResult",
    "Metric",
    "MissingExtraError",
    "Observer",
    "Outcome",
    "PromptExecuted",
    "RunMismatchError",
    "RunStore",
    "Sample",
    "SampleEvaluated",
    "Score",
    "Session",
    "SessionError",
    "SessionView",
    "SliceView",
    "StopWhen",
    "StoreError",
    "Task",
    "TokenUsage",
    "ToolCall",
    "ToolInvoked",
    "Trajectory",
    "TrialContext",
    "TrialKey",
    "TrialStarted",
    "__version__",
    "adapt",
    "all_of",
    "all_tools_succeeded",
    "any_of",
    "calibrate",
    "collect_results",
    "collect_results_sync",
    "compare",
    "composite",
    "contains",
    "current_trial",
    "evaluate",
    "evaluate_sync",
    "evaluator",
    "exact_match",
    "fuzzy_match",
    "gate",
    "group_by",
    "json_schema",
    "json_subset",
    "load_jsonl",
    "matches",
    "negate",
    "one_of",
    "open_store",
    "restore_session",
    "slice_contains",
    "submit_dataset",
    "submit_dataset_sync",
    "summarize",
    "task",
    "threshold",
    "token_usage_under",
    "tool_call_count",
    "tool_called",
    "tool_calls_match",
    "tool_not_called",
    "weighted",
    "within_tolerance",
]
