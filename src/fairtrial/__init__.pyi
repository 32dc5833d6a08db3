from fairtrial._version import __version__ as __version__
from fairtrial.data import Attachment as Attachment, Dataset as Dataset, Sample as Sample
from fairtrial.data.session import (
    ChatMessage as ChatMessage,
    PromptExecuted as PromptExecuted,
    Session as Session,
    SessionView as SessionView,
    TokenUsage as TokenUsage,
    ToolCall as ToolCall,
    ToolInvoked as ToolInvoked,
    Trajectory as Trajectory,
)
from fairtrial.errors import ConfigurationError as ConfigurationError, FairtrialError as FairtrialError
from fairtrial.models import (
    AnthropicAdapter as AnthropicAdapter,
    OpenAIAdapter as OpenAIAdapter,
    ScriptedAdapter as ScriptedAdapter,
    agent_task as agent_task,
    prompt_task as prompt_task,
)
from fairtrial.models.judges import llm_judge as llm_judge
from fairtrial.reports import (
    AnalysisPlan as AnalysisPlan,
    EvalReport as EvalReport,
    ExperimentReport as ExperimentReport,
    GateRules as GateRules,
)
from fairtrial.reports.calibrate.calibrate import calibrate as calibrate
from fairtrial.reports.compare.compare import compare as compare
from fairtrial.reports.gate.gate import gate as gate
from fairtrial.reports.leaderboard.leaderboard import leaderboard as leaderboard
from fairtrial.reports.plan.plan import plan as plan
from fairtrial.scoring import (
    EvalContext as EvalContext,
    Evaluator as Evaluator,
    Metric as Metric,
    Score as Score,
    all_of as all_of,
    any_of as any_of,
    contains as contains,
    evaluator as evaluator,
    exact_match as exact_match,
    matches as matches,
    negate as negate,
    threshold as threshold,
    tool_called as tool_called,
    weighted as weighted,
)
from fairtrial.store import Label as Label, open_store as open_store
from fairtrial.suites import EvalSuite as EvalSuite, evaluate as evaluate, evaluate_sync as evaluate_sync
from fairtrial.trials import (
    Environment as Environment,
    EvalConfig as EvalConfig,
    EvalResult as EvalResult,
    Experiment as Experiment,
    Outcome as Outcome,
    StopWhen as StopWhen,
    Task as Task,
    TrialContext as TrialContext,
    TrialKey as TrialKey,
    current_trial as current_trial,
    task as task,
)

__all__: list[str]
