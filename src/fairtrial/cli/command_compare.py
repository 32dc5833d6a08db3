"""`fairtrial compare`: compare candidates with a baseline."""

from __future__ import annotations

import shlex
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.label_file import correcting_labels
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fairtrial.reports import ExperimentReport
    from fairtrial.reports.run_names import RunName
    from fairtrial.store.protocol import RunStore


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="BASELINE [CANDIDATE]...",
            help="Runs or experiments. One run with several experiments: compares them with its first.",
            autocompletion=options.complete_run,
        ),
    ],
    metric: Annotated[options.Texts, options.METRIC] = None,
    every: Annotated[bool, typer.Option("--all-metrics", help="Compare every metric.")] = False,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="KEY", help="Also compare each slice of the samples by this metadata key."),
    ] = None,
    cluster: options.Cluster = None,
    alpha: Annotated[
        float | None,
        typer.Option("--alpha", metavar="SHARE", help="Accepted probability of a false alarm (default: 0.05)."),
    ] = None,
    lower_is_better: Annotated[
        list[str] | None, typer.Option("--lower-is-better", metavar="NAME", help="A metric for which lower is better.")
    ] = None,
    higher_is_better: Annotated[
        list[str] | None,
        typer.Option("--higher-is-better", metavar="NAME", help="A metric for which higher is better."),
    ] = None,
    bounds: options.Bounds = None,
    smallest_difference: Annotated[
        float | None,
        typer.Option(
            "--smallest-difference",
            metavar="SHARE",
            help="The smallest difference in a rate that matters to you (default: 0.05).",
        ),
    ] = None,
    labels: options.LabelFile = None,
    labels_by_verdict: options.ByVerdict = False,
    labels_drawn: options.LabelsDrawn = False,
    label_name: Annotated[str | None, options.LABEL_NAME] = None,
    other_users: options.OtherUsers = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show tests, trial counts, and the comparison without errors.")
    ] = False,
    seed: options.RandomSeed = 0,
    format: Annotated[
        str, typer.Option("--format", "-f", metavar="FORMAT", help="text, or latex: a table for a paper.")
    ] = "text",
    methods: Annotated[
        bool, typer.Option("--methods", help="Print a paragraph for the methods section of a paper instead.")
    ] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Compare candidates with a baseline, sample by sample.

    Shows the difference of each metric with its interval and a verdict. If only differences smaller than
    --smallest-difference are plausible, the verdict is "as good". If the data are inconclusive, it says how many
    samples would decide. If the runs have a plan (run --plan), the default is the planned comparison, and
    what is not as planned is listed.

    \b
    Examples:
      fairtrial compare support:baseline support:careful
      fairtrial compare support@3 support@4 --by kind
      fairtrial compare support --all-metrics --json
      fairtrial compare support --labels labels.csv
      fairtrial compare support --format latex > table.tex
    """
    from fairtrial.reports.compare.compare import DEFAULT_METRICS
    from fairtrial.reports.compare.compare import compare as compared
    from fairtrial.reports.compare.methods import latex_text

    if format not in ("text", "latex"):
        raise UserError(
            f"--format must be text or latex (got {format})", "for other formats: fairtrial export --against"
        )
    if json and (methods or format != "text"):
        raise UserError("--json cannot be combined with --format or --methods", "omit one of them")
    opened = options.open_existing(store)
    sides = sides_of(opened, runs)
    wanted = None if every else tuple(metric) if metric else DEFAULT_METRICS
    comparison = compared(
        *sides,
        metrics=wanted,
        cluster=cluster,
        slice_by=tuple(by or ()),
        alpha=alpha,
        lower_is_better=tuple(lower_is_better or ()),
        higher_is_better=tuple(higher_is_better or ()),
        bounds=options.parse_ranges("--bounds", bounds or ()),
        smallest_difference_that_matters=smallest_difference,
        seed=seed,
        labels=correcting_labels(labels, sides),
        label_name=label_name,
        labels_by_verdict=labels_by_verdict,
        labels_drawn=labels_drawn,
        other_users=other_users,
    )
    if methods:
        text = latex_text(comparison.methods()) if format == "latex" else comparison.methods()
        sys.stdout.write(f"{textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)}\n")
    elif format == "latex":
        sys.stdout.write(comparison.to_latex())
    else:
        return options.show(comparison.in_detail() if verbose and not json else comparison, json=json)
    return 0


def sides_of(store: RunStore, names: Sequence[str]) -> list[ExperimentReport]:
    """Resolve names to experiments; a run with several experiments is allowed only if it is the only name."""
    from fairtrial.reports import EvalReport

    named_runs = [options.find_run(store, name) for name in names]
    if len(named_runs) == 1:
        if len(named_runs[0].experiments) < 2:
            raise UserError(f"a comparison needs two experiments (got {names[0]})", _example(store, named_runs[0]))
        report = EvalReport(store, named_runs[0].run)
        return [report[name] for name in named_runs[0].experiments]
    return [options.one_experiment(store, named, text) for text, named in zip(names, named_runs, strict=True)]


def _example(store: RunStore, named: RunName) -> str:
    other = options.other_experiment(store, named.run, named.experiments[0])
    if other is None:
        return f"there is no other run of suite {named.run.suite!r} yet: run it again after a change"
    pair = [other, shlex.quote(str(named))]
    if named.experiment is not None and named.experiment == named.run.experiments[0]:
        pair.reverse()  # The first experiment of a run is its baseline.
    return f"as in: fairtrial compare {' '.join(pair)}"
