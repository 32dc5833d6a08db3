"""`fairtrial plan`: how many samples a comparison needs, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fairtrial.reports import EvalReport, ExperimentReport
    from fairtrial.reports.figures.analysis_plan import AnalysisPlan
    from fairtrial.reports.plan.plan import SamplePlan

RUNS_READ = 5
"""The newest runs of a suite that a plan is made from."""


def plan(
    history: Annotated[
        str | None,
        typer.Argument(
            metavar="[SUITE or RUN]",
            help="A suite (its newest runs), a run, or an experiment (default: worst case).",
            autocompletion=options.complete_run,
            show_default=False,
        ),
    ] = None,
    difference: Annotated[
        float | None,
        typer.Option(
            "--difference",
            metavar="SIZE",
            help="True difference to detect; 0.05 is five points (default: from [tool.fairtrial.gate]).",
        ),
    ] = None,
    power: Annotated[float, typer.Option("--power", metavar="SHARE", help="Probability of detecting it.")] = 0.8,
    repeats: Annotated[
        list[int] | None,
        typer.Option("--repeats", metavar="N", min=1, help="Number of repeats to plan for (repeatable)."),
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="passed, value, latency_ms, or a metric's name.")
    ] = "passed",
    tests: Annotated[
        int | None,
        typer.Option("--tests", metavar="N", min=1, help="Number of metrics and candidates compared together."),
    ] = None,
    alpha: Annotated[
        float, typer.Option("--alpha", metavar="SHARE", help="Accepted probability of a false alarm.")
    ] = 0.05,
    sample_cost: Annotated[
        float, typer.Option("--sample-cost", metavar="USD", min=0, help="Cost of writing one new sample.")
    ] = 0.0,
    cluster: options.Cluster = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write an analysis plan for `fairtrial run --plan` (TOML)."),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option("--margin", metavar="SHARE", min=0, help="With --write: how much worse a candidate may be."),
    ] = None,
    secondary: Annotated[
        list[str] | None,
        typer.Option("--secondary", metavar="NAME", help="With --write: also compare this metric (repeatable)."),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="KEY", help="With --write: also compare slices by this key (repeatable)."),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Plan a comparison: how many samples it needs, and their cost.

    Earlier runs tell how often two sides differed, how much repeats varied and what a trial cost; the difference they
    showed is never used. Anything the runs do not tell is assumed, and the assumption is printed. Without a suite,
    the worst case is assumed. --write makes an analysis plan of it, which states before the data what will be
    compared; --metric is then the primary metric, and --tests the number of candidates.

    \b
    Examples:
      fairtrial plan support --difference 0.05
      fairtrial plan support@3 --repeats 1 --repeats 4 --sample-cost 0.50
      fairtrial plan --difference 0.02 --power 0.9
      fairtrial plan support --difference 0.05 --margin 0.02 --write plan.toml
    """
    from fairtrial.cli.screen import out
    from fairtrial.reports.plan.plan import REPEATS
    from fairtrial.reports.plan.plan import plan as planned

    if write is None and (margin is not None or secondary or by):
        raise UserError("--margin, --secondary and --by need --write FILE", "add --write plan.toml")
    if write is not None and tests is None:
        tests = 1  # The primary metric of a plan is tested on its own.
    result = planned(
        *(() if history is None else _reports(history, store)),
        difference=_difference(metric) if difference is None else difference,
        metric=metric,
        power=power,
        alpha=alpha,
        repeats=tuple(repeats) if repeats else REPEATS,
        tests=tests,
        cluster=cluster,
        sample_cost_usd=sample_cost,
    )
    made = None if write is None else _write(write, result, margin, secondary or (), by or (), cluster)
    options.show(result, json=json)
    if made is not None and not json:
        out().print(f"\nwrote {write} (plan {made.digest[:8]}): fairtrial run --plan {write}", soft_wrap=True)
    return 0


def _write(
    file: Path,
    result: SamplePlan,
    margin: float | None,
    secondary: Sequence[str],
    slices: Sequence[str],
    cluster: str | None,
) -> AnalysisPlan:
    """Write the analysis plan of a sample plan to a new file."""
    from fairtrial.reports.figures.analysis_plan import AnalysisPlan
    from fairtrial.reports.figures.metrics import PASSED, VALUE, is_verdict
    from fairtrial.reports.run_names import PART

    share = is_verdict(result.metric) or result.metric == VALUE
    margins = {} if margin is None or result.metric == PASSED else {result.metric: margin}
    plan = AnalysisPlan(
        result.metric,
        secondary=tuple(secondary),
        smallest_difference_that_matters=result.difference if share else {result.metric: result.difference},
        margin=margin if result.metric == PASSED else None,
        margins=margins,
        slices=tuple(slices),
        cluster=cluster,
        alpha=result.alpha,
        tests=result.tests,
        samples=result.samples,
        repeats=result.repeats,
        power=result.power,
        suite=result.suite.removesuffix(PART),
    )
    try:
        with file.open("x", encoding="utf-8") as page:
            page.write(plan.to_toml())
    except FileExistsError:
        raise UserError(f"{file} exists, and a plan is never replaced", "choose another name") from None
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}", "choose another name") from None
    return plan


def _reports(name: str, store: str | None) -> list[EvalReport | ExperimentReport]:
    """Return the reports to plan from, newest first: the last runs of a suite, or one named run."""
    from fairtrial.reports import EvalReport
    from fairtrial.reports.run_names import UnknownNameError

    opened = options.open_existing(store)
    try:
        named = options.find_run(opened, name)
    except UnknownNameError as error:
        raise UserError(error.what, f"{error.remedy}; without a name, the worst case is assumed") from None
    suite = name.partition(":")[0] == named.run.suite
    runs = opened.runs(suite=named.run.suite, limit=RUNS_READ) if suite else [named.run]
    reports = [
        EvalReport(opened, run) for run in runs if named.experiment is None or named.experiment in run.experiments
    ]
    return [report if named.experiment is None else report[named.experiment] for report in reports]


def _difference(metric: str) -> float:
    """Return the smallest difference that matters from the gate rules."""
    from collections.abc import Mapping

    from fairtrial.cli.settings import load_settings
    from fairtrial.reports.figures.metrics import PASSED, SMALLEST_DIFFERENCE, VALUE, is_verdict
    from fairtrial.reports.figures.rules import GateRules

    settings = load_settings()
    smallest: float | Mapping[str, float] = SMALLEST_DIFFERENCE
    if settings.gate and settings.root is not None:
        smallest = GateRules.load(
            settings.root / "pyproject.toml", "tool.fairtrial.gate"
        ).smallest_difference_that_matters
    if isinstance(smallest, Mapping):
        if metric in smallest:
            return smallest[metric]
        smallest = SMALLEST_DIFFERENCE
    if not is_verdict(metric) and metric not in (PASSED, VALUE):
        raise UserError(f"the difference in {metric} that matters must be given", "as in: --difference 100")
    return smallest
