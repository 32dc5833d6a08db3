"""The report of a run."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fairtrial.errors import FairtrialError, UnknownRunError
from fairtrial.reports.rerun import rerun_command, resume_command
from fairtrial.runs.run_lease import active_owner, with_current_status
from fairtrial.store.numbers import NumberStore
from fairtrial.store.protocol import RESUMABLE, RunRecord
from fairtrial.viewer.pages.context import Viewer, json_answer, wants_json
from fairtrial.viewer.question import STATES, Question
from fairtrial.viewer.text import Html

_PATIENCE_SECONDS = 5.0


async def report_page(viewer: Viewer, request: Request) -> Response:
    """Show the report of a run, with links to the trials behind every count."""
    named = await viewer.find_run(request.path_params["run"])
    run = named.run
    totals = await viewer.read(viewer.totals, run)
    state = await viewer.state_of(run)
    job = {"job": "report", "run_id": run.run_id}
    if wants_json(request):
        return json_answer((await viewer.workbench.answer(job, state))["json"])
    stored = sum(sum(part.outcomes.values()) for part in totals)
    found: dict[str, Any] | None = None
    problem, failed = "", False
    if stored and run.status != "running":
        try:
            found = await asyncio.wait_for(viewer.workbench.answer(job, state), _PATIENCE_SECONDS)
        except TimeoutError:
            problem = "The figures of this run are being computed; this page loads itself again."
        except FairtrialError as error:
            problem, failed = str(error), True
    links = viewer.links(request)
    rows = [
        (
            part.experiment,
            [(name, count_state(part, name), _address(links, run, part.experiment, name)) for name in STATES],
        )
        for part in totals
    ]
    others = [other for other in await viewer.read(viewer.store.runs, suite=run.suite, limit=20) if other != run]
    return viewer.render(
        request, "report.html", title=run.name, run=run, rows=rows, states=STATES, stored=stored, others=others,
        about=() if found is None else found["about"], report=Html("" if found is None else found["html"]),
        problem=problem, computing=bool(problem) and not failed,
        owner=await viewer.read(active_owner, viewer.store, run.run_id),
        again="" if run.imported else rerun_command(run),
        resume=resume_command(run) if run.status in RESUMABLE and not run.imported else "", tab="report",
    )  # fmt: skip


def count_state(totals: Any, state: str) -> int:
    """Return the number of an experiment's trials in a state."""
    scored = totals.outcomes.get("scored", 0)
    if state in ("passed", "failed"):
        return int(totals.passed if state == "passed" else scored - totals.passed)
    return int(totals.outcomes.get(state, 0))


def _address(links: Any, run: RunRecord, experiment: str, state: str) -> str:
    names = (experiment,) if len(run.experiments) > 1 else ()
    return str(links.trials(run, Question(experiments=names, states=(state,)).pairs()))


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

    async def read_in_thread() -> dict[str, Any] | None:
        return await viewer.read(read)

    return StreamingResponse(viewer.streams.follow(read_in_thread), media_type="text/event-stream")
