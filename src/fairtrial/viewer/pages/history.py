"""The history of a suite: pass rate and cost by day, run or version of the code, what changed, and the alarm."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from datetime import date
from math import ceil, floor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fairtrial.base.formatting import count, money, rate
from fairtrial.errors import FairtrialError
from fairtrial.reports.figures.metrics import ERRORS
from fairtrial.reports.render.document import Bar
from fairtrial.reports.render.html import bar_svg
from fairtrial.reports.render.plots import TimeBand, TimePoint, timeline
from fairtrial.runs.run_lease import with_current_status
from fairtrial.store.protocol import RunRecord
from fairtrial.viewer.pages.context import PageNotFoundError, Viewer
from fairtrial.viewer.text import Html

_BY = {"": "day", "run": "run", "code": "code version"}
_SPANS = ("90", "30", "365")
_ERRORS = [("outcome", name) for name in ERRORS]
_PATIENCE_SECONDS = 5.0
_SHOWN_RUNS = 12
_NARROWEST = 0.1  # The least height of the scale of pass rates.


async def history_page(viewer: Viewer, request: Request) -> Response:
    """Show the history of one experiment of a suite."""
    query = request.query_params
    suite = query.get("suite", "")
    runs = await viewer.read(viewer.store.runs, suite=suite)
    if not runs:
        raise PageNotFoundError(f"there is no run of suite {suite!r}")
    state = await viewer.read(lambda: tuple(_state(with_current_status(viewer.store, run)) for run in runs))
    asked = {name: query.get(name, "") for name in ("experiment", "dataset", "by", "span", "end", "alarm", "since")}
    asked |= {"by": asked["by"] if asked["by"] in _BY else "", "span": asked["span"] if asked["span"] in _SPANS else ""}
    asked["reference"] = text if (text := query.get("reference", "")).isdecimal() and len(text) < 9 else ""
    asked["since"] = _day(asked["since"])
    job = {name: asked[name] for name in ("experiment", "dataset", "by", "end")}
    found, trouble = await _soon(
        viewer, {"job": "history", "suite": suite, "span": int(asked["span"] or _SPANS[0]), **job}, state
    )
    if trouble:
        raise FairtrialError(trouble)
    points: list[dict[str, Any]] = [] if found is None else found["points"]
    alarm, problem = None, ""
    if found is not None and points and asked["alarm"]:
        settings = {"experiment": found["experiment"], "since": asked["since"]}
        settings |= {"reference": int(asked["reference"])} if asked["reference"] else {}
        alarm, problem = await _soon(
            viewer, {"job": "alarm", "suite": suite, "settings": settings}, (date.today(), *state)
        )
    watched = None if alarm is None else alarm["json"]["system"]
    links, unit = viewer.links(request), _BY[asked["by"]]

    def address(**changes: str) -> str:
        return links.history(suite, [pair for pair in (asked | changes).items() if pair[1]])

    return viewer.render(
        request, "history.html", title=f"{suite}: history", suite=suite, latest=runs[0], found=found, asked=asked,
        points=_rows(points), plots=_plots(points, watched) if points else [], unit=unit, address=address,
        by=list(_BY.items()), spans=[("" if one == _SPANS[0] else one, f"{one} {unit}s") for one in _SPANS],
        experiments=[] if found is None else [(name, name) for name in found["experiments"]],
        datasets=[] if found is None else [(name, name) for name in found["datasets"]],
        alarm=None if alarm is None else {name: Html(alarm[name]) for name in ("html", "details")},
        about=[] if alarm is None else alarm["about"], problem=problem, words=_words,
        alarm_day=None if watched is None else watched["alarm_on"],
        runs={run.run_id: run for run in runs}, shown_runs=_SHOWN_RUNS, bar=_drawn, errors=_ERRORS,
        command="" if found is None else _command(f"{suite}:{found['experiment']}", asked),
    )  # fmt: skip


def _day(text: str) -> str:
    """Return a day as fields for dates take it; nothing for what is none."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        return ""


def _state(run: RunRecord) -> tuple[Any, ...]:
    return run.run_id, run.revision, run.finished_at, run.status


async def _soon(viewer: Viewer, job: Mapping[str, Any], state: tuple[Any, ...]) -> tuple[dict[str, Any] | None, str]:
    """Return the answer of a job, and why there is none: empty while it is computed."""
    try:
        return await asyncio.wait_for(viewer.workbench.answer(job, state), _PATIENCE_SECONDS), ""
    except TimeoutError:
        return None, ""
    except FairtrialError as error:
        return None, str(error)


def _command(suite: str, asked: Mapping[str, str]) -> str:
    """Return the command that shows the same alarm."""
    options = [word for name in ("since", "reference") if asked[name] for word in (f"--{name}", asked[name])]
    return shlex.join(["fairtrial", "watch", "alarm", suite, *options])


def _rows(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table: with sums, and the run that each is compared with."""
    rows = []
    last: dict[str, str] = {}
    for one in points:
        costs = [run["cost"] for run in one["runs"] if run["cost"] is not None]
        sums = {"spent": sum(costs) if costs else None, "unpriced": sum(run["unpriced"] for run in one["runs"])}
        rows.append({**one, **sums, "before": last.get(one["line"], "")})
        if one["runs"]:
            last[one["line"]] = one["runs"][-1]["run_id"]
    return rows


def _plots(points: Sequence[Mapping[str, Any]], watched: Mapping[str, Any] | None) -> list[tuple[str, Html]]:
    """Draw the pass rates, and the costs if there are any."""
    bands = [] if watched is None else _bands(points, watched)
    values = [value for one in points for value in _ends(one["rate"])]
    low, high = floor(20 * min(values, default=0)) / 20, ceil(20 * max(values, default=1)) / 20
    drawn = [_point(one, "rate", max(0.0, min(low, high - _NARROWEST)), high or 1.0, rate) for one in points]
    plots = [("Pass rate", Html(timeline(drawn, "pass rate, from the oldest to the newest", bands=bands)))]
    if costs := [value for one in points for value in _ends(one["cost"])]:
        drawn = [_point(one, "cost", 0.0, max(costs) or 1.0, money) for one in points]
        title = "cost of a trial, from the oldest to the newest"
        plots.append(("Cost of a trial", Html(timeline(drawn, title, label=money))))
    return plots


def _ends(figure: Mapping[str, Any] | None) -> list[float]:
    return [] if figure is None else [figure[name] for name in ("low", "value", "high") if figure[name] is not None]


def _point(one: Mapping[str, Any], name: str, start: float, end: float, text: Any) -> TimePoint:
    figure, errors = one[name], sum(run["errors"] for run in one["runs"])
    bar, words = None, "no result"
    if figure is not None and figure["value"] is not None:
        value = figure["value"]
        low, high = (value if figure[end] is None else figure[end] for end in ("low", "high"))
        bar, words = Bar(low, value, high, start, end), f"{text(value)} ({text(low)} to {text(high)})"
    changes: dict[str, list[str]] = {}
    for change in one["changes"]:
        changes.setdefault(change["kind"], []).append(f"{change['before'] or 'none'} \u2192 {change['after']}")
    states = {"errors": count(errors, "error")} if errors else {}
    if one["others"]:
        states["left out"] = ", ".join(status for _, status in one["others"])
    return TimePoint(
        one["place"], one["name"].rpartition("@")[2], bar, words, one["line"],
        {what: "; ".join(texts) for what, texts in changes.items()}, states,
    )  # fmt: skip


def _words(change: Mapping[str, str | None]) -> str:
    """Return what changed; of what has only names, these."""
    before, after = change["before"], change["after"] or "none"
    return after if before is None else f"{before or 'none'} \u2192 {after}"


def _bands(points: Sequence[Mapping[str, Any]], watched: Mapping[str, Any]) -> list[TimeBand]:
    """Return the periods of a watch that are on the page."""
    period = watched["reference"]
    spans = [] if period is None else [(period["first"], period["last"], "reference", False)]
    if watched["alarm_on"]:
        spans.append((watched["earliest"], watched["latest"], f"dropped, likely on {watched['likely']}", True))
    found = []
    for first, last, name, bad in spans:
        places = [one["place"] for one in points if first <= one["day"] <= last]
        found += [TimeBand(places[0], places[-1], name, bad)] if places else []
    return found


def _drawn(figure: Mapping[str, Any]) -> Html:
    return Html(bar_svg(Bar(figure["low"], figure["value"], figure["high"])))
