"""The matrix: samples as rows, experiments as columns, outputs side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fairtrial.reports.render.safe_text import value_text
from fairtrial.reports.run_names import RunName
from fairtrial.store.protocol import TrialPreview
from fairtrial.viewer.matrix import ROWS, CellTrial, Matrix, MatrixColumn, MatrixPage
from fairtrial.viewer.pages.context import PageNotFoundError, Viewer
from fairtrial.viewer.question import LENGTHS, SHOWS, Links, MatrixQuestion, read_matrix_question
from fairtrial.viewer.text import DiffPart, differences, shown
from fairtrial.viewer.trial_table import open_columns_of

MOST_COLUMNS = 8
_OTHER_RUNS = 12
_SEARCH_SECONDS = 1.5
_MARKING_SECONDS = 1.0  # Of one page: long texts of many columns take longer.
_MOST_MARKED = 0.7  # Of a text: to mark more than this would mark nothing.
_SHOWN_REPEATS = 20


@dataclass(frozen=True, slots=True)
class CellShown:
    """What is shown of one sample in one experiment; `trial` is the repeat whose output it is."""

    trial: CellTrial
    score: float | None
    text: tuple[DiffPart, ...]
    cut: bool
    remark: str  # What it is against the first column, where nothing is marked.
    note: str
    latency_ms: int
    address: str | None
    change: str  # "worse" or "better" than the first column, or "".
    passed: int
    trials: int
    repeats: tuple[tuple[int, str, str | None], ...]  # Number, state and address of each repeat, if there are several.

    @property
    def tone(self) -> str:
        """The tone of its verdict."""
        return {"passed": "good", "failed": "bad"}.get(self.trial.state, "unsure")

    @property
    def is_error(self) -> bool:
        """True if the trial has no score."""
        return self.trial.state not in ("passed", "failed")


@dataclass(frozen=True, slots=True)
class RowShown:
    """One sample, with a cell for each column; None where an experiment has no result for it."""

    sample_id: str
    input: str
    expected: str
    metadata: str
    cells: tuple[CellShown | None, ...]
    differs: bool  # Whether the verdicts of its cells do.


async def matrix_page(viewer: Viewer, request: Request) -> Response:
    """Show one page of the samples, with what each experiment answered."""
    question, complaints = read_matrix_question(request.query_params.multi_items())
    sides, given = await _sides(viewer, question.columns)
    if given > len(sides):
        complaints.append(f"{len(sides)} of {given} columns are shown: choose others under Columns")
    names = tuple(str(side) for side in sides)
    question = replace(question, columns=names)
    runs = {side.run.run_id: side.run for side in sides}
    for run in runs.values():
        await viewer.prepare_columns(run)
    searched: dict[str, Any] | None = None
    if question.reads_texts:
        job = {
            "job": "rows", "sides": [(side.run.run_id, side.experiment) for side in sides], "query": question.pairs(),
            "limit": ROWS, "seconds": _SEARCH_SECONDS,
        }  # fmt: skip
        state = tuple([await viewer.state_of(run) for run in runs.values()])
        searched = await viewer.workbench.answer(job, state)
    links = viewer.links(request)
    values = await viewer.read(_values, viewer, links, sides, question, searched)
    others = await viewer.read(viewer.store.runs, suite=sides[0].run.suite, limit=_OTHER_RUNS)
    # Those that are chosen first, in their order: the first is what the others are compared with.
    known = [str(RunName(run, name)) for run in (*runs.values(), *others) for name in run.experiments]
    following = searched["next"] if searched else values["page"].next
    return viewer.render(
        request, "matrix.html", title=f"{sides[0].run.name}: matrix", run=sides[0].run, question=question,
        complaints=complaints, searched=searched, names=names, tab="matrix", shows=SHOWS,
        offered=list(dict.fromkeys((*names, *known))),
        lengths=LENGTHS, most=MOST_COLUMNS, repeats=max(run.repeats for run in runs.values()),
        running=[run for run in runs.values() if run.status == "running"], one_run=len(runs) == 1,
        sides=[
            (side, _params(side), links.matrix(_from_first(replace(question, columns=(name, *_without(names, name)))))
             if place else "")
            for place, (side, name) in enumerate(zip(sides, names, strict=True))
        ],
        addresses={
            "next": "" if following is None else links.matrix(_moved(question, following)),
            "previous": "" if searched or values["page"].previous is None
            else links.matrix(_moved(question, values["page"].previous)),
            "clear": links.matrix(MatrixQuestion(names).pairs()),
        },
        without={
            (key, value): links.matrix(_without_value(question, key, value))
            for key, some in question.filters.metadata for value in some
        },
        **values,
    )  # fmt: skip


async def _sides(viewer: Viewer, wanted: Sequence[str]) -> tuple[list[RunName], int]:
    """Return the columns that are named, as many as fit, and how many there are."""
    if not wanted:
        raise PageNotFoundError("a matrix needs the names of runs or experiments: matrix?c=support@3")
    named = [await viewer.find_run(text) for text in wanted]
    found = {(one.run.run_id, name): RunName(one.run, name) for one in named for name in one.experiments}
    return list(found.values())[:MOST_COLUMNS], len(found)


def _without(names: Sequence[str], name: str) -> tuple[str, ...]:
    return tuple(one for one in names if one != name)


def _from_first(question: MatrixQuestion) -> list[tuple[str, str]]:
    return replace(question, filters=question.filters.first_page).pairs()


def _moved(question: MatrixQuestion, row: int) -> list[tuple[str, str]]:
    return replace(question, filters=replace(question.filters, scan_from=row)).pairs()


def _without_value(question: MatrixQuestion, key: str, value: str) -> list[tuple[str, str]]:
    return replace(question, filters=question.filters.with_value(f"m.{key}", value, False)).pairs()


def _params(side: RunName) -> str:
    """Return the parameters of an experiment in words."""
    found = side.run.params.get(side.experiment or "")
    return ", ".join(f"{key}={value_text(value)}" for key, value in found.items()) if isinstance(found, dict) else ""


def _values(
    viewer: Viewer, links: Links, sides: Sequence[RunName], question: MatrixQuestion, searched: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what is read from the store."""
    opened = {side.run.run_id: open_columns_of(viewer.store, side.run) for side in sides}
    matrix = Matrix([(opened[side.run.run_id], str(side.experiment)) for side in sides])
    page = matrix.page(question)
    if searched is not None:
        page = MatrixPage(tuple(searched["hits"]), 1, len(searched["hits"]), searched["next"], None)
    previews = [_previews(viewer, column, page, question) for column in matrix.columns]
    end = time.monotonic() + _MARKING_SECONDS
    rows = [_row(links, matrix, row, [found.get(row) for found in previews], question, end) for row in page.rows]
    return {
        "page": page, "rows": rows, "facets": list(matrix.facets(question)), "tallies": matrix.tallies(question),
        "counts": matrix.counts(question, [show for show in SHOWS if show != "outputs"]),
    }  # fmt: skip


type _Found = tuple[list[CellTrial], TrialPreview]


def _previews(viewer: Viewer, column: MatrixColumn, page: MatrixPage, question: MatrixQuestion) -> dict[int, _Found]:
    """Return the stored trials of a column's cells, the one that is shown first, with its preview."""
    trials = {row: some for row in page.rows if (some := column.shown(row, question.repeat))}
    found = viewer.store.previews(
        column.run.run_id, [some[0].ordinal for some in trials.values()], size=question.length + 1
    )
    known = {preview.ordinal: preview for preview in found}
    return {row: (some, known[some[0].ordinal]) for row, some in trials.items() if some[0].ordinal in known}


def _row(
    links: Links, matrix: Matrix, row: int, found: Sequence[_Found | None], question: MatrixQuestion, end: float
) -> RowShown:
    texts = [None if one is None else _text(one[1], question.length) for one in found]
    marked = _marked(texts, end)
    cells = tuple(
        None if one is None else _cell(links, matrix, place, row, one, marked[place], question.length)
        for place, one in enumerate(found)
    )
    sample = next((one[1] for one in found if one is not None), None)
    if sample is None:  # Deleted meanwhile.
        return RowShown(matrix.sample_id(row), "", "", "", cells, False)
    expected = "" if sample.expected == "null" else _cut(sample.expected, question.length)
    metadata = ", ".join(f"{key}: {value_text(value)}" for key, value in (sample.metadata or {}).items())
    differs = bool(matrix.differing[row])
    return RowShown(sample.sample_id, _cut(sample.input, question.length), expected, metadata, cells, differs)


def _text(preview: TrialPreview, length: int) -> str:
    return shown((preview.output if preview.outcome == "scored" else preview.note)[:length]).text


def _cut(text: str, length: int) -> str:
    return shown(text[:length]).text + ("…" if len(text) > length else "")


def _marked(texts: Sequence[str | None], end: float) -> list[tuple[tuple[DiffPart, ...], str]]:
    """Return the parts of each text, and a remark: what differs from the first is marked; of two texts, in both.

    Nothing is marked after the end, a time of the monotonic clock.
    """
    first = texts[0]
    made: list[tuple[tuple[DiffPart, ...], str]] = [((DiffPart(text or "", False),), "") for text in texts]
    if not first:
        return made
    for place, text in enumerate(texts[1:], 1):
        if not text:
            continue
        if first == text:
            made[place] = (made[place][0], "same text")
            continue
        if time.monotonic() > end:
            made[place] = (made[place][0], "not marked")
            continue
        before, after, remark = differences(first, text)
        changed = sum(len(part.text) for part in after if part.changed)
        if remark.startswith("the texts are") or changed > _MOST_MARKED * len(text):
            made[place] = (made[place][0], "other text")
        else:
            made[place] = (tuple(after), "")
            if len(texts) == 2:
                made[0] = (tuple(before), "")
    return made


def _cell(
    links: Links,
    matrix: Matrix,
    place: int,
    row: int,
    found: _Found,
    marked: tuple[tuple[DiffPart, ...], str],
    length: int,
) -> CellShown:
    trials, preview = found
    column, first = matrix.columns[place], matrix.columns[0]
    share, reference = column.share[row], first.share[row]

    def address(trial: CellTrial) -> str | None:
        return links.trial(column.run, column.experiment, preview.sample_id, trial.repeat, [("o", str(trial.ordinal))])

    text = preview.output if preview.outcome == "scored" else preview.note
    return CellShown(
        trial=trials[0],
        score=preview.value,
        text=marked[0],
        cut=len(text) > length,
        remark="same beginning" if marked[1] == "same text" and len(text) > length else marked[1],
        note=preview.note if preview.outcome == "scored" and not preview.passed else "",
        latency_ms=preview.latency_ms,
        address=address(trials[0]),
        change="worse" if share < reference else "better" if share > reference else "",
        passed=int(column.passed[row]),
        trials=len(trials),
        repeats=tuple(
            (trial.repeat, trial.state, address(trial)) for trial in sorted(trials)[:_SHOWN_REPEATS]
        ) if column.run.repeats > 1 else (),
    )  # fmt: skip
