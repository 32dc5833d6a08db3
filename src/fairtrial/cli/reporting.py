"""The report of a run on the screen, and what to type next."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from fairtrial.report.render import duration, money, number, rate

if TYPE_CHECKING:
    from fairtrial.cli.names import RunName
    from fairtrial.report import EvalReport
    from fairtrial.store.protocol import RunRecord, RunStore

__all__ = ["duration", "money", "number", "rate", "report_facts", "show_report"]


def report_facts(store: RunStore, named: RunName) -> dict[str, Any]:
    """A report for programs."""
    from fairtrial.cli.facts import run_facts

    parts = [part for part in store.totals(named.run.run_id) if part.experiment in named.experiments]
    facts = run_facts(named.run, parts)
    means = store.metric_means(named.run.run_id)
    for part in facts["experiments"]:
        part["metrics"] = {name: mean for name, (_, mean) in means.get(part["experiment"], {}).items()}
    return {"schema": "fairtrial.report/1", "run": facts}


def show_report(store: RunStore, named: RunName, *, json: bool, next_commands: bool) -> None:
    """Print a report."""
    from fairtrial.cli.screen import commands, out, print_json
    from fairtrial.report import EvalReport

    if json:
        print_json(report_facts(store, named))
        return
    console = out()
    report = EvalReport(store, named.run)
    console.print(report)
    if next_commands:
        console.print()
        commands(console, "next", follow_ups(report))


def follow_ups(report: EvalReport) -> list[tuple[str, str]]:
    """Commands that make sense after this report."""
    from fairtrial.cli.rerun import rerun_command

    run: RunRecord = report.run
    name = run.suite
    rows: list[tuple[str, str]] = []
    if run.status in ("interrupted", "unscored"):
        rows.append((rerun_command(run), "go on where it stopped"))
    failed = len(report.failed_samples()) + sum(report.errors.values())
    if failed:
        rows.append((f"fairtrial failures {name}", f"the {failed:,} that failed, and why"))
        sample = _worst(report)
        if sample is not None:
            rows.append((f"fairtrial show {name} --sample {shlex.quote(sample)}", "one trial, whole"))
    if len(run.experiments) > 1:
        pair = " ".join(shlex.quote(f"{name}:{experiment}") for experiment in run.experiments[:3])
        rows.append((f"fairtrial compare {pair}", "is the difference real?"))
    return rows


def _worst(report: EvalReport) -> str | None:
    from fairtrial.report.untrusted import plain

    first = next(iter(report.failed_samples()), None)
    if first is None:
        first = next((result for result in report.results if not result.success), None)
    return None if first is None else plain(first.sample_id)
