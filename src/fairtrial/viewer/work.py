"""The child process that computes statistics and searches texts: `python -m fairtrial.viewer.work`.

It reads a job per line of JSON and answers each with a line of JSON. numpy and scipy stay out of the server this way,
and the memory of a large comparison goes with the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from itertools import batched
from typing import TYPE_CHECKING, Any

from fairtrial.base.codec import to_json
from fairtrial.base.frozen import LruCache
from fairtrial.base.garbage import loading
from fairtrial.errors import FairtrialError
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.viewer.question import read_matrix_question, read_question

if TYPE_CHECKING:
    from fairtrial.reports.compare.comparison import Comparison
    from fairtrial.reports.compare.pairing import ChangeKind
    from fairtrial.reports.figures.metrics import ExperimentSource
    from fairtrial.reports.render.document import Document

CHANGES: tuple[ChangeKind, ...] = ("lost", "gained", "changed")
"""The kinds of changes of which the samples are shown, in this order."""
_FLIPS = 500
_BATCH = 256
_ROWS = 64
_KEPT_MODELS = 10_000


def open_viewed(url: str, *, read_only: bool) -> RunStore:
    """Open the store that is viewed."""
    from pathlib import Path

    from fairtrial.store.open import find_database, open_store
    from fairtrial.store.sql import SqlStore

    database = find_database(url)
    if read_only and isinstance(database, Path):
        return SqlStore.sqlite(database, read_only=True)
    return open_store(url)


class Jobs:
    """The jobs on one store."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._models: LruCache[tuple[str, int], list[set[str]]] = LruCache(_KEPT_MODELS)

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Do a job; an expected error becomes part of the answer."""
        known: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "start": self._start,
            "report": self._report,
            "rates": self._rates,
            "columns": self._build,
            "filtered": self._filtered,
            "compare": self._compare,
            "candidates": self._candidates,
            "history": self._history,
            "alarm": self._alarm,
            "calibration": self._calibration,
            "parquet": self._parquet,
            "search": self._search,
            "rows": self._rows,
        }
        try:
            return known[job["job"]](job)
        except FairtrialError as error:
            return {"error": str(error)}

    def _start(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Load what statistics need, so that the first page does not wait for it."""
        with loading():
            import fairtrial.reports.compare.document
            import fairtrial.reports.figures.figures
            import fairtrial.reports.report.document  # noqa: F401

        return {}

    def _run(self, job: Mapping[str, Any], name: str = "run_id") -> RunRecord:
        return self._store.get_run(job[name])

    def _report(self, job: Mapping[str, Any]) -> dict[str, Any]:
        from fairtrial.reports.render.document import TrialGroups
        from fairtrial.reports.report import EvalReport

        report: EvalReport[Any] = EvalReport(self._store, self._run(job))
        document, answer, folded = _shown(report)
        (groups,) = (block for block in document.blocks if isinstance(block, TrialGroups))
        return {
            "about": list(document.about), "html": answer, "groups": to_json(groups), "details": folded,
            "json": report.to_json(),
        }  # fmt: skip

    def _rates(self, job: Mapping[str, Any]) -> dict[str, Any]:
        from fairtrial.reports.report import EvalReport

        report: EvalReport[Any] = EvalReport(self._store, self._run(job))
        return {"rates": {name: _estimate(report[name].figures.get("pass_rate")) for name in report.experiments}}

    def _build(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Build the columns of a run."""
        from fairtrial.viewer.trial_table import open_columns_of

        return {"stored": open_columns_of(self._store, self._run(job)).stored}

    def _filtered(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Estimate the pass rate of the trials that a question selects, by the report's own method."""
        from fairtrial.viewer.trial_table import conditions_of, open_columns_of

        question, _ = read_question(job["query"])
        columns = open_columns_of(self._store, self._run(job))
        conditions = conditions_of(columns, question)
        if conditions is None:
            return {"rates": {}}
        return {"rates": {name: _estimate(rate) for name, rate in columns.select(*conditions).pass_rates().items()}}

    def _compare(self, job: Mapping[str, Any]) -> dict[str, Any]:
        from fairtrial.reports.compare.compare import compare
        from fairtrial.reports.report import EvalReport

        baseline: EvalReport[Any] = EvalReport(self._store, self._run(job, "a"))
        candidate: EvalReport[Any] = EvalReport(self._store, self._run(job, "b"))
        by = [job["by"]] if job.get("by") else []
        comparison = compare(
            baseline[job["a_experiment"]], candidate[job["b_experiment"]], slice_by=by, other_users=job["other_users"]
        )
        document, text, folded = _shown(comparison)
        return {
            "title": document.title,
            "about": list(document.about),
            "html": text + folded,
            "json": comparison.to_json(),
            **_changed(comparison),
        }

    def _candidates(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Read a search for a better prompt: its figures, and what the test split showed as HTML."""
        from fairtrial.reports.render.document import Document, Remarks
        from fairtrial.reports.search.document import conclusion, remarks
        from fairtrial.reports.search.search import read_search
        from fairtrial.viewer.text import fragment

        search = read_search(self._store, job["name"])
        answer = fragment(Document(search.name, (), (conclusion(search), Remarks(tuple(remarks(search))))))
        return {"about": list(search.document(0).about), "html": str(answer), "json": search.to_json()}

    def _history(self, job: Mapping[str, Any]) -> dict[str, Any]:
        from fairtrial.viewer.history import read_history

        return read_history(self._store, job, self._models)

    def _alarm(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Decide what `fairtrial watch alarm` decides."""
        from fairtrial.reports.render.document import Conclusion, Document
        from fairtrial.reports.watch.alarm import watch_alarm
        from fairtrial.viewer.text import fragment

        found = watch_alarm(self._store, job["suite"], **job["settings"])
        document = found.document(0)
        first, rest = ([one for one in document.blocks if isinstance(one, Conclusion) is top] for top in (True, False))
        answer, details = (str(fragment(Document("", (), tuple(blocks)))) for blocks in (first, rest))
        return {"about": list(document.about), "html": answer, "details": details, "json": found.to_json()}

    def _calibration(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Compare the judge with people's labels."""
        from fairtrial.reports.calibrate.calibrate import calibrate
        from fairtrial.reports.calibrate.document import judge_sentence
        from fairtrial.reports.report import EvalReport

        report: EvalReport[Any] = EvalReport(self._store, self._run(job))
        found = calibrate(report[job["experiment"]], metric=job["metric"], name=job["name"])
        return {
            "sentence": judge_sentence(found),
            "labelled": found.labelled,
            "judged": found.judged,
            "html": "".join(_shown(found)[1:]),
            "json": found.to_json(),
        }

    def _parquet(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Write the trials that a question selects to a Parquet file."""
        from fairtrial.store.export import export_results
        from fairtrial.viewer.trial_table import chosen_ordinals, open_columns_of

        run = self._run(job)
        question, _ = read_question(job["query"])
        ordinals = chosen_ordinals(open_columns_of(self._store, run), question)
        return {"rows": export_results(self._store, run.run_id, job["path"], "parquet", ordinals=ordinals)}

    def _search(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Search input, output, reason, error and transcript of the selected trials until the time is over."""
        from fairtrial.viewer.trial_table import chosen_ordinals, open_columns_of

        run = self._run(job)
        question, _ = read_question(job["query"])
        needle = _needle(question.text)
        columns = open_columns_of(self._store, run)
        ordinals = [at for at in chosen_ordinals(columns, question) if at >= question.scan_from]
        end, searched = time.monotonic() + float(job["seconds"]), 0
        hits: list[int] = []
        upcoming: int | None = None
        samples: dict[int, str] = {}
        for some in batched(ordinals, _BATCH):
            if len(hits) >= job["limit"] or time.monotonic() > end:
                upcoming = some[0]
                break
            for result in self._store.results(run.run_id, ordinals=some, snapshots=True):
                if len(hits) >= job["limit"]:
                    upcoming = result.ordinal
                    break
                searched += 1
                if any(needle in text.casefold() for text in self._texts(run, result, samples)):
                    hits.append(result.ordinal)
            if upcoming is not None:
                break
        return {"hits": hits, "searched": searched, "total": len(ordinals), "next": upcoming}

    def _rows(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Search the rows of the matrix: those with a text, or whose outputs differ, until the time is over."""
        from fairtrial.viewer.matrix import Matrix
        from fairtrial.viewer.trial_table import open_columns_of

        question, _ = read_matrix_question(job["query"])
        needle = _needle(question.filters.text)
        opened = {run_id: open_columns_of(self._store, self._store.get_run(run_id)) for run_id, _ in job["sides"]}
        matrix = Matrix([(opened[run_id], experiment) for run_id, experiment in job["sides"]])
        rows = [row for row in matrix.rows(question).tolist() if row >= question.filters.scan_from]
        end, searched = time.monotonic() + float(job["seconds"]), 0
        hits: list[int] = []
        samples: dict[int, str] = {}
        for some in batched(rows, _ROWS):
            if len(hits) >= job["limit"] or time.monotonic() > end:
                break
            texts: dict[int, list[str]] = {row: [] for row in some}
            outputs: dict[int, set[str]] = {row: set() for row in some}
            for column in matrix.columns:
                places = {trial.ordinal: row for row in some for trial in column.shown(row, question.repeat)[:1]}
                for result in self._store.results(column.run.run_id, ordinals=list(places)):
                    row = places[result.ordinal]
                    outputs[row].add(result.output_json or f"error {result.error}")
                    texts[row] += self._texts(column.run, result, samples) if needle else ()
                samples.clear()  # Another run may have other samples at these places.
            for row in some:
                searched += 1
                differs = question.show != "outputs" or len(outputs[row]) > 1
                if differs and (not needle or any(needle in text.casefold() for text in texts[row])):
                    hits.append(row)
                if len(hits) >= job["limit"]:
                    break
        upcoming = rows[searched] if searched < len(rows) else None
        return {"hits": hits, "searched": searched, "total": len(rows), "next": upcoming}

    def _texts(self, run: RunRecord, result: Any, samples: dict[int, str]) -> list[str]:
        """Return the texts of a trial as JSON, in which a text is searched as JSON writes it."""
        from fairtrial.base.codec import dumps

        place = run.split(result.ordinal)[0]
        if place not in samples:
            if len(samples) > 10_000:
                samples.clear()
            sample = result.sample
            samples[place] = dumps([sample.id, sample.input, sample.expected, dict(sample.metadata)])
        reason = "" if result.score is None else result.score.reason or ""
        texts = [samples[place], result.output_json or "", dumps([reason, result.error or ""])]
        if result.snapshot is not None:
            texts.append(result.snapshot.decode("utf-8", "replace"))
        return texts


def _shown(found: Any) -> tuple[Document, str, str]:
    """Return a result as a document, its blocks as HTML, without those that pages show themselves, and its details."""
    from fairtrial.reports.render.document import Cases, Details, Document, TrialGroups
    from fairtrial.reports.render.renderable import IN_HTML
    from fairtrial.viewer.text import fragment

    document = found.document(IN_HTML)
    blocks = tuple(block for block in document.blocks if not isinstance(block, Cases | Details | TrialGroups))
    folded = tuple(block for block in document.blocks if isinstance(block, Details))
    answer, details = (str(fragment(Document(document.title, (), some))) for some in (blocks, folded))
    return document, answer, details


def _changed(comparison: Comparison) -> dict[str, Any]:
    """Return how many samples changed, and those that did, the largest change first."""
    (changes,) = comparison.changes
    counts = {kind: changes.count(kind) for kind in (*CHANGES, "same")} | {"missing": changes.missing}
    flips = [
        {
            "id": changes.ids[at], "kind": kind, "a": [float(changes.passed[0][at]), float(changes.values[0][at])],
            "b": [float(changes.passed[1][at]), float(changes.values[1][at])],
        }
        for kind in CHANGES
        for at in changes.places(kind)[:_FLIPS].tolist()
    ]  # fmt: skip
    places = [_sample_places(source, {flip["id"] for flip in flips}) for source in comparison.sources]
    for flip in flips:
        flip["samples"] = [known[flip["id"]] for known in places]
    return {"counts": counts, "flips": flips}


def _sample_places(source: ExperimentSource, ids: set[str]) -> dict[str, int]:
    """Return the places of samples in the dataset, by their ids."""
    from fairtrial.reports.figures.column_reader import read_columns, sample_ordinals

    known = zip(read_columns(source, metrics=()).ids, sample_ordinals(source).tolist(), strict=True)
    return {sample_id: place for sample_id, place in known if sample_id in ids}


def _needle(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1].casefold()


def _estimate(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n, "note": found.note}


def main() -> None:
    """Serve jobs from standard input until it is closed."""
    start = json.loads(sys.stdin.readline())
    with loading():
        jobs = Jobs(open_viewed(start["store"], read_only=start["read_only"]))
    for line in sys.stdin:
        try:
            sys.stdout.write(json.dumps(jobs.answer(json.loads(line))) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            os._exit(0)  # The server was killed: nobody waits for the answer.


if __name__ == "__main__":
    main()
