"""Print one trial in full."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from fairtrial.base.formatting import count
from fairtrial.cli.names import name_of
from fairtrial.reports.figures.error_groups import error_text, traceback_of
from fairtrial.reports.render.run_json import moment
from fairtrial.reports.render.safe_text import plain
from fairtrial.reports.render.session_text import executions_text, session_lines, value_text
from fairtrial.reports.render.trial_details import criterion_text, said_by_criteria
from fairtrial.reports.rerun import rerun_command
from fairtrial.scoring.score import Metric
from fairtrial.store.protocol import RunRecord
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
    if result.output is not None or result.outcome in ("scored", "scorer_error"):
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
    if (why := score.explain()) and not said_by_criteria(why, score):
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
    from fairtrial.cli.reporting import cost, duration

    latency = result.known_latency_ms
    parts = ["latency not known" if latency is None else duration(latency)]
    if result.attempt > 1:
        parts.append(f"attempt {result.attempt}")
    if result.usage.total_tokens:
        parts.append(f"{result.usage.input_tokens:,} + {result.usage.output_tokens:,} tokens")
    if result.usage.cost_usd is not None or result.unpriced_calls:
        parts.append(f"task cost {cost(result.usage.cost_usd, result.unpriced_calls)}")
    if result.judge_cost_usd is not None or result.unpriced_judge_calls:
        parts.append(f"judge cost {cost(result.judge_cost_usd, result.unpriced_judge_calls)}")
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
