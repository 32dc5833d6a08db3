"""Fairtrial: evaluate prompts, agents and models; get numbers you can defend."""

from typing import TYPE_CHECKING

from fairtrial._version import __version__
from fairtrial.base.lazy import lazy_names
from fairtrial.data import Attachment, BlobFolder, Dataset, Sample, load_jsonl
from fairtrial.data.session import (
    ChatMessage,
    PromptExecuted,
    Retrieved,
    Session,
    SessionView,
    SliceView,
    TokenUsage,
    ToolCall,
    ToolInvoked,
    Trajectory,
    restore_session,
)
from fairtrial.errors import (
    CodecError,
    ConfigurationError,
    DataError,
    DatasetError,
    EnvironmentMismatchError,
    FairtrialError,
    MissingExtraError,
    ModelError,
    RunBusyError,
    RunMismatchError,
    SessionError,
    StoreError,
    StoreUnavailableError,
    UnknownRunError,
)
from fairtrial.scoring import (
    EvalContext,
    Evaluator,
    Metric,
    Score,
    SessionEvaluator,
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
    from fairtrial.fleet import (
        EvalLoop,
        EvalRequest,
        MainLoop,
        collect_results,
        submit_dataset,
    )
    from fairtrial.fleet import EvalLoopConfig as EvalLoopConfig
    from fairtrial.fleet import MainLoopRequest as MainLoopRequest
    from fairtrial.fleet import MainLoopResult as MainLoopResult
    from fairtrial.fleet import collect_results_sync as collect_results_sync
    from fairtrial.fleet import submit_dataset_sync as submit_dataset_sync
    from fairtrial.integrations.tracing.recording import (
        record_anthropic,
        record_openai,
    )
    from fairtrial.models import (
        AnthropicAdapter,
        MarkdownSection,
        OpenAIAdapter,
        Prompt,
        PromptTemplate,
        ProviderAdapter,
        ScriptedAdapter,
        agent_task,
        choice_task,
        prompt_task,
    )
    from fairtrial.models.judges import (
        answer_relevance,
        check_judge,
        check_judge_sync,
        checklist,
        context_precision,
        context_recall,
        faithfulness,
        label_judge,
        llm_judge,
        numeric_judge,
        pairwise_judge,
        panel,
        rubric,
        semantic_similarity,
        short_answer_judge,
    )
    from fairtrial.reports import (
        EvalReport,
        ExperimentReport,
        group_by,
        summarize,
    )
    from fairtrial.reports.calibrate.calibrate import (
        Calibration,
        calibrate,
    )
    from fairtrial.reports.compare.compare import (
        Comparison,
        compare,
    )
    from fairtrial.reports.figures.analysis_plan import (
        AnalysisPlan,
    )
    from fairtrial.reports.figures.rules import (
        GateRules,
        SliceRule,
    )
    from fairtrial.reports.figures.slicing import (
        by_input,
        by_metric,
    )
    from fairtrial.reports.gate.gate import (
        GateResult,
        gate,
    )
    from fairtrial.reports.leaderboard.leaderboard import (
        Leaderboard,
        leaderboard,
    )
    from fairtrial.reports.plan.plan import (
        SamplePlan,
        plan,
    )
    from fairtrial.runs import (
        EvalRunCompleted,
        EvalRunStarted,
        Observer,
        SampleEvaluated,
        TrialStarted,
    )
    from fairtrial.scoring import (
        ChoiceQuestion,
        bleu,
        chrf,
        json_diff,
        math_equal,
        multiple_choice,
        rouge,
        squad,
    )
    from fairtrial.store import (
        Label,
        RunStore,
        open_store,
    )
    from fairtrial.suites import (
        EvalSuite,
        evaluate,
        evaluate_sync,
    )
    from fairtrial.testing import (
        assert_eval,
        eval_test,
    )

# What only runs and reports need is loaded when it is first asked for: tests of evaluators stay quick to start.
_LATER = {
    "reports.figures.analysis_plan": ("AnalysisPlan",),
    "reports.figures.rules": (
        "GateRules",
        "SliceRule",
    ),
    "reports.figures.slicing": (
        "by_input",
        "by_metric",
    ),
    "fleet": (
        "EvalLoop",
        "EvalRequest",
        "MainLoop",
        "collect_results",
        "submit_dataset",
    ),
    "models.judges": (
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
    ),
    "models": (
        "AnthropicAdapter",
        "MarkdownSection",
        "OpenAIAdapter",
        "Prompt",
        "PromptTemplate",
        "ProviderAdapter",
        "ScriptedAdapter",
        "agent_task",
        "choice_task",
        "prompt_task",
    ),
    "reports": (
        "EvalReport",
        "ExperimentReport",
        "group_by",
        "summarize",
    ),
    "reports.calibrate.calibrate": (
        "Calibration",
        "calibrate",
    ),
    "reports.compare.compare": (
        "Comparison",
        "compare",
    ),
    "reports.gate.gate": (
        "GateResult",
        "gate",
    ),
    "reports.leaderboard.leaderboard": (
        "Leaderboard",
        "leaderboard",
    ),
    "reports.plan.plan": (
        "SamplePlan",
        "plan",
    ),
    "runs": (
        "EvalRunCompleted",
        "EvalRunStarted",
        "Observer",
        "SampleEvaluated",
        "TrialStarted",
    ),
    "scoring": (
        "ChoiceQuestion",
        "bleu",
        "chrf",
        "json_diff",
        "math_equal",
        "multiple_choice",
        "rouge",
        "squad",
    ),
    "store": (
        "Label",
        "RunStore",
        "open_store",
    ),
    "suites": (
        "EvalSuite",
        "evaluate",
        "evaluate_sync",
    ),
    "testing": (
        "assert_eval",
        "eval_test",
    ),
    "integrations.tracing.recording": (
        "record_anthropic",
        "record_openai",
    ),
}
_HOME = {name: module for module, names in _LATER.items() for name in names}
_REPLACED = {
    "EvalLoopConfig": "fairtrial.fleet.EvalLoopConfig",
    "MainLoopRequest": "fairtrial.fleet.MainLoopRequest",
    "MainLoopResult": "fairtrial.fleet.MainLoopResult",
    "collect_results_sync": "fairtrial.fleet.collect_results_sync",
    "submit_dataset_sync": "fairtrial.fleet.submit_dataset_sync",
}


if not TYPE_CHECKING:  # A type checker would take this to mean that every name exists.
    __getattr__ = lazy_names(__name__, _HOME, _REPLACED)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AnalysisPlan",
    "AnthropicAdapter",
    "Attachment",
    "BlobFolder",
    "Calibration",
    "ChatMessage",
    "ChoiceQuestion",
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
    "Label",
    "Leaderboard",
    "MainLoop",
    "MarkdownSection",
    "Metric",
    "MissingExtraError",
    "ModelError",
    "Observer",
    "OpenAIAdapter",
    "Outcome",
    "Prompt",
    "PromptExecuted",
    "PromptTemplate",
    "ProviderAdapter",
    "Retrieved",
    "RunBusyError",
    "RunMismatchError",
    "RunStore",
    "Sample",
    "SampleEvaluated",
    "SamplePlan",
    "Score",
    "ScriptedAdapter",
    "Session",
    "SessionError",
    "SessionEvaluator",
    "SessionView",
    "SliceRule",
    "SliceView",
    "StopWhen",
    "StoreError",
    "StoreUnavailableError",
    "Task",
    "TokenUsage",
    "ToolCall",
    "ToolInvoked",
    "Trajectory",
    "TrialContext",
    "TrialKey",
    "TrialStarted",
    "UnknownRunError",
    "__version__",
    "adapt",
    "agent_task",
    "all_of",
    "all_tools_succeeded",
    "answer_relevance",
    "any_of",
    "assert_eval",
    "bleu",
    "by_input",
    "by_metric",
    "calibrate",
    "check_judge",
    "check_judge_sync",
    "checklist",
    "choice_task",
    "chrf",
    "collect_results",
    "compare",
    "composite",
    "contains",
    "context_precision",
    "context_recall",
    "current_trial",
    "eval_test",
    "evaluate",
    "evaluate_sync",
    "evaluator",
    "exact_match",
    "faithfulness",
    "fuzzy_match",
    "gate",
    "group_by",
    "json_diff",
    "json_schema",
    "json_subset",
    "label_judge",
    "leaderboard",
    "llm_judge",
    "load_jsonl",
    "matches",
    "math_equal",
    "multiple_choice",
    "negate",
    "numeric_judge",
    "one_of",
    "open_store",
    "pairwise_judge",
    "panel",
    "plan",
    "prompt_task",
    "record_anthropic",
    "record_openai",
    "restore_session",
    "rouge",
    "rubric",
    "semantic_similarity",
    "short_answer_judge",
    "slice_contains",
    "squad",
    "submit_dataset",
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
