"""A comparison for a paper: the paragraph on methods and a LaTeX table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fairtrial.base.formatting import count, level, listed, range_text, size_text
from fairtrial.reports.compare.caveats import uncounted_remark
from fairtrial.reports.compare.document import comparison_document, count_tests
from fairtrial.reports.figures.analysis_plan import PlanCheck, date_text
from fairtrial.reports.figures.metrics import is_ratio, is_verdict
from fairtrial.reports.render.document import Cell, Column, Content, Section, Table
from fairtrial.reports.render.safe_text import plain

if TYPE_CHECKING:
    from fairtrial.reports.compare.comparison import Comparison, MetricComparison

_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "`": r"\textasciigrave{}",
    '"': r"{\char34}",  # Packages for languages make a quote the start of a command.
    "[": "{[}", "]": "{]}", "*": "{*}",  # After the end of a row, they would be its arguments.
}  # fmt: skip
_SPECIAL = re.compile("[" + re.escape("".join(_ESCAPES)) + "]")
_MINUS = re.compile(r"(?<![\w.])-(?=\d)")


def latex_text(text: str) -> str:
    """Escape text for LaTeX, on one line: no character of it is a command."""
    escaped = _SPECIAL.sub(lambda found: _ESCAPES[found[0]], plain(text))
    return re.sub(r"([-'!?,])(?=[-'`,])", r"\1{}", escaped)  # Ligatures would join these.


def comparison_table(comparison: Comparison) -> str:
    """Return the tables of a comparison, of all samples and of slices, as LaTeX."""
    document = comparison_document(comparison, 0)
    tables = [block for block in document.blocks if isinstance(block, Table) and block.rows]
    return "\n".join("\n".join(_table(f"{document.title}. {table.caption}.", table)) + "\n" for table in tables)


def _table(caption: str, table: Table) -> Iterator[str]:
    kept = [(at, column) for at, column in enumerate(table.columns) if not column.bar]
    yield r"\begin{table}"
    yield rf"\caption{{{latex_text(caption)}}}"
    yield r"\centering"
    yield r"\begin{tabular}{" + "".join("l" if column.align == "left" else "r" for _, column in kept) + "}"
    yield r"\hline"
    yield " & ".join(latex_text(column.title) for _, column in kept) + r" \\"
    yield r"\hline"
    for row in table.rows:
        if isinstance(row, Section):
            yield rf"\multicolumn{{{len(kept)}}}{{l}}{{\textit{{{latex_text(row.title)}}}}} \\"
        else:
            yield " & ".join(_cell(row[at], column) for at, column in kept) + r" \\"
    yield r"\hline"
    yield r"\end{tabular}"
    yield r"\end{table}"


def _cell(content: Content, column: Column) -> str:
    text = content.text if isinstance(content, Cell) else content if isinstance(content, str) else ""
    escaped = latex_text(text)
    return escaped if column.align == "left" else _MINUS.sub("$-$", escaped)


_POWER = 0.8  # Of the smallest detectable difference.


def methods_paragraph(comparison: Comparison) -> str:
    """Return the paragraph as plain text on one line."""
    return plain(" ".join(_sentences(comparison)))


def _sentences(comparison: Comparison) -> Iterator[str]:
    yield from _samples(comparison)
    yield from _tests(comparison)
    yield from _adjustment(comparison)
    yield from _slices(comparison)
    yield from _missing(comparison)
    yield from _size(comparison)
    yield from _plan(comparison.plan)


def _distinct(comparison: Comparison) -> list[MetricComparison]:
    return [metric for one in comparison.candidates for metric in one.metrics if metric.same_as is None]


def _samples(comparison: Comparison) -> Iterator[str]:
    candidates = comparison.candidates
    names = [one.name for one in candidates]
    sizes = sorted({one.matched for one in candidates})
    size = count(sizes[0], "sample") if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,} samples"
    repeats = {source.run.repeats for source in comparison.sources}
    often = f", with {count(repeats.pop(), 'trial')} of each sample and side" if len(repeats) == 1 else ""
    each = "were each" if len(names) > 1 else "was"
    yield f"{listed(names)} {each} compared with {comparison.baseline.name} on {size} that both have{often}."
    yield from dict.fromkeys(one.changed.remark for one in candidates if one.changed is not None)
    left_out = max(one.only_baseline + one.only_candidate for one in candidates)
    if left_out:
        yield f"Samples of one side only (up to {left_out:,}) were left out."
    for run in {source.run.run_id: source.run for source in comparison.sources}.values():
        if run.noted.is_adaptive:
            yield f"Run {run.run_id} used its own results to decide when to stop; test and interval allow for it."


def _tests(comparison: Comparison) -> Iterator[str]:
    ways: dict[tuple[str, str], dict[str, None]] = {}
    for metric in _distinct(comparison):
        if metric.test is not None and metric.method is not None:
            ways.setdefault((metric.test, metric.method), {})[metric.metric] = None
    for (test, method), names in ways.items():
        interval = f"{level(1 - comparison.alpha)} interval: {method}"
        yield f"Differences in {listed(names)} were assessed by the {test} ({interval})."
    clusters = {metric.clusters for metric in _distinct(comparison) if metric.clusters is not None}
    if clusters:
        sizes = f"{min(clusters):,}" if len(clusters) == 1 else f"{min(clusters):,} to {max(clusters):,}"
        yield f"Samples of one cluster are not independent: tests and intervals are based on {sizes} clusters."
    if any(metric.labels is not None for metric in _distinct(comparison)):
        yield "The verdicts of a judge were corrected by people's labels of some trials."


def _adjustment(comparison: Comparison) -> Iterator[str]:
    primary, others = count_tests(comparison)
    alpha = f"{comparison.alpha:g}"
    if primary and comparison.plan is not None:
        over = f", by Holm's method over {primary} candidates" if primary > 1 else ""
        yield f"The primary metric, {comparison.plan.primary}, was tested on its own at a level of {alpha}{over}."
        if others:
            how = f"adjusted by Holm's method for {others} tests" if others > 1 else "tested"
            yield f"Other metrics were {how} at a further {alpha}."
    elif comparison.tests > 1:
        yield f"The p-values of {comparison.tests} tests were adjusted by Holm's method, at {alpha} over all of them."
    elif comparison.tests:
        yield f"The level of the test is {alpha}."


def _slices(comparison: Comparison) -> Iterator[str]:
    slices = [part for one in comparison.candidates for part in one.slices]
    if not slices:
        return
    tests = sum(metric.same_as is None and metric.p is not None for part in slices for metric in part.metrics)
    keys = listed(dict.fromkeys(part.by for part in slices))
    adjusted = f"; their {tests} p-values were adjusted by Benjamini and Hochberg's method" if tests > 1 else ""
    yield f"The comparison was repeated on {count(len(slices), 'slice')} by {keys}{adjusted}."
    between = sum(len(one.slice_tests) for one in comparison.candidates)
    if between:
        how = "by one test" if between == 1 else f"by {between} tests, adjusted by Holm's method"
        yield f"Whether changes differ between slices was assessed {how}."


def _missing(comparison: Comparison) -> Iterator[str]:
    sides = [comparison.baseline, *(one.candidate for one in comparison.candidates)]
    failures, missing = sum(side.failures for side in sides), sum(side.missing for side in sides)
    if failures:
        yield f"{count(failures, 'trial')} ended in a task error or timeout{_counted(comparison, failures)}."
        yield from dict.fromkeys(uncounted_remark(metric) for metric in _distinct(comparison) if metric.uncounted)
    else:
        yield "No trial ended in a task error or timeout."
    if not missing:
        yield "No trial is missing."
        return
    were = "trial was" if missing == 1 else "trials were"
    yield f"{missing:,} {were} not run or not scored, and left out of means and intervals."
    for one in comparison.candidates:
        for metric in one.metrics:
            if metric.worst is not None and metric.same_as is None:
                worst = range_text(*metric.worst, percent=is_verdict(metric.metric))
                whose = f"the interval of the difference of {one.name} in {metric.metric}"
                yield f"Whatever they would have been, {whose} is {worst}."


def _counted(comparison: Comparison, failures: int) -> str:
    if all(metric.uncounted for metric in _distinct(comparison)):
        return ""
    return f" and counted as {'a failure' if failures == 1 else 'failures'}"


def _size(comparison: Comparison) -> Iterator[str]:
    adaptive = any(source.run.noted.is_adaptive for source in comparison.sources)
    sizes = dict.fromkeys((metric.metric, metric.smallest_difference) for metric in _distinct(comparison))
    for name, size in () if adaptive else sizes:
        if size is not None:
            within = size_text(size, percent=is_verdict(name), relative=is_ratio(name))
            yield f"Sides whose interval in {name} lies within {within} of 0 are called equally good."
    first = next((metric for metric in _distinct(comparison) if metric.mde is not None), None)
    if first is not None and first.mde is not None:
        found = size_text(first.mde, percent=is_verdict(first.metric), relative=is_ratio(first.metric))
        yield f"A true difference of {found} in {first.metric} would have been detected with a power of {_POWER:g}."


def _plan(plan: PlanCheck | None) -> Iterator[str]:
    if plan is None:
        yield "No analysis plan was stored with the runs."
        return
    samples, power = plan.content.get("samples"), plan.content.get("power")
    if samples is not None:
        yield f"{samples:,} samples had been planned, for a power of {power:g}."
    named = f"planned on {date_text(plan.planned_at)} (plan {plan.digest[:16]})"
    if plan.deviations:
        yield f"The analysis was {named}, with these deviations: {'; '.join(plan.deviations)}."
    else:
        yield f"The analysis was {named}, before the first result, with no deviation."
