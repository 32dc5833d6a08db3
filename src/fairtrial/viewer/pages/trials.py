"""The table of trials: filters, facets, search, the pass rate of what is filtered, and its export."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import batched
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from fairtrial.base.formatting import count, open_range, rate
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.reports.report.trials import trial_record
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.viewer.pages.context import PageNotFoundError, Viewer, wants_json
from fairtrial.viewer.question import PAGE, RANGES, Question, Span, read_question
from fairtrial.viewer.trial_table import TablePage, chosen_ordinals, open_columns_of

_PATIENCE_SECONDS = 0.12
_SEARCH_SECONDS = 1.5
_SHOWN_KEYS = 3
_PREVIEW = 160
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


async def trials_page(viewer: Viewer, request: Request) -> Response:
    """Show one page of the trials that a question selects."""
    named = await viewer.find_run(request.path_params["run"])
    run = named.run
    question, complaints = read_question(request.query_params.multi_items())
    if named.experiment is not None and not question.experiments:
        question = replace(question, experiments=(named.experiment,))
    if question.text:
        complaints += [] if question.sort == "ordinal" else ["a search shows its hits in the order of the plan"]
    await viewer.prepare_columns(run)
    columns = await viewer.read(open_columns_of, viewer.store, run)
    searched: dict[str, Any] | None = None
    if question.text:
        counts = await viewer.counts(run, columns, question)
        page, searched = await _search(viewer, run, question)
    else:
        counts, page = await viewer.table(run, columns, question)
    previews = await viewer.read(viewer.store.previews, run.run_id, page.ordinals, size=_PREVIEW)
    if wants_json(request):
        results = await viewer.read(lambda: list(viewer.store.results(run.run_id, ordinals=page.ordinals)))
        trials = [trial_record(result) for result in results]
        return JSONResponse({"format": "fairtrial.trials/1", "total": counts.total, "trials": trials})
    links = viewer.links(request)
    keys = [key for key in columns.metadata if len(columns.metadata_values(key)) > 1][:_SHOWN_KEYS]
    rows = [(preview, *run.split(preview.ordinal)[1:]) for preview in previews]
    rates, waiting = await _rates(viewer, run, question, _PATIENCE_SECONDS)
    return viewer.render(
        request, "trials.html", title=f"{run.name}: trials", run=run, question=question, page=page, counts=counts,
        rows=rows, keys=keys, complaints=complaints, rates=rates, waiting=waiting, searched=searched, ranges=RANGES,
        spans=dict(question.spans), no_span=Span(), metrics=columns.metrics, tab="trials", size=PAGE,
        addresses={
            "next": links.trials(run, replace(question, after=page.next, before=None).pairs()),
            "previous": links.trials(run, replace(question, before=page.previous, after=None).pairs()),
            "rates": f"rates?{request.url.query}",
            "search_on": links.trials(run, replace(question, scan_from=(searched or {}).get("next") or 0).pairs()),
        },
    )  # fmt: skip


async def _search(viewer: Viewer, run: RunRecord, question: Question) -> tuple[TablePage, dict[str, Any]]:
    """Return the trials with a text, and how far the search came."""
    job = {"job": "search", "run_id": run.run_id, "query": question.pairs(), "limit": PAGE, "seconds": _SEARCH_SECONDS}
    found = await viewer.workbench.answer(job, await viewer.state_of(run))
    return TablePage(tuple(found["hits"]), None, None), found


async def rates_of_question(viewer: Viewer, request: Request) -> Response:
    """Return the pass rates of what is filtered, for a page that did not wait for them."""
    named = await viewer.find_run(request.path_params["run"])
    question, _ = read_question(request.query_params.multi_items())
    rates, _ = await _rates(viewer, named.run, question, None)
    return JSONResponse({"rates": rates})


async def _rates(viewer: Viewer, run: RunRecord, question: Question, patience: float | None) -> tuple[list[str], bool]:
    """Return the pass rates of the selected trials in words, and whether they are still being computed."""
    if question.selects_results or run.status == "running":
        return [], False
    chosen = replace(question.first_page, sort="ordinal", descending=False)
    job = {"job": "filtered", "run_id": run.run_id, "query": chosen.pairs()}
    state = await viewer.state_of(run)
    found = await viewer.workbench.soon(job, state, patience)
    if found is None:
        return [], True
    return [_in_words(name, estimate) for name, estimate in found["rates"].items()], False


def _in_words(experiment: str, estimate: dict[str, Any] | None) -> str:
    if estimate is None or estimate["value"] is None:
        return f"{experiment}: nothing was scored"
    low, high = (None if estimate[end] is None else rate(estimate[end]) for end in ("low", "high"))
    return f"{experiment} {rate(estimate['value'])} ({open_range(low, high)}, {count(estimate['n'], 'sample')})"


async def export_trials(viewer: Viewer, request: Request) -> Response:
    """Send all trials that a question selects as CSV, JSON lines or Parquet."""
    named = await viewer.find_run(request.path_params["run"])
    form = request.path_params["form"]
    if form not in ("csv", "jsonl", "parquet"):
        raise PageNotFoundError("trials can be exported as trials.csv, trials.jsonl and trials.parquet")
    question, _ = read_question(request.query_params.multi_items())
    await viewer.prepare_columns(named.run)
    if form == "parquet":
        return await _parquet(viewer, named.run, replace(question, text=""))
    columns = await viewer.read(open_columns_of, viewer.store, named.run)
    raw = request.query_params.get("raw") == "1"
    lines = _exported(viewer.store, named.run, columns, replace(question, text=""), form, raw=raw)
    kind = "text/csv" if form == "csv" else "application/jsonl"
    return StreamingResponse(lines, media_type=f"{kind}; charset=utf-8", headers=_download(named.run, form))


def _download(run: RunRecord, form: str) -> dict[str, str]:
    name = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in run.name)
    return {"content-disposition": f'attachment; filename="{name}-trials.{form}"'}


async def _parquet(viewer: Viewer, run: RunRecord, question: Question) -> Response:
    """Have a child write the file, which is deleted once it has been sent."""
    folder = tempfile.TemporaryDirectory(prefix="fairtrial-")
    path = f"{folder.name}/trials.parquet"
    job = {"job": "parquet", "run_id": run.run_id, "query": question.pairs(), "path": path}
    try:
        await viewer.workbench.answer(job, path)
    except BaseException:
        folder.cleanup()
        raise
    kind = "application/vnd.apache.parquet"
    return FileResponse(
        path, media_type=kind, headers=_download(run, "parquet"), background=BackgroundTask(folder.cleanup)
    )


def _exported(
    store: RunStore, run: RunRecord, columns: TrialColumns, question: Question, form: str, *, raw: bool
) -> Iterator[str]:
    head: list[str] = []
    for some in batched(chosen_ordinals(columns, question), 200):
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        for result in store.results(run.run_id, ordinals=some):
            facts = trial_record(result)
            if form == "jsonl":
                buffer.write(json.dumps(facts, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n")
                continue
            if not head:
                head = [name for name in facts if name not in ("criteria", "redacted")]
                writer.writerow(head)
            writer.writerow([cell_text(facts[name], raw=raw) for name in head])
        yield buffer.getvalue()


def cell_text(value: Any, *, raw: bool) -> str:
    """Return a value for a spreadsheet, which must not take text for a formula."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    safe = value.encode("utf-8", "replace").decode()
    return f"'{safe}" if not raw and safe.startswith(_FORMULA) else safe
