"""A report as a person reads it. Text that models or users wrote is shown as text, never as markup."""

from __future__ import annotations

import html
import io
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairtrial.report.adaptive import adaptive_remarks
from fairtrial.report.untrusted import plain

if TYPE_CHECKING:
    from fairtrial.report.report import EvalReport, ExperimentReport

_WIDTH = 100
_ONE = {"task_error": "task error", "scorer_error": "scorer error", "timeout": "timeout", "dead_letter": "dead letter"}


def rate(value: float | None) -> str:
    """A share as people read it; "-" where it is undefined."""
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """A mean; "-" where it is undefined."""
    return "-" if value is None else f"{value:.3f}"


def duration(milliseconds: float | None) -> str:
    """A time in the unit that suits it."""
    if milliseconds is None:
        return "-"
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:.1f} s" if milliseconds < 120_000 else f"{milliseconds / 60_000:.1f} min"


def money(value: float | None) -> str:
    """A cost in US dollars; "-" where no price is known."""
    return "-" if value is None else f"${value:.4f}" if value < 1 else f"${value:,.2f}"


def _errors(report: EvalReport | ExperimentReport) -> str:
    parts = [f"{count:,} {_ONE[name]}{'' if count == 1 else 's'}" for name, count in report.errors.items()]
    if report.not_run:
        parts.append(f"{report.not_run:,} not run")
    return ", ".join(parts) or "none"


def _heading(report: EvalReport) -> Text:
    run = report.run
    took = "" if run.finished_at is None else f" in {duration((run.finished_at - run.created_at) * 1000)}"
    return Text.assemble(
        (plain(run.suite), "bold"),
        f"  run {run.run_id}, {report.status}{took}\n",
        (
            f"dataset {plain(run.dataset_name)} ({run.dataset_size:,} samples), "
            f"{report.total:,} of {report.planned:,} trials"
            + (f", {run.repeats} repeats" if run.repeats > 1 else "")
            + f", scored by {plain(run.evaluator)}",
            "dim",
        ),
    )


def _main_table(report: EvalReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("experiment", "scored", "pass rate", "errors as failures", "mean score", "latency", "tokens", "cost"):
        table.add_column(title, justify="left" if title == "experiment" else "right", no_wrap=title == "experiment")
    for name in report.experiments:
        part = report[name]
        table.add_row(
            plain(name),
            f"{part.successful:,}/{part.planned:,}",
            rate(part.pass_rate),
            rate(part.pass_rate_all),
            number(part.mean_score),
            duration(part.mean_latency_ms),
            f"{part.total_tokens:,}" if part.total_tokens else "-",
            money(part.cost_usd),
        )
    return table


def _criteria(report: EvalReport) -> Table | None:
    means = {name: report[name].scores_by_criterion for name in report.experiments}
    criteria = list(dict.fromkeys(criterion for found in means.values() for criterion in found))
    if not criteria:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("criterion")
    for name in report.experiments:
        table.add_column("mean" if len(report.experiments) == 1 else plain(name), justify="right")
    for criterion in criteria:
        table.add_row(plain(criterion), *(number(means[name].get(criterion)) for name in report.experiments))
    return table


def _remarks(report: EvalReport) -> Text:
    lines = []
    for name in report.experiments:
        part = report[name]
        label = f"{plain(name)}: " if len(report.experiments) > 1 else ""
        lines.append(f"{label}errors: {_errors(part)}")
        if part.totals.slowest is not None and part.totals.latency_max:
            lines.append(f"{label}slowest: {plain(part.totals.slowest)}, {duration(part.totals.latency_max)}")
    if report.status == "unscored":
        count = report.errors.get("scorer_error", 0)
        lines.append(f"{count:,} trials could not be scored; the same command again scores them without their task")
    stopped = report.run.notes.get("stopped")
    if stopped:
        lines.append(f"ended early: {plain(str(stopped))}")
    lines.extend(plain(line) for line in adaptive_remarks(report.run))
    if report.run.notes.get("code_changed"):
        lines.append("the code changed while this run was unfinished: its results mix both versions")
    return Text("\n".join(lines))


def as_renderable(report: EvalReport) -> RenderableType:
    """The report for a rich console."""
    criteria = _criteria(report)
    parts: list[RenderableType] = [_heading(report), "", _main_table(report), ""]
    if criteria is not None:
        parts += [criteria, ""]
    return Group(*parts, _remarks(report))


def as_text(report: EvalReport, *, width: int = _WIDTH) -> str:
    """The report as plain text."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(as_renderable(report))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def as_html(report: EvalReport) -> str:
    """The report for a notebook."""
    return f'<pre style="line-height:1.25">{html.escape(as_text(report))}</pre>'
