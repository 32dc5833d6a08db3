"""Figures beyond those of a report: slices, calls of tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairtrial.base.frozen import EMPTY, FrozenDict, first_is
from fairtrial.data.session.events import ToolInvoked
from fairtrial.data.session.trajectory import ToolCall
from fairtrial.data.session.views import SessionView
from fairtrial.reports.figures import estimates
from fairtrial.reports.figures.slicing import SliceBy
from fairtrial.reports.figures.summaries import equally_weighted
from fairtrial.reports.report import EvalReport, ExperimentReport, source_of
from fairtrial.scoring.structure import json_schema
from fairtrial.stats import Heterogeneity, Undefined
from fairtrial.trials.result import EvalResult


def slice_estimates(
    report: EvalReport | ExperimentReport,
    slice_by: SliceBy | Sequence[SliceBy],
    *,
    cluster: str | None = None,
    level: float = 0.95,
) -> tuple[estimates.SliceEstimates, ...]:
    """Estimate every rate and mean of each slice: metadata keys, `by_input`, `by_metric` or functions of the input."""
    source = source_of(report, 'name one, as in report["terse"]')
    return estimates.slice_estimates(source, slice_by, cluster=cluster, level=level)


def slice_rate_test(report: EvalReport | ExperimentReport, by: SliceBy) -> Heterogeneity | Undefined:
    """Whether the pass rates of slices differ from each other: one test over all slices."""
    return estimates.slice_rate_test(source_of(report, 'name one, as in report["terse"]'), by)


@first_is(int)
@dataclass(frozen=True, slots=True)
class ToolCallFigures:
    """The counts over all results, and the figures that follow from them; those that are not defined are None.

    Attributes:
        called: Trials in which a call was expected and made.
        needless: Trials in which none was expected and one was made.
        missed: Trials in which a call was expected and none was made.
        refrained: Trials in which none was expected and none was made.
        unscored: Trials that ended in an error, which say nothing about the decision and are left out.
        calls: The calls that were made.
        valid: Those of a known tool whose arguments are valid under its schema.
        problems: The number of invalid calls for each reason.
    """

    called: int
    needless: int
    missed: int
    refrained: int
    unscored: int
    calls: int
    valid: int
    problems: Mapping[str, int] = EMPTY

    @property
    def precision(self) -> float | None:
        """The share of trials with a call in which one was expected."""
        return _share(self.called, self.called + self.needless)

    @property
    def recall(self) -> float | None:
        """The share of trials with an expected call in which one was made."""
        return _share(self.called, self.called + self.missed)

    @property
    def f1(self) -> float | None:
        """The F1 of the decision over the corpus, which is not the mean of a figure per trial."""
        return _share(2 * self.called, 2 * self.called + self.needless + self.missed)

    @property
    def schema_accuracy(self) -> float | None:
        """The share of calls that are valid."""
        return _share(self.valid, self.calls)


def tool_call_figures(
    results: Iterable[EvalResult[Any]],
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    expects_call: Callable[[EvalResult[Any]], bool] | None = None,
) -> ToolCallFigures:
    """Measure over a corpus whether models call tools when they should, and whether their calls are valid.

    Args:
        results: Results with sessions, such as `report.results`.
        schemas: The JSON Schema of the arguments of each tool, by name. A call of another tool is invalid.
        expects_call: Whether a trial should call a tool; by default whether the `expected` of its sample is neither
            None nor empty, which is what `tool_calls_match` reads.
    """
    validators = {name: json_schema(schema) for name, schema in schemas.items()}
    decisions: Counter[tuple[bool, bool]] = Counter()
    problems: Counter[str] = Counter()
    unscored = made = 0
    for result in equally_weighted(results, "the share of tool calls"):
        if not result.success:
            unscored += 1
            continue
        calls = _calls(result.session)
        wanted = bool(result.sample.expected) if expects_call is None else bool(expects_call(result))
        decisions[wanted, bool(calls)] += 1
        made += len(calls)
        for call in calls:
            validator = validators.get(call.name)
            if validator is None:
                problems[f"unknown tool {call.name!r}"] += 1
            elif not (verdict := validator(dict(call.arguments), None)).passed:
                problems[f"{call.name}: {verdict.reason}"] += 1
    return ToolCallFigures(
        decisions[True, True],
        decisions[False, True],
        decisions[True, False],
        decisions[False, False],
        unscored,
        made,
        made - problems.total(),
        FrozenDict(problems),
    )


def _calls(session: SessionView) -> Sequence[ToolCall]:
    """Return the calls that the model asked for; without a transcript, those that were executed."""
    asked = [call for message in session.trajectory.messages for call in message.tool_calls]
    return asked or [ToolCall(call.name, call.params or EMPTY) for call in session[ToolInvoked].all()]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
