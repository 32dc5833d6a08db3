"""`fairtrial try`: run one prompt with one model or several, without a suite."""

from __future__ import annotations

from typing import Annotated

import typer

from fairtrial.cli import options


def try_(
    ctx: typer.Context,
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="The prompt: file.py:name, or a .md or .txt file.", show_default=False),
    ],
    dataset: Annotated[
        str, typer.Option(metavar="FILE", help="A .jsonl, .json, .csv or .parquet file.", show_default=False)
    ],
    model: Annotated[
        list[str],
        typer.Option(
            metavar="MODEL",
            help="PROVIDER:NAME, as in openai:gpt-6.1-sol, or file.py:adapter (repeatable: models are compared); an "
            "unknown provider lists all.",
            show_default=False,
        ),
    ],
    evaluator: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="exact_match, contains, ... or file.py:name (repeatable: all).", show_default=False
        ),
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=COLUMN", help="Map a column, as in input=question or input=a,b (repeatable)."),
    ] = None,
    max_samples: options.MaxSamples = None,
    sample: options.Samples = None,
    filter: options.Filters = None,
    repeats: options.Repeats = None,
    concurrency: options.Concurrency = None,
    processes: options.Processes = None,
    experiment: options.Experiments = None,
    seed: options.TrialSeed = None,
    max_cost: options.MaxCost = None,
    store: options.Store = None,
    cache: options.Cache = None,
    resume: options.Resume = "auto",
    allow_changed_code: options.AllowChangedCode = False,
    tag: options.Tags = None,
    fail_under: options.FailUnder = None,
    max_error_share: options.MaxErrorShare = None,
    trace: options.Trace = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Try one prompt: every sample with every model. Several models are compared.

    The run is stored, reported and resumed like that of a suite. Each model is an experiment.

    \b
    Examples:
      fairtrial try ask.md --dataset q.jsonl --model openai:gpt-6.1-sol \\
          --evaluator exact_match
      fairtrial try prompts.py:ask --dataset q.csv --column input=question \\
          --model openai:gpt-6.1-sol --model anthropic:claude-opus-5 \\
          --evaluator contains                           compare two models
    """
    from fairtrial.cli.adhoc import AdHocOptions, suite_of
    from fairtrial.cli.command_run import execute
    from fairtrial.cli.running import Selection

    adhoc = AdHocOptions(prompt, dataset, tuple(model), tuple(evaluator), tuple(column or ()))
    selection = Selection(
        max_samples=max_samples,
        samples=sample or (),
        filters=filter or (),
        repeats=repeats,
        concurrency=concurrency,
        processes=processes,
        experiments=experiment or (),
        seed=seed,
        max_cost=max_cost,
    )
    return execute(
        ctx,
        lambda _: [(suite_of(adhoc), adhoc.words)],
        selection,
        store=store,
        cache=cache,
        resume=resume,
        allow_changed_code=allow_changed_code,
        tags=tag or (),
        fail_under=fail_under,
        max_error_share=max_error_share,
        trace=trace,
        quiet=quiet,
        json=json,
        compares=len(model) > 1,
    )
