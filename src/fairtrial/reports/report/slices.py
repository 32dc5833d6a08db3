"""The slices of a report: pass rates by metadata."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from fairtrial.reports.figures.estimates import SliceEstimates, slice_estimates
from fairtrial.reports.render.document import Column, Content, Section, Table
from fairtrial.reports.render.safe_text import plain
from fairtrial.reports.report.remarks import bar, span, value
from fairtrial.store.protocol import RunRecord, RunStore

if TYPE_CHECKING:
    from fairtrial.reports.report.experiment import ExperimentReport

_NAME = 80
_LOOKED_AT, _MOST_VALUES, _MOST_KEYS = 2_000, 12, 12


def slice_table(keys: Sequence[str], parts: Sequence[ExperimentReport]) -> Table:
    """Return the table of the pass rates of slices, for every metadata key with few values."""
    rows: list[tuple[Content, ...] | Section] = []
    several = len(parts) > 1
    for key in keys:
        rows.append(Section(plain(key, limit=_NAME)))
        found = [
            (part.name, one)
            for part in parts
            for one in slice_estimates(part.source, key)
            if any(estimate.name == "pass_rate" for estimate in one.estimates)
        ]
        for experiment, one in sorted(found, key=lambda pair: one_of(pair[1])):
            rate = one["pass_rate"]
            cells = (one_of(one), *((experiment,) if several else ()))
            rows.append((*cells, f"{rate.n:,}", value(rate, rate.value), span(rate), bar(rate, (0.0, 1.0))))
    columns = (
        Column("slice", "left", name=True),
        *((Column("experiment", "left", name=True),) if several else ()),
        Column("n"), Column("pass rate"), Column("interval"), Column("0 to 1", "left", bar=True),
    )  # fmt: skip
    return Table("Slices", columns, tuple(rows))


def one_of(part: SliceEstimates) -> str:
    """Return the metadata value that the samples of a slice share."""
    return plain(part.name.partition(" = ")[2] or part.name, limit=_NAME)


def slice_keys(store: RunStore, run: RunRecord) -> list[str]:
    """Return the metadata keys with two to `_MOST_VALUES` different texts in the first samples."""
    values: dict[str, set[str]] = {}
    seen = 0
    for _, sample in islice(store.samples(run.run_id), _LOOKED_AT):
        seen += 1
        for key, found in sample.metadata.items():
            if isinstance(found, str | bool):
                values.setdefault(key, set()).add(str(found))
    return [key for key, found in values.items() if 1 < len(found) <= min(_MOST_VALUES, seen // 2)][:_MOST_KEYS]
