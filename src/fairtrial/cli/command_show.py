"""`fairtrial show`: the report of a run, its slices, or one trial in full."""

from __future__ import annotations

import difflib
import json as json_text
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from fairtrial.cli.names import RunName
    from fairtrial.reports.figures.estimates import Estimate
    from fairtrial.store.protocol import RunStore
    from fairtrial.trials.result import EvalResult


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show")(show)


def show(
    run: options.Run,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="ID", help="Show the trials of this sample in full.")
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option("--repeat", metavar="N", min=0, help="With --sample: only this repeat (numbered from 0)."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="KEY", help="Show figures for each slice of the samples by this metadata key."),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Show the report of a run, its slices, or one trial in full.

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
    from fairtrial.cli.names import find_sample
    from fairtrial.cli.screen import out, print_json
    from fairtrial.cli.trial import print_trial
    from fairtrial.reports.render.trial_json import trial_record

    def results_of(sample_id: str) -> list[EvalResult]:
        found = store.results(named.run.run_id, experiment=named.experiment, sample_ids=[sample_id])
        return [result for result in found if repeat is None or result.repeat == repeat]

    results = results_of(sample_id)
    if not results:
        whole_id = find_sample(sample_id, (sample.id for _, sample in store.samples(named.run.run_id)))
        results = results_of(whole_id) if whole_id is not None else []
    if not results:
        raise _unknown_sample(store, named, sample_id, repeat)
    if json:
        print_json({"format": "fairtrial.trials/1", "trials": [trial_record(result, whole=True) for result in results]})
        return 0
    console = out()
    for position, result in enumerate(results):
        if position:
            console.print()
        print_trial(console, named.run, result)
    return 0


def _unknown_sample(store: RunStore, named: RunName, sample_id: str, repeat: int | None) -> Exception:
    from fairtrial.reports.render.safe_text import plain

    sample_ids = [sample.id for _, sample in store.samples(named.run.run_id)]
    where = f" in repeat {repeat}" if repeat is not None and sample_id in sample_ids else ""
    near = difflib.get_close_matches(sample_id, sample_ids, 3, 0.5)
    hint = f"did you mean {' or '.join(map(plain, near))}?" if near and not where else ""
    if not hint and sample_ids and not where:
        hint = f"ids look like this: {', '.join(map(plain, sample_ids[:3]))}"
    return UserError(f"run {named} has no result for sample {plain(sample_id)!r}{where}", hint)


def _slices(store: RunStore, named: RunName, key: str, *, json: bool) -> int:
    from fairtrial.base.formatting import p_text
    from fairtrial.cli.screen import add_row, make_table, out, print_json, print_table
    from fairtrial.reports.render.run_json import totals_record
    from fairtrial.reports.render.safe_text import plain
    from fairtrial.reports.report import metadata_keys

    groups: list[tuple[Any, Any]] = [
        (value, totals)
        for value, totals in store.group_totals(named.run.run_id, key)
        if totals.experiment in named.experiments
    ]
    if all(value is None for value, _ in groups):
        keys = metadata_keys(store, named.run.run_id)
        hint = f"it has {', '.join(map(plain, keys))}" if keys else "its samples have no metadata"
        raise UserError(f"no sample of run {named} has metadata {plain(key)!r}", hint)
    rates = _slice_rates(store, named, key)
    tests = _slice_tests(store, named, key)
    if json:
        facts = [
            {"value": value, **totals_record(totals), **_interval_facts(rates.get((totals.experiment, str(value))))}
            for value, totals in groups
        ]
        run_id, differences = named.run.run_id, {name: {"p": p, "adjusted_p": adjusted} for name, p, adjusted in tests}
        print_json(
            {"format": "fairtrial.slices/1", "run_id": run_id, "by": key, "slices": facts, "differences": differences}
        )
        return 0
    figures = ("samples", "pass rate", "95% interval", "errors\n(trials)", "mean score")
    table = make_table(plain(key), "experiment", *figures, right=figures, cut=(plain(key), "experiment"))
    for value, totals in sorted(groups, key=lambda group: str(group[0])):
        shown = "-" if value is None else value if isinstance(value, str) else json_text.dumps(value)
        rate = rates.get((totals.experiment, str(value)))
        add_row(table, shown, totals.experiment, *_figures(totals_record(totals), rate))
    console = out()
    print_table(console, table)
    for name, _, adjusted in tests:
        said = "differ" if adjusted <= 0.05 else "do not differ detectably"
        among = f", adjusted for {len(tests)} tests" if len(tests) > 1 else ""
        console.print(f"\n{plain(name)}: pass rates by {plain(key)} {said} ({p_text(adjusted)}{among}).", markup=False)
    return 0


def _slice_rates(store: RunStore, named: RunName, key: str) -> dict[tuple[str, str], Estimate]:
    """Return the pass rate of every slice with its interval, by experiment and value."""
    from fairtrial.errors import ConfigurationError
    from fairtrial.reports import EvalReport
    from fairtrial.reports.estimates import slice_estimates

    report = EvalReport(store, named.run)
    rates: dict[tuple[str, str], Estimate] = {}
    for name in named.experiments:
        try:
            parts = slice_estimates(report[name], key)
        except ConfigurationError:  # Too many values for meaningful intervals; the rates are shown without.
            continue
        for part in parts:
            if any(estimate.name == "pass_rate" for estimate in part.estimates):
                rates[name, str(part.value)] = part["pass_rate"]
    return rates


def _slice_tests(store: RunStore, named: RunName, key: str) -> list[tuple[str, float, float]]:
    """Return for each experiment the p-value of equal pass rates in all slices, unadjusted and adjusted."""
    from fairtrial.errors import ConfigurationError
    from fairtrial.reports import EvalReport
    from fairtrial.reports.estimates import slice_rate_test
    from fairtrial.stats import Heterogeneity, holm

    report = EvalReport(store, named.run)
    found: list[tuple[str, float]] = []
    for name in named.experiments:
        try:
            tested = slice_rate_test(report[name], key)
        except ConfigurationError:  # As in `_slice_rates`.
            continue
        if isinstance(tested, Heterogeneity):
            found.append((name, tested.p_value))
    adjusted = holm([p for _, p in found]).tolist()
    return [(name, p, other) for (name, p), other in zip(found, adjusted, strict=True)]


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
