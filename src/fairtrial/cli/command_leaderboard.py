"""`fairtrial leaderboard`: rank several systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError


def leaderboard(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Runs (all their experiments) or experiments.",
            autocompletion=options.complete_run,
        ),
    ],
    metric: Annotated[str, options.METRIC] = "passed",
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="SYSTEM", help="Also show differences from this system.")
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option("--weight", metavar="DATASET=W", help="Weight of a dataset, if there are several."),
    ] = None,
    cluster: options.Cluster = None,
    alpha: Annotated[
        float,
        typer.Option("--alpha", metavar="SHARE", help="Accepted probability that an interval misses the true value."),
    ] = 0.05,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="Lower values of the metric are better.")
    ] = False,
    higher_is_better: Annotated[
        bool, typer.Option("--higher-is-better", help="Higher values of the metric are better.")
    ] = False,
    bounds: options.Bounds = None,
    smallest_difference: Annotated[
        float,
        typer.Option(
            "--smallest-difference", metavar="SHARE", help="The smallest difference in a rate that matters to you."
        ),
    ] = 0.05,
    other_users: options.OtherUsers = False,
    seed: options.RandomSeed = 0,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Rank systems on the same samples, with rank intervals.

    Shows the mean of each system, the interval of its rank, and the share of resamples in which it is best. The rank
    intervals hold for all systems together. Runs of several datasets are averaged: experiments with the same name
    are one system.

    \b
    Examples:
      fairtrial leaderboard support
      fairtrial leaderboard support@3 support@4 --baseline "careful #3"
      fairtrial leaderboard support --metric cost_usd --json
    """
    from fairtrial.reports import EvalReport
    from fairtrial.reports.leaderboard.leaderboard import leaderboard as ranked

    if lower_is_better and higher_is_better:
        raise UserError("--lower-is-better and --higher-is-better cannot both be given", "remove one of them")
    opened = options.open_existing(store)
    named = [options.find_run(opened, name) for name in runs]
    board = ranked(
        *(EvalReport(opened, named_run.run)[name] for named_run in named for name in named_run.experiments),
        metric=metric,
        baseline=baseline,
        weights=_weights(weight) if weight else None,
        cluster=cluster,
        alpha=alpha,
        lower_is_better=(metric,) if lower_is_better else (),
        higher_is_better=(metric,) if higher_is_better else (),
        bounds=options.parse_ranges("--bounds", bounds or ()),
        smallest_difference_that_matters=smallest_difference,
        seed=seed,
        other_users=other_users,
    )
    return options.show(board, json=json)


def _weights(pairs: Sequence[str]) -> dict[str, float]:
    weights = {}
    for dataset, value in options.parse_pairs("--weight", pairs):
        if not isinstance(value, int | float):
            raise UserError(f"a weight must be a number (got {value!r})", f"as in: --weight {dataset}=2")
        weights[dataset] = float(value)
    return weights
