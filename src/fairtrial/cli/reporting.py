"""Print the report of a run, and commands to run next."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from fairtrial.base.formatting import cost, duration, money, number, rate

if TYPE_CHECKING:
    from fairtrial.cli.names import RunName
    from fairtrial.reports import EvalReport, ExperimentReport
    from fairtrial.reports.compare.compare import Comparison
    from fairtrial.reports.renderable import Renderable
    from fairtrial.store.protocol import RunRecord, RunStore

__all__ = ["cost", "duration", "money", "number", "rate", "report_record", "show_report"]


def report_record(store: RunStore, named: RunName) -> dict[str, Any]:
    """Return the JSON of a report; docs/reference/json.md describes it."""
    return record_of(_report(store, named))


def record_of(rendered: Renderable) -> dict[str, Any]:
    """Return the JSON of a report, a comparison or a gate decision."""
    return dict(rendered.to_json())


def _report(store: RunStore, named: RunName) -> EvalReport | ExperimentReport:
    from fairtrial.reports import EvalReport

    report = EvalReport(store, named.run)
    return report if named.experiment is None else report[named.experiment]


def compared(report: EvalReport) -> Comparison:
    """Compare the experiments of a report with its first."""
    from fairtrial.reports.compare.compare import compare

    first, *others = (report[name] for name in report.experiments)
    return compare(first, *others)


def show_report(store: RunStore, named: RunName, *, json: bool, next_commands: bool) -> None:
    """Print a report."""
    from fairtrial.cli.screen import commands, out, print_json
    from fairtrial.reports import EvalReport

    if json:
        print_json(report_record(store, named))
        return
    console = out()
    console.print(_report(store, named))
    if next_commands:
        rows = follow_ups(EvalReport(store, named.run))
        if rows:
            console.print()
            commands(console, "next", rows)


def follow_ups(report: EvalReport) -> list[tuple[str, str]]:
    """Return useful next commands after this report."""
    from fairtrial.reports.rerun import resume_command
    from fairtrial.store.protocol import RESUMABLE

    run: RunRecord = report.run
    name = shlex.quote(run.suite)
    rows: list[tuple[str, str]] = []
    if run.status in RESUMABLE:
        cap = run.noted.cost_cap_usd
        if cap is not None:
            rows.append((resume_command(run, max_cost=2 * cap), "resume with a higher limit"))
        else:
            rows.append((resume_command(run), "resume the run"))
    failed = len(report.failed_samples()) + sum(report.errors.values())
    if failed:
        rows.append((f"fairtrial failures {name}", "failed trials, and why"))
        sample = _worst(report)
        if sample is not None:
            rows.append((f"fairtrial show {name} --sample {shlex.quote(sample)}", "one trial in full"))
    if len(run.experiments) > 2:
        rows.append((f"fairtrial leaderboard {name}", "which is best?"))
    elif len(run.experiments) == 2:
        pair = " ".join(shlex.quote(f"{run.suite}:{experiment}") for experiment in run.experiments)
        rows.append((f"fairtrial compare {pair}", "a real difference?"))
    return rows


def _worst(report: EvalReport) -> str | None:
    from fairtrial.reports.render.safe_text import plain

    first = next(iter(report.failed_samples()), None)
    if first is None:
        first = next((result for result in report.results if not result.success), None)
    return None if first is None else plain(first.sample_id)
