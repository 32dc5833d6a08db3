"""Estimates and what is to be said about them, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from fairtrial.base import formatting
from fairtrial.base.formatting import change_text, count, listed, money, range_text, rate
from fairtrial.errors import FairtrialError
from fairtrial.reports.figures.estimates import Estimate
from fairtrial.reports.figures.figures import Figures
from fairtrial.reports.figures.metrics import CRITERION, OVERSTATED, is_verdict
from fairtrial.reports.render.document import Bar, Block, Column, Table
from fairtrial.reports.render.safe_text import plain
from fairtrial.store.protocol import RunRecord
from fairtrial.trials.result import EvalResult


def adaptive_remarks(run: RunRecord) -> Iterator[tuple[bool, str]]:
    """Yield how many samples were analysed, the resulting figures, and what they leave out; and whether it warns."""
    note = run.noted.adaptive
    if note is None:
        return
    how = "The run stopped by its own rule" if note.stopped else "The run could have stopped by its own rule"
    first = f"{how}: the figures are those of the first {note.samples:,} of {note.planned:,} samples."
    if note.rule.decides is not None:
        first += " Because the run watched its own results, the intervals are wider than usual."
    yield True, first
    for name, part in note.experiments.items():
        label = f"{name}: " if len(note.experiments) > 1 else ""
        estimate = "-" if part.estimate is None else rate(part.estimate)
        worst = "its" if part.missing == 1 else "their"
        missing = f", {part.missing:,} not scored and taken at {worst} worst" if part.missing else ""
        yield bool(missing), f"{label}pass rate {estimate} ({rate(part.low)} to {rate(part.high)}{missing})"
    pair = note.pair
    if pair is not None:
        percent = not pair.graded
        difference = change_text(pair.estimate, percent=percent)
        verdict = f"is {pair.verdict} than" if pair.verdict else "cannot be told from"
        chance = f"chance alone does this in at most 1 run of {1 / pair.p_value:,.0f}" if pair.verdict else ""
        yield (
            False,
            f"{pair.candidate} {verdict} {pair.baseline}: {difference} "
            f"({range_text(pair.low, pair.high, percent=percent)}), {count(pair.wins, 'win')}, "
            f"{count(pair.losses, 'loss', 'losses')}{'; ' if chance else ''}{chance}.",
        )
        if pair.verdict and note.stopped:
            yield True, OVERSTATED
    if note.beyond:
        beyond = count(note.beyond, "result")
        are = "is" if note.beyond == 1 else "are"
        yield True, f"{beyond} after those samples {are} stored, but not in these figures."


def sampling_remarks(run: RunRecord) -> Iterator[tuple[bool, str]]:
    """Yield how the live traces of a run were sampled, and whether it warns."""
    note = run.noted.sampling
    if note is None:
        return
    strata = "".join(f", {plain(one)}" for one in note.strata)
    shown = f"Live traces of {note.day}, sampled at {note.sample:g}{strata}"
    yield True, f"{shown}: rates and means are those of all traces, each trial weighted by 1 over its chance."
    if note.rates:
        last_at, factor = note.rates[-1]
        moment = f"{datetime.fromtimestamp(last_at, UTC):%H:%M} UTC"
        if factor:
            budget, times = money(note.max_cost_usd or 0.0), count(len(note.rates), "time")
            lowered = f"To stay within {budget} a day, the shares were lowered {times}"
            yield False, f"{lowered}, at {moment} to {rate(factor)} of what they were; the weights allow for it."
        else:
            yield True, f"The budget was spent at {moment}: the figures are those of the traces until then."
    numbers = ((note.incomplete, "incomplete"), (note.too_large, "too large"), (note.unstorable, "not storable"))
    left_out = [f"{number:,} {what}" for number, what in numbers if number]
    if left_out:
        yield True, f"Sampled traces that were left out: {listed(left_out)}."


TITLES = {
    "pass_rate": "pass rate",
    "pass_rate_all": "pass rate, errors as failures",
    "mean_score": "mean score",
    "mean_score_all": "mean score, errors as 0",
    "mean_reward": "mean reward",
}
"""The titles of estimates that every run may have."""


def title_of(name: str) -> str:
    """Return the title of an estimate."""
    if name.startswith(CRITERION):
        return f"pass rate of {name.removeprefix(CRITERION)}"
    return TITLES.get(name, name)


def is_rate(estimate: Estimate) -> bool:
    """True if an estimate is a share, shown in percent."""
    return is_verdict(estimate.metric)


def value(estimate: Estimate, number: float | None) -> str:
    """Format a value of an estimate."""
    return formatting.rate(number) if is_rate(estimate) else formatting.number(number)


def span(estimate: Estimate) -> str:
    """Format the interval of an estimate."""
    if estimate.low is None or estimate.high is None:
        return formatting.UNDEFINED
    return f"{value(estimate, estimate.low)} to {value(estimate, estimate.high)}"


def bar(estimate: Estimate, bounds: tuple[float, float] | None) -> Bar | None:
    """Return the bar of an estimate; None if it is undefined or its scale is unknown."""
    if estimate.low is None or estimate.high is None or estimate.value is None or bounds is None:
        return None
    return Bar(estimate.low, estimate.value, estimate.high, *bounds)


def history_table(figures: Mapping[str, Figures], names: Sequence[str]) -> list[Block]:
    """Return the table of figures that a history made more precise, if there are any."""
    several, rows, about = len(figures) > 1, [], ""
    for name in names:
        for experiment, figure in figures.items():
            one = figure.get(name)
            if one is not None and (past := one.history) is not None and past.note is None:
                adjusted = replace(one, value=past.value, low=past.low, high=past.high)
                label = f"{title_of(name)}, {experiment}" if several else title_of(name)
                rows.append((label, value(one, past.value), span(adjusted), f"{past.plain_samples:,} plain samples"))
                about = f"{formatting.count(past.samples, 'sample')} in {formatting.count(past.runs, 'run')}"
    columns = (Column("", "left", name=True), Column("estimate"), Column("interval"), Column("as precise as"))
    return [Table(f"By the history of {about}", columns, tuple(rows))] if rows else []


def history_remarks(figure: Figures) -> Iterator[str]:
    """Yield why a declared history is not used, or not for which figures."""
    yield from map(plain, figure.history_notes)
    reasons: dict[str, list[str]] = {}
    for one in figure.estimates:
        if one.history is not None and one.history.note is not None:
            reasons.setdefault(one.history.note, []).append(title_of(one.name))
    for reason, names in reasons.items():
        every = len(names) == sum(one.history is not None for one in figure.estimates)
        yield f"The history is not used{'' if every else ' for ' + ', '.join(names)}. {reason}"


CHOSEN_FAILURES = (
    "These samples were chosen because a run failed them: their pass rate says nothing about the system. Compare two "
    "later runs on them."
)


_READ_FAILURES = 200  # With one that differs in more than its type, the first, no other is read.


def type_remarks(failures: Iterable[EvalResult[Any]]) -> Iterator[str]:
    """Yield a remark if everything that failed, as far as it is read, differs from what was expected by type only."""
    first: EvalResult[Any] | None = None
    for result in islice(failures, _READ_FAILURES):
        try:
            expected = result.sample.expected
        except FairtrialError:  # The sample was never stored, or the result has no store: nothing to compare with.
            return
        if not _same_but_for_type(result.output, expected):
            return
        first = first or result
    if first is not None:
        output, wanted = (
            f"{plain(repr(value))[:40]} ({type(value).__name__})" for value in (first.output, first.sample.expected)
        )
        yield (
            f"All failures differ from the expected value by type only, such as {output} from {wanted}: "
            "convert the output in the task, or the values of the dataset."
        )


def _same_but_for_type(output: object, expected: object) -> bool:
    if isinstance(output, str) == isinstance(expected, str):
        return False
    text, other = (output, expected) if isinstance(output, str) else (expected, output)
    return str(text).strip() == str(other) or str(text).strip() == json.dumps(other, default=str)
