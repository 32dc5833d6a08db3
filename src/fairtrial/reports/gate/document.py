"""The document of a gate: the decision, then the requirement and result of each rule; and its test cases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from fairtrial.base import formatting
from fairtrial.base.formatting import bound_text, end_text, margin_text, open_range
from fairtrial.reports.compare.document import change, comparison_document, span
from fairtrial.reports.figures.metrics import is_ratio, is_verdict
from fairtrial.reports.gate.checks import GateCheck
from fairtrial.reports.render.document import Bar, Block, Cell, Column, Conclusion, Document, Remarks, Table, Tone
from fairtrial.reports.render.renderable import attributes, case, content, properties, write_suites

if TYPE_CHECKING:
    from fairtrial.reports.gate.gate import GateResult

MOST_REASONS = 6
"""Maximum number of reasons shown beside the first; the others are counted."""

_TONES: dict[str, Tone] = {"pass": "good", "fail": "bad", "inconclusive": "unsure"}


def gate_document(result: GateResult, cases: int) -> Document:
    """Return the document, with at most `cases` flipped samples in each direction."""
    plan = result.plan
    first, *rest = result.reasons or ("",)
    blocks: list[Block] = [
        Conclusion(result.status, first, _TONES[result.status]),
        Remarks(tuple(_summed_up(rest, result))),
        _checks(result),
        Remarks((*(() if plan is None else plan.lines), *result.warnings, *_exact(result))),
    ]
    if cases and result.comparison is not None:
        inside = comparison_document(result.comparison, cases).blocks
        blocks += [block for block in inside if not isinstance(block, Conclusion | Remarks)]
    against = "" if result.baseline is None else f" against {result.baseline}"
    about = () if plan is None else (plan.sentence,)
    return Document(f"gate: {result.candidate}{against}", about, tuple(blocks))


def _exact(result: GateResult) -> tuple[str, ...]:
    """Say why the interval of a rate is not that of its report."""
    differs = any("(exact " in reason for reason in result.reasons)
    return ("Gates use the exact interval of a rate, which is not that of reports.",) if differs else ()


def _summed_up(reasons: Sequence[str], result: GateResult) -> Iterator[str]:
    """Yield the first reasons and, of a gate with many slices, how many there are in all: the table has each."""
    if len(reasons) <= MOST_REASONS:
        yield from reasons
        return
    yield from reasons[: MOST_REASONS - 1]
    counted = [(status, sum(check.status == status for check in result.checks)) for status in ("fail", "inconclusive")]
    summary = " and ".join(f"{number:,} {status}" for status, number in counted if number)
    yield f"Of all {len(result.checks):,} rules, the decision is: {summary}; the table lists each."


def rule(check: GateCheck) -> str:
    """Return the requirement of a rule as text."""
    where = "" if check.slice is None else f"{check.slice}: "
    if check.kind == "margin":
        margin = margin_text(check.bound, percent=is_verdict(check.metric), relative=is_ratio(check.metric))
        return f"{where}{check.metric} at most {margin} worse"
    bound = bound_text(check.bound, percent=is_verdict(check.metric))
    return f"{where}{check.metric} at {'most' if check.kind == 'ceiling' else 'least'} {bound}"


def _value(check: GateCheck, value: float | None) -> str:
    if check.kind == "margin":
        return change(check.metric, value)
    return formatting.rate(value) if is_verdict(check.metric) else formatting.number(value)


def _span(check: GateCheck) -> str:
    if check.kind == "margin":
        return span(check.metric, check.low, check.high)
    low, high = (
        None if end is None else end_text(end, check.bound, percent=is_verdict(check.metric))
        for end in (check.low, check.high)
    )
    return open_range(low, high)


def _bar(check: GateCheck) -> Bar | None:
    """Return the bar of the interval with the bound."""
    if check.value is None or check.low is None or check.high is None or not -1 <= check.low <= check.high <= 1:
        return None
    if check.kind != "margin":
        return Bar(check.low, check.value, check.high, mark=check.bound) if check.low >= 0 else None
    reach = max(abs(check.low), abs(check.high), check.bound) or 1.0
    return Bar(check.low, check.value, check.high, -reach, reach, mark=-check.bound)


def _checks(result: GateResult) -> Table:
    columns = (
        Column("rule", "left", name=True),
        Column("decision", "left"),
        Column("found"),
        Column("interval"),
        Column("n"),
        Column("bound |", "left", bar=True),
    )
    rows = [
        (
            rule(check),
            Cell(check.status, _TONES[check.status]),
            _value(check, check.value),
            _span(check),
            f"{check.n:,}",
            _bar(check),
        )
        for check in result.checks
    ]
    return Table("Rules", columns, tuple(rows))


def write_rules(result: GateResult, file: IO[str]) -> None:
    """Write a test case for each rule: a failed rule is a failure, an inconclusive one an error."""
    counts = {
        status: sum(check.status == status for check in result.checks) for status in ("pass", "fail", "inconclusive")
    }
    facts = {
        "name": f"gate.{result.candidate}",
        "tests": len(result.checks),
        "failures": counts["fail"],
        "errors": counts["inconclusive"],
        "skipped": 0,
        "time": "0.000",
    }
    write_suites(file, "gate", [(facts, _rule_cases(result))])


def _rule_cases(result: GateResult) -> Iterator[str]:
    for check in result.checks:
        figures = {name: getattr(check, name) for name in ("value", "low", "high", "bound", "n", "p")}
        inside = [*properties({name: "" if value is None else value for name, value in figures.items()})]
        if check.status != "pass":
            element = "failure" if check.status == "fail" else "error"
            tag = attributes(type=check.status, message=check.reason)
            inside.append(f"<{element}{tag}>{content(check.reason)}</{element}>")
        yield case(f"gate.{result.candidate}", rule(check), 0.0, inside)
