"""One trial on the screen, whole."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from rich.console import Console
from rich.text import Text

from fairtrial.cli.facts import envelopes
from fairtrial.cli.names import name_of
from fairtrial.cli.rerun import rerun_command
from fairtrial.cli.screen import count
from fairtrial.codec import to_json
from fairtrial.render.report_document import criterion_text
from fairtrial.render.run_json import moment
from fairtrial.render.safe_text import plain
from fairtrial.scoring.score import Metric, Score
from fairtrial.store.protocol import RunRecord
from fairtrial.trials.result import EvalResult

_LABEL = 10
_LINES = 400  # Of one value; the rest is in --json.


def print_trial(console: Console, run: RunRecord, result: EvalResult) -> None:
    """Input, expected, output, messages, tool calls, score parts, timing, and the command that runs it again."""
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
    if sample.expected is not None:
        _part(console, "expected", value_text(sample.expected))
    if sample.metadata:
        _part(console, "metadata", ", ".join(f"{key}={value_text(value)}" for key, value in sample.metadata.items()))
    if result.output is not None or result.outcome in ("scored", "scorer_error"):
        _part(console, "output", value_text(result.output))
    if result.error:
        _part(console, "error", f"{result.error}\n(in stage {result.stage})" if result.stage else result.error)
    _score(console, result)
    if result.redacted_parts:
        _part(console, "redacted", f"secrets were replaced in: {', '.join(result.redacted_parts)}")
    _events(console, result)
    _part(console, "timing", _timing(result))
    if run.imported:
        return  # There is no command that executes it.
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
    if (why := score.explain()) and not _said_by_criteria(why, score):
        _part(console, "reason", why)
    if len(score.criteria) > 1:
        for position, metric in enumerate(score.criteria):
            _part(console, "" if position else "criteria", f"{criterion_text(metric)}{_weight(metric)}")
    for position, metric in enumerate(metric for metric in score.metrics if metric.passed is None):
        _part(console, "" if position else "metrics", f"{metric.name} {metric.value:.3f}{_weight(metric)}")
    if score.reward != score.value:
        _part(console, "reward", f"{score.reward:.3f}")


def _said_by_criteria(why: str, score: Score) -> bool:
    """Whether a reason is made up of the reasons of criteria, which are printed one by one."""
    for metric in sorted(score.criteria, key=lambda metric: -len(metric.reason)) if len(score.criteria) > 1 else ():
        why = why.replace(f"{metric.name}: {metric.reason}", "") if metric.reason else why
    return not why.strip("; ")


def _weight(metric: Metric) -> str:
    return f"  weight {metric.weight:g}" if metric.weight else ""


def _events(console: Console, result: EvalResult) -> None:
    """Messages, tool calls and model calls in the order they came; what judges did is marked."""
    recorded = envelopes(result)
    if not recorded:
        return
    console.print(Text("session", style="bold"))
    start = recorded[0].time
    attempts = len({event.attempt for event in recorded}) > 1
    for event in recorded:
        label, body, style = _event(event)
        marks = " (judge)" if event.actor == "judge" else ""
        marks += f" (attempt {event.attempt})" if attempts else ""
        head = f"{event.time - start:7.2f} s  "
        _indented(console, head, f"{label}{marks}", body, style)


def _event(event: Any) -> tuple[str, str, str]:
    data = to_json(event.data)
    kind = event.kind.rpartition(":")[2]
    if kind == "ChatMessage":
        said = data.get("content") or ""
        calls = "; ".join(
            f"calls {call['name']}({_arguments(call['arguments'])})" for call in data.get("tool_calls") or ()
        )
        return str(data["role"]), "\n".join(part for part in (value_text(said), calls) if part), "bold"
    if kind == "ToolInvoked":
        ended = value_text(data.get("result"))
        if data.get("error") or data.get("success") is False:
            ended = f"failed: {data.get('error') or ended}"
        return "invoked", f"{data['name']}({_arguments(data.get('params') or {})}) -> {ended}", "cyan"
    if kind == "PromptExecuted":
        from fairtrial.cli.reporting import money

        usage = data.get("usage") or {}
        paid = "" if usage.get("cost_usd") is None else f", {money(usage['cost_usd'])}"
        source = ", from the response cache" if data.get("cached") else paid
        tokens = f"{usage.get('input_tokens', 0):,} + {usage.get('output_tokens', 0):,} tokens{source}"
        return "model", f"{data.get('model') or data.get('adapter')}: {tokens}", "dim"
    if kind == "AgentEnded" and data.keys() >= {"reason", "turns"}:
        detail = f": {data['detail']}" if data.get("detail") else ""
        return "ended", f"{data['reason']} after {count(data['turns'], 'turn')}{detail}", "dim"
    return kind, json.dumps(data, ensure_ascii=False), "dim"


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


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


def value_text(value: Any) -> str:
    """A value as people read it: text as it is, everything else as JSON."""
    tree = to_json(value)
    if isinstance(tree, str):
        return tree
    short = json.dumps(tree, ensure_ascii=False)
    return short if len(short) <= 60 else json.dumps(tree, ensure_ascii=False, indent=2)


def _part(console: Console, label: str, text: str, *, style: str = "") -> None:
    if style:  # Something to copy: it stays on one line.
        console.print(Text.assemble((label.ljust(_LABEL), "bold"), (plain(text), style)), soft_wrap=True)
        return
    _lines(console, Text(label.ljust(_LABEL), style="bold"), text, _LABEL)


def _indented(console: Console, head: str, label: str, text: str, style: str) -> None:
    start = Text.assemble((head, "dim"), (plain(label), style), "  ")
    _lines(console, start, text, len(head) + 2)


def _lines(console: Console, head: Text, text: str, indent: int) -> None:
    """Text after a head; further lines are indented, and long ones wrapped in a terminal only."""
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
