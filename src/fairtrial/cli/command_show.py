"""The command show: a run, or one trial."""

from __future__ import annotations

import difflib
import json as json_text
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fairtrial.base.formatting import count
from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError
from fairtrial.reports.figures.error_groups import error_text, traceback_of
from fairtrial.reports.render.safe_text import executions_text, plain, session_lines, value_text
from fairtrial.reports.report.run_json import moment
from fairtrial.reports.report.trials import criterion_text, repeats_criteria
from fairtrial.reports.run_names import name_of, rerun_command
from fairtrial.scoring.score import Metric
from fairtrial.store.protocol import RunRecord
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.reports.figures.estimates import Estimate
    from fairtrial.reports.run_names import RunName
    from fairtrial.store.protocol import RunStore
    from fairtrial.trials.result import EvalResult


_LABEL = 10
_LINES = 400  # Lines shown of one value; --json has the rest.


def print_trial(console: Console, run: RunRecord, result: EvalResult) -> None:
    """Print input, expected value, output, messages, tool calls, scores, timing, and the command to run it again."""
    verdict, style = _verdict(result)
    repeat = f", repeat {result.repeat}" if run.repeats > 1 else ""
    console.print(
        Text.assemble(
            (plain(result.sample_id), "bold"),
            f"  {name_of(run)}:{plain(result.experiment)}{repeat}  ",
            (verdict, style),
        ),
        soft_wrap=True,
    )
    sample = result.sample
    _part(console, "input", value_text(sample.input))
    if sample.has_expected:
        _part(console, "expected", value_text(sample.expected))
    if sample.metadata:
        _part(console, "metadata", ", ".join(f"{key}={value_text(value)}" for key, value in sample.metadata.items()))
    if result.output is not None or result.outcome in ("scored", "scorer_error", "user_error"):
        _part(console, "output", value_text(result.output))
    if result.error:
        stage = f"\n(in stage {result.stage})" if result.stage else ""
        _part(console, "error", f"{error_text(result)}{stage}")
        if calls := traceback_of(result):
            _part(console, "traceback", calls)
    _score(console, result)
    if result.redacted_parts:
        _part(console, "redacted", f"secrets were redacted in: {', '.join(result.redacted_parts)}")
    _events(console, result)
    _part(console, "timing", _timing(result))
    if reasons := executions_text(result):
        _part(console, "repeated", reasons)
    if run.imported:
        return  # Imported runs have no command to run them again.
    _part(console, "again", rerun_command(run, sample=result.sample_id, experiment=result.experiment), style="cyan")


def _verdict(result: EvalResult) -> tuple[str, str]:
    if result.score is None:
        return result.outcome.replace("_", " "), "bold yellow"
    if result.score.passed:
        return f"passed, score {result.score.value:.3f}", "bold green"
    return f"failed, score {result.score.value:.3f}", "bold red"


def _score(console: Console, result: EvalResult) -> None:
    if result.score is None:
        return
    score = result.score
    if (why := score.explain()) and not repeats_criteria(why, score):
        _part(console, "reason", why)
    if len(score.criteria) > 1:
        for position, metric in enumerate(score.criteria):
            _part(console, "" if position else "criteria", f"{criterion_text(metric)}{_weight(metric)}")
    for position, metric in enumerate(metric for metric in score.metrics if metric.passed is None):
        _part(console, "" if position else "metrics", f"{metric.name} {metric.value:.3f}{_weight(metric)}")
    if score.reward != score.value:
        _part(console, "reward", f"{score.reward:.3f}")


def _weight(metric: Metric) -> str:
    return f"  weight {metric.weight:g}" if metric.weight else ""


def _events(console: Console, result: EvalResult) -> None:
    """Print messages, tool calls and model calls in order; calls of judges are marked."""
    for place, (seconds, label, body, style) in enumerate(session_lines(result)):
        if not place:
            console.print(Text("session", style="bold"))
        _indented(console, f"{seconds:7.2f} s  ", label, body, style)


def _timing(result: EvalResult) -> str:
    from fairtrial.base.formatting import cost, duration

    latency = result.known_latency_ms
    parts = ["latency not known" if latency is None else duration(latency)]
    if result.attempt > 1:
        parts.append(f"attempt {result.attempt}")
    if result.usage.total_tokens:
        parts.append(f"{result.usage.input_tokens:,} + {result.usage.output_tokens:,} tokens")
    if result.usage.cost_usd is not None or result.unpriced_calls:
        parts.append(f"task cost {cost(result.usage.cost_usd, result.unpriced_calls)}")
    if result.judge_cost_usd is not None or result.unpriced_judge_calls:
        whose = "judge and user cost" if "user" in result.own_metadata else "judge cost"
        parts.append(f"{whose} {cost(result.judge_cost_usd, result.unpriced_judge_calls)}")
    if result.cache_hits:
        parts.append(f"{count(result.cache_hits, 'call')} from the response cache")
    if result.started_at:
        parts.append(f"started {moment(result.started_at)}")
    return ", ".join(parts)


def _part(console: Console, label: str, text: str, *, style: str = "") -> None:
    if style:  # On one line, so that it can be copied.
        console.print(Text.assemble((label.ljust(_LABEL), "bold"), (plain(text), style)), soft_wrap=True)
        return
    _lines(console, Text(label.ljust(_LABEL), style="bold"), text, _LABEL)


def _indented(console: Console, head: str, label: str, text: str, style: str) -> None:
    start = Text.assemble((head, "dim"), (plain(label), style), "  ")
    _lines(console, start, text, len(head) + 2)


def _lines(console: Console, head: Text, text: str, indent: int) -> None:
    """Print text after a heading; further lines are indented, long ones wrapped only in a terminal."""
    lines = text.splitlines() or [""]
    left_out = len(lines) - _LINES
    first: Text | None = head
    for line in lines[:_LINES]:
        clean = plain(line)
        pieces = [clean]
        if console.is_terminal:
            room = max(console.width - indent, 20)
            lead = " " * max(len(head) - indent, 0) if first is not None else ""
            pieces = [piece.removeprefix(lead) for piece in _wrapped(lead + clean, room)]
        for piece in pieces:
            start = first if first is not None else Text(" " * indent)
            console.print(Text.assemble(start, piece.rstrip()), soft_wrap=True)
            first = None
    if left_out > 0:
        console.print(" " * indent + f"... {left_out:,} more lines; all of it with --json", soft_wrap=True)


def _wrapped(text: str, room: int) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip(" ")))
    return textwrap.wrap(
        text, room, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False,
        subsequent_indent=indent if len(indent) < room // 2 else "",
    ) or [text]  # fmt: skip


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
    full: Annotated[
        bool, typer.Option("--full", help="Also show criteria, means, quantiles, counts and slices.")
    ] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Show the report of a run, its slices, or one trial in full.

    \b
    Examples:
      fairtrial show support --full                criteria, means, slices
      fairtrial show support@3 --by category       figures for each category
      fairtrial show support:terse --sample t07    input, output, messages, score
    """
    from fairtrial.cli.options import find_run, show_report

    opened = options.open_existing(store)
    named = find_run(opened, run)
    if sample is not None:
        return _trials(opened, named, sample, repeat, json=json)
    if by is not None:
        return _slices(opened, named, by, json=json)
    show_report(opened, named, json=json, next_commands=True, full=full)
    return 0


def _trials(store: RunStore, named: RunName, sample_id: str, repeat: int | None, *, json: bool) -> int:
    from fairtrial.cli.options import find_sample
    from fairtrial.cli.screen import out, print_json
    from fairtrial.reports.report.trials import trial_record

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
    from fairtrial.reports.render.safe_text import plain
    from fairtrial.reports.report import metadata_keys
    from fairtrial.reports.report.run_json import totals_record

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
        verdict = "differ" if adjusted <= 0.05 else "do not differ detectably"
        among = f", adjusted for {len(tests)} tests" if len(tests) > 1 else ""
        console.print(
            f"\n{plain(name)}: pass rates by {plain(key)} {verdict} ({p_text(adjusted)}{among}).", markup=False
        )
    return 0


def _slice_rates(store: RunStore, named: RunName, key: str) -> dict[tuple[str, str], Estimate]:
    """Return the pass rate of every slice with its interval, by experiment and value."""
    from fairtrial.errors import ConfigurationError
    from fairtrial.reports import EvalReport
    from fairtrial.reports.tool_calls import slice_estimates

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
    from fairtrial.reports.tool_calls import slice_rate_test
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
    from fairtrial.base.formatting import number
    from fairtrial.base.formatting import rate as percent

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
