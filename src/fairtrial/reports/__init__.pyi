from fairtrial.reports.calibrate.calibrate import Calibration as Calibration
from fairtrial.reports.compare.comparison import Comparison as Comparison
from fairtrial.reports.figures.analysis_plan import AnalysisPlan as AnalysisPlan
from fairtrial.reports.figures.rules import GateRules as GateRules, SliceRule as SliceRule
from fairtrial.reports.figures.slicing import by_input as by_input, by_metric as by_metric
from fairtrial.reports.figures.summaries import group_by as group_by, summarize as summarize
from fairtrial.reports.gate.gate import GateResult as GateResult
from fairtrial.reports.leaderboard.table import Leaderboard as Leaderboard
from fairtrial.reports.plan.plan import SamplePlan as SamplePlan
from fairtrial.reports.report import EvalReport as EvalReport, ExperimentReport as ExperimentReport
from fairtrial.reports.report.results import Results as Results, TrialTable as TrialTable
from fairtrial.reports.tool_calls import ToolCallFigures as ToolCallFigures, tool_call_figures as tool_call_figures
from fairtrial.reports.watch.alarm import watch_alarm as watch_alarm
from fairtrial.reports.watch.watched import WatchAlarm as WatchAlarm

__all__: list[str]
