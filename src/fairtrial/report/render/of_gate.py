"""What a gate says: its decision first, then rule by rule what was asked and what was found."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO

from fairtrial.report.checks import GateCheck
from fairtrial.report.gate import GateResult
from fairtrial.report.render import words
from fairtrial.report.render.document import Bar, Block, Cell, Column, Document, Remarks, Table, Tone, Verdict
from fairtrial.report.render.junit import attributes, case, content, properties, write_suites
from fairtrial.report.render.of_comparison import document as of_comparison
from fairtrial.report.render.of_comparison import percent, span
from fairtrial.report.words import bound_text, end_text, margin_text, samples_text

_TONES: dict[str, Tone] = {"pass": "good", "fail": "bad", "inconclusive": "unsure"}


def document(result: GateResult, *, cases: int) -> Document:
    """What there is to say, with at most `cases` flipped samples each way to read."""
    first, *rest = result.reasons or ("",)
    blocks: list[Block] = [
        Verdict(result.status, first, _TONES[result.status]),
        Remarks(tuple(rest)),
        _checks(result),
        Remarks(tuple(_remarks(result))),
    ]
    if cases and result.comparison is not None:
        inside = of_comparison(result.comparison, cases=cases).blocks
        blocks += [block for block in inside if not isinstance(block, Verdict | Remarks)]
    against = "" if result.baseline is None else f" against {result.baseline}"
    return Document(f"gate: {result.candidate}{against}", (), tuple(blocks))


def rule(check: GateCheck) -> str:
    """What a rule asks for, in words."""
    where = "" if check.slice is None else f"{check.slice}: "
    if check.kind == "margin":
        return f"{where}{check.metric} at most {margin_text(check.metric, check.bound)} worse"
    bound = bound_text(check.metric, check.bound)
    return f"{where}{check.metric} at {'most' if check.kind == 'ceiling' else 'least'} {bound}"


def _value(check: GateCheck, value: float | None) -> str:
    if check.kind == "margin":
        return words.signed(value, percent=percent(check.metric))
    return words.rate(value) if percent(check.metric) else words.number(value)


def _span(check: GateCheck) -> str:
    if check.kind == "margin":
        return span(check.metric, check.low, check.high)
    if check.low is None or check.high is None:
        return words.UNDEFINED
    return " to ".join(end_text(check.metric, end, check.bound) for end in (check.low, check.high))


def _bar(check: GateCheck) -> Bar | None:
    """The interval beside the bound it is held against."""
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


def _remarks(result: GateResult) -> Iterator[str]:
    open_rules = sum(check.status == "inconclusive" for check in result.checks)
    if result.status == "inconclusive" and result.needed is not None and open_rules > 1:  # One has said so itself.
        yield f"About {samples_text(result.needed)} samples would decide what is open."
    if result.missing_share:
        what = "trials" if result.baseline is None else "trials or pairs"
        yield f"{words.rate(result.missing_share)} of the {what} are missing: not run, or their scoring failed."
    yield from result.warnings


def write_junit(result: GateResult, file: IO[str]) -> None:
    """Write a test case for each rule: a broken rule is a failure, an open one an error, for neither lets through."""
    counts = {status: sum(check.status == status for check in result.checks) for status in _TONES}
    # Too many missing trials leave a gate open although each rule may be met.
    missing = result.status == "inconclusive" and not counts["inconclusive"]
    facts = {
        "name": f"gate.{result.candidate}",
        "tests": len(result.checks) + missing,
        "failures": counts["fail"],
        "errors": counts["inconclusive"] + missing,
        "skipped": 0,
        "time": "0.000",
    }
    write_suites(file, "gate", [(facts, _cases(result, missing=missing))])


def as_junit(result: GateResult) -> str:
    """The same as text."""
    buffer = io.StringIO()
    write_junit(result, buffer)
    return buffer.getvalue()


def _cases(result: GateResult, *, missing: bool) -> Iterator[str]:
    name = f"gate.{result.candidate}"
    if missing:
        reason = result.reasons[0] if result.reasons else ""
        yield case(name, "missing trials", 0.0, [_problem("error", "inconclusive", reason)])
    for check in result.checks:
        found = {key: "" if value is None else value for key, value in _figures(check)}
        inside = [*properties(found)]
        if check.status != "pass":
            kind = "failure" if check.status == "fail" else "error"
            inside.append(_problem(kind, check.status, check.reason))
        yield case(name, rule(check), 0.0, inside)


def _problem(kind: str, what: str, reason: str) -> str:
    return f"<{kind}{attributes(type=what, message=reason)}>{content(reason)}</{kind}>"


def _figures(check: GateCheck) -> Iterator[tuple[str, object]]:
    for name in ("value", "low", "high", "bound", "n", "p"):
        yield name, getattr(check, name)
