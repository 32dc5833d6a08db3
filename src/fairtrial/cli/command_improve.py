"""`fairtrial improve`: search for a better prompt, and test what was found."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import ExitCode, UserError

if TYPE_CHECKING:
    from fairtrial.data.splits import Splits
    from fairtrial.suites import EvalSuite


def improve(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="file.py, file.py:name, module or module:name.")],
    parameter: Annotated[
        str, typer.Option("--parameter", metavar="NAME", help="The parameter of the experiment to improve: a text.")
    ],
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="gepa, or a function of yours: file.py:name.")
    ] = "gepa",
    max_cost: Annotated[
        float | None,
        typer.Option("--max-cost", metavar="USD", min=0, help="Budget of search, proposals and test together."),
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option("--max-trials", metavar="N", min=1, help="Most trials of the search, for models without a price."),
    ] = None,
    experiment: Annotated[
        str | None, typer.Option("--experiment", metavar="NAME", help="The baseline (default: the suite's first).")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Proposes candidates: provider:name or file.py:adapter (default: the suite's adapter).",
        ),
    ] = None,
    splits: Annotated[
        Path | None,
        typer.Option(
            "--splits", metavar="FILE", help="File of the dataset's splits (default: SUITE.splits.jsonl, made if new)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the optimizer.")] = 0,
    concurrency: options.Concurrency = None,
    batch: Annotated[bool, typer.Option("--batch", help="Send model calls in batches, at half price.")] = False,
    store: options.Store = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Search for a better prompt; test it on samples it never saw.

    The optimizer searches on the train and the validation split. Every evaluation is a stored run. At the end, baseline
    and winner are compared once on the test split, at the level of its next look. After an interruption, the same
    command continues the search; stored replies are not paid again.

    \b
    Examples:
      fairtrial improve evals.py --parameter prompt --max-cost 20
      fairtrial improve evals.py --parameter prompt --max-cost 20 --batch
      fairtrial improve evals.py --parameter prompt --max-cost 20 --model MODEL
      fairtrial improve evals.py --parameter prompt --optimizer mine.py:search \\
          --max-trials 2000
    """
    from fairtrial.cli.adhoc import adapter_of, load, load_object
    from fairtrial.cli.command_run import _batched, _check_batches, _plans
    from fairtrial.cli.running import Selection, selected, stdout_for_json
    from fairtrial.cli.screen import note
    from fairtrial.integrations.improve.gepa import gepa
    from fairtrial.integrations.improve.searching import Searching, text_parameter
    from fairtrial.reports.search.search import read_search

    if max_cost is None and max_trials is None:
        raise UserError("a search needs a budget", "add --max-cost USD, or --max-trials N for models without a price")
    options.start_logging(quiet=quiet)
    settings, url = options.settings_with(store)
    with stdout_for_json(json), _batched(batch) if batch else nullcontext(), settings.prices():
        chosen = selected(
            load(suite),
            Selection(
                concurrency=concurrency or settings["concurrency"],
                processes=settings["processes"],
                experiments=() if experiment is None else (experiment,),
                strict_cost=settings["strict-cost"],
            ),
        )
        if batch:
            _check_batches([(chosen, (suite,))])
        if not chosen.experiments:
            raise UserError(f"suite {chosen.name!r} has no experiment with parameters", "give it one with the text")
        # What is refused leaves no file of splits behind.
        text_parameter(chosen, chosen.experiments[0], parameter)
        proposes = gepa if optimizer == "gepa" else load_object(optimizer, "an optimizer")
        proposing = chosen.adapter if model is None else adapter_of(model)
        opened = options.open_when_available(url)
        search = Searching(
            chosen,
            chosen.experiments[0],
            parameter,
            splits=_splits(chosen, splits, note),
            store=opened,
            optimizer=optimizer,
            model=proposing,
            max_cost_usd=max_cost,
            max_trials=max_trials,
            seed=seed,
            plan=_plans(None, settings, [chosen.name])[0],
            announce=(lambda line: None) if quiet or json else note,
        )
        try:
            search.run(proposes)
        except KeyboardInterrupt:
            note("interrupted: what was evaluated is stored; the same command continues the search")
            return int(ExitCode.INTERRUPTED)
    found = read_search(opened, search.name)
    options.show(found, json=json)
    return int(ExitCode.INCONCLUSIVE if found.status == "untested" else ExitCode.OK)


def _splits(suite: EvalSuite, file: Path | None, note: Any) -> Splits[Any, Any]:
    """Split the dataset as the file says; a new file is made beside the suite."""
    from fairtrial.data.splits import SHARES, SplitRequest, read_request, split_dataset
    from fairtrial.integrations.improve.searching import check_splits

    check = partial(check_splits, suite)
    if suite.dataset.split_origin is not None:
        raise UserError(
            f"the dataset of suite {suite.name!r} is its {suite.dataset.split_origin.name} split",
            "give the suite the whole dataset: improve splits it",
        )
    path = file or Path(suite.home).parent / f"{suite.name}.splits.jsonl"
    if path.exists():
        return split_dataset(suite.dataset, read_request(path), path, check)
    made = split_dataset(suite.dataset, SplitRequest(SHARES, by=suite.config.cluster or None), path, check)
    note(f"wrote {path}: keep it beside the suite, so that samples that are added move none")
    for line in made.notes:
        note(line)
    return made
