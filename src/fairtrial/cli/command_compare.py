"""`fairtrial compare`: is the difference real?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fairtrial.report import ExperimentReport
    from fairtrial.store.protocol import RunStore


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="BASELINE [CANDIDATE]...",
            help="Runs, or experiments of runs; one run of several experiments compares them with its first.",
            autocompletion=options.complete_run,
        ),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="NAME", help="passed, value, latency_ms, tokens, cost_usd or a metric's name."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all-metrics", help="Every metric there is.")] = False,
    by: Annotated[
        list[str] | None, typer.Option("--by", metavar="KEY", help="Repeat it on slices by this metadata key.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="KEY", help="Samples with the same value are not independent.")
    ] = None,
    alpha: Annotated[
        float, typer.Option("--alpha", metavar="SHARE", help="The accepted chance of a false alarm.")
    ] = 0.05,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of random draws.")] = 0,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Compare candidates with a baseline: is the difference real?

    Sample by sample: the difference with its interval, a verdict, and how many samples would settle it.

    \b
    Examples:
      fairtrial compare support:baseline support:careful
      fairtrial compare support@3 support@4 --by kind
      fairtrial compare support --all-metrics --json
    """
    from fairtrial.cli.reporting import record_of
    from fairtrial.cli.screen import out, print_json
    from fairtrial.report.compare import DEFAULT_METRICS
    from fairtrial.report.compare import compare as compared

    opened = options.open_existing(store)
    sides = sides_of(opened, runs)
    wanted = None if every else tuple(metric) if metric else DEFAULT_METRICS
    found = compared(*sides, metrics=wanted, cluster=cluster, slice_by=tuple(by or ()), alpha=alpha, seed=seed)
    if json:
        print_json(record_of(found))
        return 0
    out().print(found)
    return 0


def sides_of(store: RunStore, names: Sequence[str]) -> list[ExperimentReport]:
    """The experiments that are meant; a run of several stands for all of them only when it stands alone."""
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.names import find_run, name_of
    from fairtrial.report import EvalReport

    found = [find_run(store, name) for name in names]
    if len(found) == 1:
        if len(found[0].experiments) < 2:
            raise Mistake(f"{names[0]} is one experiment, and a comparison needs two", _example(found[0].run))
        report = EvalReport(store, found[0].run)
        return [report[name] for name in found[0].experiments]
    for given, named in zip(names, found, strict=True):
        if len(named.experiments) > 1:
            known = " or ".join(f"{name_of(named.run)}:{name}" for name in named.experiments)
            raise Mistake(f"{given} has {len(named.experiments)} experiments", f"say which is meant: {known}")
    return [EvalReport(store, named.run)[named.experiments[0]] for named in found]


def _example(run: Any) -> str:
    others = run.experiments[:2]
    if len(others) > 1:
        return f"as in: fairtrial compare {run.suite}:{others[0]} {run.suite}:{others[1]}"
    return f"as in: fairtrial compare {run.suite}@{max(run.number - 1, 1)} {run.suite}@{max(run.number, 2)}"
