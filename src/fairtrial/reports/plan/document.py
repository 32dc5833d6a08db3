"""The document of a plan: number of samples, their cost, and the assumptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.base import formatting
from fairtrial.reports.figures.metrics import is_ratio, is_verdict
from fairtrial.reports.render.document import Cell, Column, Conclusion, Content, Document, Remarks, Table

if TYPE_CHECKING:
    from fairtrial.reports.plan.plan import PlanOption, SamplePlan


def plan_document(plan: SamplePlan) -> Document:
    """Return the document of a plan."""
    title = f"plan for {plan.suite}" if plan.suite else "plan"
    answer, _, rest = plan.sentence.partition(": ")
    test = () if plan.test_split is None else (plan.test_split.sentence,)
    return Document(title, (), (Conclusion(answer, rest, ""), _options(plan), Remarks((*test, *plan.assumptions))))


def _options(plan: SamplePlan) -> Table:
    clustered = any(option.clusters is not None for option in plan.options)
    priced = any(option.cost_usd is not None for option in plan.options)
    timed = any(option.duration_ms is not None for option in plan.options)
    present = plan.present_samples
    columns = (
        Column("repeats"),
        Column("samples"),
        *([Column("clusters")] if clustered else []),
        Column("trials"),
        *([Column("cost")] if priced else []),
        *([Column("time")] if timed else []),
        *(
            []
            if present is None
            else [Column(f"{what} with\n{formatting.count(present, 'sample')}") for what in ("SE", "detectable")]
        ),
        *([Column("cost of\nthese")] if present is not None and priced else []),
    )
    percent, relative = is_verdict(plan.metric), is_ratio(plan.metric)

    def error(value: float | None) -> str:
        return formatting.rate(value) if relative else formatting.signed(value, percent=percent).lstrip("+")

    def row(option: PlanOption) -> tuple[Content, ...]:
        chosen = option.repeats == plan.repeats
        cells = [
            f"{option.repeats:,}",
            _count(option.samples),
            *([_count(option.clusters)] if clustered else []),
            _count(option.trials),
            *([formatting.money(option.cost_usd)] if priced else []),
            *([formatting.duration(option.duration_ms)] if timed else []),
        ]
        if present is not None:
            cells += [error(option.se), error(option.detectable)]
            cells += [formatting.money(option.present_cost_usd)] if priced else []
        return tuple(Cell(cell, "good") if chosen and len(plan.options) > 1 else cell for cell in cells)

    caption = "Both sides together"
    if present is not None:
        unit = "points" if percent else "shares of the baseline" if relative else plan.metric
        caption += f"; SE: standard error of the difference, in {unit}"
    return Table(caption, columns, tuple(row(option) for option in plan.options))


def _count(number: int | None) -> str:
    return formatting.UNDEFINED if number is None else f"{number:,}"
