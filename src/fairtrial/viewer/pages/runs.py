"""Pages of runs and reports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from fairtrial.base.codec import from_json
from fairtrial.base.formatting import open_range, rate
from fairtrial.errors import ConfigurationError, FairtrialError, UnknownRunError
from fairtrial.reports.figures.summaries import TotalsAnalysis
from fairtrial.reports.render.document import Bar, TrialGroups
from fairtrial.reports.render.html import bar_svg, trial_groups
from fairtrial.reports.report.run_json import listed_run
from fairtrial.reports.run_names import rerun_command, resume_command
from fairtrial.reports.search.search import search_of
from fairtrial.runs.run_lease import active_owner, with_current_status
from fairtrial.store.notes import write_notes
from fairtrial.store.numbers import NumberStore
from fairtrial.store.protocol import RESUMABLE, RunRecord, RunStatus, Totals
from fairtrial.viewer.pages.comments import RUN_COMMENT, TRIAL_COMMENT, read_comments
from fairtrial.viewer.pages.context import FormFields, Viewer, wants_json
from fairtrial.viewer.question import STATES, Links, Question
from fairtrial.viewer.text import Html

_SHOWN = 30
_SHOWN_TAGS = 200
_SHOWN_SEARCHES = 5
_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RateShown:
    """The pass rate of an experiment; the interval is empty while it is not known."""

    experiment: str
    value: float | None
    ends: tuple[float, float] | None = None

    @property
    def interval(self) -> str:
        """The interval as text."""
        return "" if self.ends is None else open_range(*map(rate, self.ends))

    @property
    def bar(self) -> Bar | None:
        """The interval as a bar."""
        return None if self.ends is None or self.value is None else Bar(self.ends[0], self.value, self.ends[1])

    @property
    def drawing(self) -> Html:
        """The bar as a drawing."""
        return Html("" if self.bar is None else bar_svg(self.bar))


@dataclass(frozen=True, slots=True)
class RunShown:
    """A row of the list."""

    run: RunRecord
    stored: int
    tokens: int
    cost_usd: float | None
    unpriced: bool
    rates: tuple[RateShown, ...]
    owner: str | None = None
    resume: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags as the command line takes them."""
        return tuple(_pair(*one) for one in self.run.tags.items())


async def runs_page(viewer: Viewer, request: Request) -> Response:
    """List the runs, newest first."""
    query = request.query_params
    suite, status, tag = (query.get(name, "") for name in ("suite", "status", "tag"))
    before = query.get("before", "")
    listed = await viewer.read(_listed, viewer, suite, status, tag)
    start = next((place + 1 for place, run in enumerate(listed) if run.run_id == before), 0)
    page = listed[start : start + _SHOWN]
    totals = {run.run_id: await viewer.read(viewer.totals, run) for run in page}
    if wants_json(request):
        runs = [listed_run(run, totals[run.run_id]) for run in page]
        return JSONResponse({"format": "fairtrial.runs/1", "runs": runs})
    rows = await asyncio.gather(*(_row(viewer, run, totals[run.run_id]) for run in page))
    older = page[-1].run_id if start + _SHOWN < len(listed) else ""
    every = await viewer.read(viewer.store.runs)
    suites = sorted({run.suite for run in every})
    tags = sorted({_pair(*one) for run in every for one in run.tags.items()} | ({tag} if tag else set()))
    return viewer.render(
        request, "runs.html", title="Runs", rows=rows, suites=suites, suite=suite, status=status,
        statuses=get_args(RunStatus.__value__), older=older, total=len(listed), tag=tag, tags=tags[:_SHOWN_TAGS],
        compared=_compared(page), searches=list(dict.fromkeys(filter(None, map(search_of, listed))))[:_SHOWN_SEARCHES],
    )  # fmt: skip


def _listed(viewer: Viewer, suite: str, status: str, tag: str) -> list[RunRecord]:
    found = [with_current_status(viewer.store, run) for run in viewer.store.runs(suite=suite or None)]
    return [
        run
        for run in found
        if status in ("", run.status) and (not tag or tag in (_pair(*one) for one in run.tags.items()))
    ]


def _pair(key: str, value: str) -> str:
    """Return a tag as the command line takes it."""
    return f"{key}={value}"


def _compared(page: list[RunRecord]) -> tuple[str, str]:
    """Return what is likely to be compared: the last run's first two experiments, or the run before it of its suite."""
    if not page:
        return "", ""
    newest = next((run for run in page if run.status != "running"), page[0])
    if len(newest.experiments) > 1:
        return f"{newest.name}:{newest.experiments[0]}", f"{newest.name}:{newest.experiments[1]}"
    earlier = next((run for run in page if run.suite == newest.suite and run.number < newest.number), newest)
    return f"{earlier.name}:{earlier.experiments[0]}", f"{newest.name}:{newest.experiments[0]}"


async def _row(viewer: Viewer, run: RunRecord, totals: list[Totals]) -> RunShown:
    costs = [part.cost_usd for part in totals if part.cost_usd is not None]
    stored = sum(sum(part.outcomes.values()) for part in totals)
    running = run.status == "running"
    return RunShown(
        run,
        stored,
        sum(part.input_tokens + part.output_tokens for part in totals),
        sum(costs) if costs else None,
        any(part.unpriced_calls for part in totals),
        () if running else await _rates(viewer, run, totals),
        await viewer.read(active_owner, viewer.store, run.run_id) if running else None,
        resume_command(run) if run.status in RESUMABLE and not run.imported else "",
    )


async def _rates(viewer: Viewer, run: RunRecord, totals: list[Totals]) -> tuple[RateShown, ...]:
    """Return the pass rates with their intervals; without, if computing these takes too long."""
    job = {"job": "rates", "run_id": run.run_id}
    state = await viewer.state_of(run)
    found = await viewer.workbench.soon(job, state, _PATIENCE_SECONDS) or {"rates": {}}
    return tuple(_rate(part, found["rates"].get(part.experiment)) for part in totals)


def _rate(totals: Totals, estimate: dict[str, Any] | None) -> RateShown:
    if estimate is None:
        return RateShown(totals.experiment, TotalsAnalysis(totals).pass_rate)
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    known = value is not None and low is not None and high is not None
    return RateShown(totals.experiment, value, (low, high) if known else None)


_REPORT_PATIENCE_SECONDS = 5.0


async def report_page(viewer: Viewer, request: Request) -> Response:
    """Show the report of a run, with links to the trials behind every count."""
    named = await viewer.find_run(request.path_params["run"])
    run = named.run
    totals = await viewer.read(viewer.totals, run)
    state = await viewer.state_of(run)
    job = {"job": "report", "run_id": run.run_id}
    if wants_json(request):
        return JSONResponse((await viewer.workbench.answer(job, state))["json"])
    stored = sum(sum(part.outcomes.values()) for part in totals)
    found: dict[str, Any] | None = None
    problem, failed = "", False
    if stored and run.status != "running":
        try:
            found = await asyncio.wait_for(viewer.workbench.answer(job, state), _REPORT_PATIENCE_SECONDS)
        except TimeoutError:
            problem = "The figures of this run are being computed; this page loads itself again."
        except FairtrialError as error:
            problem, failed = str(error), True
    links, computing = viewer.links(request), bool(problem) and not failed
    users = any(part.outcomes.get("user_error") for part in totals)
    states = [name for name in STATES if name != "user_error" or users]
    rows = [
        (
            part.experiment,
            [(name, count_state(part, name), _address(links, run, part.experiment, name)) for name in states],
        )
        for part in totals
    ]
    others = [other for other in await viewer.read(viewer.store.runs, suite=run.suite, limit=20) if other != run]
    return viewer.render(
        request, "report.html", title=run.name, run=run, rows=rows, states=states, stored=stored, others=others,
        **report_parts(found, run, links), problem=problem, computing=computing,
        owner=await viewer.read(active_owner, viewer.store, run.run_id),
        again="" if run.imported else rerun_command(run),
        resume=resume_command(run) if run.status in RESUMABLE and not run.imported else "", tab="report",
        may_delete=viewer.record is not None and viewer.may(request, "delete"),
        may_comment=viewer.may(request, "review") and not computing,  # Loading it again would lose what was typed.
        comments=await viewer.read(read_comments, viewer.store, run, [RUN_COMMENT]),
        trial_comments=await viewer.read(read_comments, viewer.store, run, [TRIAL_COMMENT]),
    )  # fmt: skip


def report_parts(found: Mapping[str, Any] | None, run: RunRecord, links: Links) -> dict[str, Any]:
    """Return what the page of a report shows of its figures: nothing while there are none."""
    if found is None:
        return {"about": (), "report": Html(""), "worst": Html(""), "details": Html("")}
    groups = from_json(TrialGroups, found["groups"])
    worst = trial_groups(groups, lambda one: links.trial(run, one.experiment, one.sample_id, one.repeat))
    return {
        "about": found["about"], "report": Html(found["html"]), "worst": Html("".join(worst)),
        "details": Html(found["details"]),
    }  # fmt: skip


def count_state(totals: Any, state: str) -> int:
    """Return the number of an experiment's trials in a state."""
    scored = totals.outcomes.get("scored", 0)
    if state in ("passed", "failed"):
        return int(totals.passed if state == "passed" else scored - totals.passed)
    return int(totals.outcomes.get(state, 0))


def _address(links: Any, run: RunRecord, experiment: str, state: str) -> str:
    names = (experiment,) if len(run.experiments) > 1 else ()
    return str(links.trials(run, Question(experiments=names, states=(state,)).pairs()))


async def delete_run(viewer: Viewer, request: Request, form: FormFields) -> Response:
    """Delete a run and all it has."""
    run = (await viewer.find_run(request.path_params["run"])).run
    if form.get("confirm") != run.run_id:
        raise ConfigurationError(f"to delete run {run.name} with all it has, its id must be typed: {run.run_id}")
    if run.status == "running" or await viewer.read(active_owner, viewer.store, run.run_id) is not None:
        raise ConfigurationError(f"run {run.name} is still going on: it can be deleted when it has ended")
    await viewer.record_change(request, "deleted", run)
    await viewer.read(viewer.store.delete_run, run.run_id)
    return Response(status_code=303, headers={"location": viewer.links(request).runs()})


async def keep_run(viewer: Viewer, request: Request, form: FormFields) -> Response:
    """Keep a run when old ones are deleted, or no longer."""
    run = (await viewer.find_run(request.path_params["run"])).run
    kept = form.get("kept") == "1"
    await viewer.record_change(request, "kept" if kept else "no longer kept", run)
    await viewer.read(viewer.store.update_run, run.run_id, notes=write_notes(kept=kept))
    return Response(status_code=303, headers={"location": viewer.links(request).run(run)})


async def live_stream(viewer: Viewer, request: Request) -> Response:
    """Send the progress of a run until it ends."""
    named = await viewer.find_run(request.path_params["run"])
    if viewer.streams.full:
        return Response("too many pages follow runs at the moment\n", 503, {"retry-after": "5"})

    store = cast(NumberStore, viewer.store)  # Every store in a database is one, and only those are viewed.

    def read() -> dict[str, Any] | None:
        try:
            run = with_current_status(viewer.store, viewer.store.get_run(named.run.run_id))
        except UnknownRunError:
            return None
        return {"status": run.status, "planned": run.planned, **store.progress(run.run_id)._asdict()}

    return StreamingResponse(viewer.streams.follow(partial(viewer.read, read)), media_type="text/event-stream")
