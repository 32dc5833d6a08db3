"""A search for a better prompt: what the test split showed, and the candidates with their parents and texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fairtrial.base.formatting import rate
from fairtrial.reports.render.document import Bar
from fairtrial.reports.render.html import bar_svg
from fairtrial.reports.search.search import BASELINE, CANDIDATE, SEARCH, WINNER, search_of
from fairtrial.runs.run_lease import with_current_status
from fairtrial.store.protocol import RunRecord
from fairtrial.viewer.pages.context import PageNotFoundError, Viewer, wants_json
from fairtrial.viewer.question import Links
from fairtrial.viewer.text import DiffPart, Html, differences, shown

_ON_A_PAGE = 100
_PATIENCE_SECONDS = 5.0
_MARKING_SECONDS = 1.0  # Of one page: long texts of many candidates take longer.
_SHOWN_RUNS = 12
_SHOWN_ERRORS = 5
_DEEPEST = 6
"""How far candidates are indented below their parents."""


@dataclass(frozen=True, slots=True)
class ScoreShown:
    """The mean score of a candidate on a split; without one, `mean` is empty."""

    split: str
    mean: str
    interval: str
    drawing: Html
    samples: int
    errors: tuple[str, ...]
    errors_left: int
    runs: tuple[tuple[str, str], ...]  # Names and addresses.
    runs_left: int


@dataclass(frozen=True, slots=True)
class CandidateShown:
    """A candidate, with its text beside the one that it is compared with."""

    id: str
    number: int
    name: str
    chosen: bool
    indent: str
    address: str
    parents: tuple[tuple[str, str], ...]  # Names and addresses.
    train: ScoreShown | None
    validation: ScoreShown | None
    other: str  # The name of the candidate whose text is beside it; empty without one.
    before: list[DiffPart]
    after: list[DiffPart]
    remark: str
    outputs: str  # The address of its outputs on the validation split, beside those of the baseline.


async def search_page(viewer: Viewer, request: Request) -> Response:
    """Show a search."""
    query = request.query_params
    name, against = query.get("name", ""), "baseline" if query.get("against") == BASELINE else "parent"
    runs = await viewer.read(_runs, viewer, name)
    if not any(CANDIDATE in run.tags for run in runs):
        raise PageNotFoundError(f"there is no search {name!r} in this store")
    answer = viewer.workbench.answer({"job": "candidates", "name": name}, await viewer.state_of_all(runs))
    if wants_json(request):
        return JSONResponse((await answer)["json"])
    links = viewer.links(request)
    try:
        found = await asyncio.wait_for(answer, _PATIENCE_SECONDS)
    except TimeoutError:
        return viewer.render(request, "search.html", title=name, about=(), found=None)
    search = found["json"]
    order = _in_lineage(search["candidates"])
    start = min(_start(query.get("from", "")), (len(order) - 1) // _ON_A_PAGE * _ON_A_PAGE)
    by_id = {run.run_id: run for run in runs}
    page = _Page(links, name, against, search, order, by_id)
    rows = await viewer.read(page.rows, start)  # In a thread: comparing the words of long texts takes a while.
    test = by_id.get(search["test_run"])
    sides = None if test is None else (f"{test.name}:{BASELINE}", f"{test.name}:{WINNER}")
    return viewer.render(
        request, "search.html", title=name, found=found, about=found["about"], report=Html(found["html"]), rows=rows,
        parameter=search["parameter"], against=against, all_runs=links.runs(tag=f"{SEARCH}={name}"), test=test,
        comparison="" if sides is None else links.compare(*sides),
        outputs="" if sides is None else links.matrix([("c", side) for side in sides]),
        switch=[(one, "" if one == against else page.address(start, one)) for one in ("parent", "baseline")],
        previous="" if not start else page.address(start - _ON_A_PAGE),
        following="" if start + _ON_A_PAGE >= len(order) else page.address(start + _ON_A_PAGE),
        running=[run for run in runs if run.status == "running"],
    )  # fmt: skip


def _runs(viewer: Viewer, name: str) -> list[RunRecord]:
    """Return the runs of a search, the oldest first."""
    runs = [run for run in reversed(viewer.store.runs()) if search_of(run) == name]
    return [with_current_status(viewer.store, run) for run in runs]


def _start(text: str) -> int:
    return int(text) // _ON_A_PAGE * _ON_A_PAGE if text.isdecimal() and len(text) < 9 else 0


def _in_lineage(candidates: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the place of each candidate with its depth: each follows its first parent, after earlier children."""
    places = {one["id"]: place for place, one in enumerate(candidates)}
    children: dict[int | None, list[int]] = {}
    for place, one in enumerate(candidates):
        children.setdefault(places[one["parents"][0]] if one["parents"] else None, []).append(place)
    ordered: dict[int, int] = {}
    for root in (*children.get(None, ()), *range(len(candidates))):  # The others: parents of each other.
        waiting = [(root, 0)]
        while waiting:
            place, depth = waiting.pop()
            if place not in ordered:
                ordered[place] = depth
                waiting += [(child, depth + 1) for child in reversed(children.get(place, ()))]
    return list(ordered.items())


class _Page:
    """What the page shows of candidates, in the order of their lineage."""

    def __init__(
        self,
        links: Links,
        name: str,
        against: str,
        search: Mapping[str, Any],
        order: Sequence[tuple[int, int]],
        runs: Mapping[str, RunRecord],
    ) -> None:
        self._links, self._name, self._against, self._order, self._runs = links, name, against, order, runs
        self._candidates: Sequence[Mapping[str, Any]] = search["candidates"]
        self._best = search["best"]
        self._by_id = {one["id"]: one for one in self._candidates}
        self._at = {self._candidates[place]["id"]: at for at, (place, _) in enumerate(order)}

    def address(self, start: int, against: str | None = None) -> str:
        """Return the address of the page that begins at a place."""
        against = against or self._against
        query = [("against", against)] if against == BASELINE else []
        return self._links.search(self._name, query + ([("from", str(start))] if start else []))

    def rows(self, start: int) -> list[CandidateShown]:
        """Return the candidates of the page that begins at a place."""
        end = time.monotonic() + _MARKING_SECONDS
        return [self._row(place, depth, end) for place, depth in self._order[start : start + _ON_A_PAGE]]

    def _row(self, place: int, depth: int, end: float) -> CandidateShown:
        one = self._candidates[place]
        parents = [self._by_id[id] for id in one["parents"]]
        other = None if not place else (parents or self._candidates)[0]
        if self._against == BASELINE and place:
            other = self._candidates[0]
        text, remark = shown(one["text"]).text, ""
        before, after = [DiffPart("", False)], [DiffPart(text, False)]
        if other is not None:
            old = shown(other["text"]).text
            before, remark = [DiffPart(old, False)], "not marked: these texts take too long"
            if time.monotonic() < end:
                before, after, remark = differences(old, text)
        return CandidateShown(
            one["id"],
            one["number"],
            _name_of(one),
            one["id"] == self._best,
            "\u2003" * (min(depth, _DEEPEST) - 1) + "\u2514 " if depth else "",
            self._anchor(one),
            tuple((_name_of(parent), self._anchor(parent)) for parent in parents),
            self._score(one, "train"),
            self._score(one, "validation"),
            "" if other is None else _name_of(other),
            before,
            after,
            remark,
            self._outputs(one) if place else "",
        )

    def _anchor(self, one: Mapping[str, Any]) -> str:
        return f"{self.address(self._at[one['id']] // _ON_A_PAGE * _ON_A_PAGE)}#c{one['number']}"

    def _score(self, one: Mapping[str, Any], split: str) -> ScoreShown | None:
        score = one[split]
        if score is None:
            return None
        mean, low, high = score["mean"], score["low"], score["high"]
        known = low is not None and high is not None
        first = self._candidates[0][split]
        mark = None if first is None or one["number"] == 0 else first["mean"]
        runs = [self._runs[id] for id in score["runs"] if id in self._runs]
        return ScoreShown(
            split,
            "" if mean is None else rate(mean),
            f"{rate(low)} to {rate(high)}" if known else "",
            Html(bar_svg(Bar(low, mean, high, mark=mark)) if known and mean is not None else ""),
            score["samples"],
            tuple(score["errors"][:_SHOWN_ERRORS]),
            max(0, len(score["errors"]) - _SHOWN_ERRORS),
            tuple((run.name, self._links.run(run)) for run in runs[:_SHOWN_RUNS]),
            max(0, len(runs) - _SHOWN_RUNS),
        )

    def _outputs(self, one: Mapping[str, Any]) -> str:
        """Return where the outputs on the validation split are beside those of the baseline."""
        scores = (self._candidates[0]["validation"], one["validation"])
        runs = [self._runs[id] for score in scores if score for id in score["runs"][:1] if id in self._runs]
        return self._links.matrix([("c", run.name) for run in runs]) if len(runs) == 2 else ""


def _name_of(one: Mapping[str, Any]) -> str:
    return f"candidate {one['number']}" if one["number"] else BASELINE
