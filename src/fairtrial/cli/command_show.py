"""`fairtrial show`: the report of a run, its slices, or one trial whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options

if TYPE_CHECKING:
    from fairtrial.analysis.estimates import Estimate
    from fairtrial.cli.names import RunName
    from fairtrial.store.protocol import RunStore


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show")(show)


def show(
    run: options.Run,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="ID", help="Show the trials of this sample, whole.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option("--repeat", metavar="N", min=0, help="With --sample: only this repeat, from 0.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="KEY", help="Slice by this key of the samples' metadata.")
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Show the report of a run, slices of it, or one trial whole.

    \b
    Examples:
      fairtrial show support                       the report of the latest run
      fairtrial show support@3 --by category       figures for each category
      fairtrial show support:terse --sample t07    input, output, messages, score
    """
    from fairtrial.cli.names import find_run
    from fairtrial.cli.reporting import show_report

    opened = options.open_existing(store)
    named = find_run(opened, run)
    if sample is not None:
        return _trials(opened, named, sample, repeat, json=json)
    if by is not None:
        return _slices(opened, named, by, json=json)
    show_report(opened, named, json=json, next_commands=True)
    return 0


def _trials(store: RunStore, named: RunName, sample_id: str, repeat: int | None, *, json: bool) -> int:
    from fairtrial.cli.facts import trial_facts
    from fairtrial.cli.screen import out, print_json
    from fairtrial.cli.trial import print_trial

    results = [
        result
        for result in store.results(named.run.run_id, experiment=named.experiment, sample_ids=[sample_id])
        if repeat is None or result.repeat == repeat
    ]
    if not results:
        raise _unknown_sample(store, named, sample_id, repeat)
    if json:
        print_json({"format": "fairtrial.trials/1", "trials": [trial_facts(result, whole=True) for result in results]})
        return 0
    console = out()
    for position, result in enumerate(results):
        if position:
            console.print()
        print_trial(console, named.run, result)
    return 0


def _unknown_sample(store: RunStore, named: RunName, sample_id: str, repeat: int | None) -> Exception:
    import difflib

    from fairtrial.cli.faults import Mistake
    from fairtrial.render.safe_text import plain

    known = [sample.id for _, sample in store.samples(named.run.run_id)]
    where = f" in repeat {repeat}" if repeat is not None and sample_id in known else ""
    near = difflib.get_close_matches(sample_id, known, 3, 0.5)
    hint = f"did you mean {' or '.join(map(plain, near))}?" if near and not where else ""
    if not hint and known and not where:
        hint = f"ids look like this: {', '.join(map(plain, known[:3]))}"
    return Mistake(f"run {named} has no result for sample {plain(sample_id)!r}{where}", hint)


def _slices(store: RunStore, named: RunName, key: str, *, json: bool) -> int:
    import json as json_text

    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.screen import add_row, make_table, out, print_json, print_table
    from fairtrial.render.run_json import totals_record
    from fairtrial.render.safe_text import plain

    groups: list[tuple[Any, Any]] = [
        (value, totals)
        for value, totals in store.group_totals(named.run.run_id, key)
        if totals.experiment in named.experiments
    ]
    if all(value is None for value, _ in groups):
        known = sorted({name for _, sample in store.samples(named.run.run_id) for name in sample.metadata})
        hint = f"it has {', '.join(map(plain, known))}" if known else "its samples have no metadata"
        raise Mistake(f"no sample of run {named} has metadata {plain(key)!r}", hint)
    rates = _slice_rates(store, named, key)
    if json:
        facts = [
            {"value": value, **totals_record(totals), **_interval_facts(rates.get((totals.experiment, str(value))))}
            for value, totals in groups
        ]
        print_json({"format": "fairtrial.slices/1", "run_id": named.run.run_id, "by": key, "slices": facts})
        return 0
    table = make_table(
        plain(key), "experiment", "n", "pass rate", "95% interval", "errors", "mean score",
        right=("n", "pass rate", "95% interval", "errors", "mean score"), cut=(plain(key), "experiment"),
    )  # fmt: skip
    for value, totals in sorted(groups, key=lambda group: str(group[0])):
        shown = "-" if value is None else value if isinstance(value, str) else json_text.dumps(value)
        rate = rates.get((totals.experiment, str(value)))
        add_row(table, shown, totals.experiment, *_figures(totals_record(totals), rate))
    print_table(out(), table)
    return 0


def _slice_rates(store: RunStore, named: RunName, key: str) -> dict[tuple[str, str], Estimate]:
    """The pass rate of every slice with its interval, by experiment and value."""
    from fairtrial.errors import ConfigurationError
    from fairtrial.report import EvalReport
    from fairtrial.report.estimates import slice_estimates

    report = EvalReport(store, named.run)
    found: dict[tuple[str, str], Estimate] = {}
    for name in named.experiments:
        try:
            parts = slice_estimates(report[name], key)
        except ConfigurationError:  # Too many values for intervals that mean anything; the rates are shown without.
            continue
        for part in parts:
            if any(one.name == "pass_rate" for one in part.estimates):
                found[name, str(part.value)] = part["pass_rate"]
    return found


def _interval_facts(rate: Estimate | None) -> dict[str, Any]:
    if rate is None:
        return {"n": 0, "low": None, "high": None}
    return {"n": rate.n, "low": rate.low, "high": rate.high}


def _figures(facts: dict[str, Any], rate: Estimate | None) -> tuple[str, ...]:
    from fairtrial.cli.reporting import number
    from fairtrial.cli.reporting import rate as percent

    interval = "-"
    if rate is not None and rate.low is not None and rate.high is not None:
        interval = f"{percent(rate.low)} to {percent(rate.high)}"
    return (
        f"{rate.n if rate is not None else 0:,}",
        percent(facts["pass_rate"] if rate is None else rate.value),
        interval,
        f"{facts['trials'] - facts['scored']:,}",
        number(facts["mean_score"]),
    )
