"""Random histories of a store, and every screen that shows figures of its runs.

    python -m tests.histories 500        # the histories 0 to 499, in an SQLite store each
    python -m tests.histories 41 42      # the history 41

A history is a random sequence of what can happen to stored results. Beside the store, `History` keeps what the results
must be by the rules of `RunStore.commit`, and `Screens` compares every figure that is shown with a plain loop over
them. The screens are used again and again during a history, as in a notebook or a server that runs for weeks.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fairtrial import EvalResult, Metric, Sample, Score, TokenUsage, TrialKey, calibrate, compare, gate, leaderboard
from fairtrial.base.formatting import rate
from fairtrial.reports import EvalReport, summarize
from fairtrial.reports.compare.pairing import ChangeKind
from fairtrial.reports.figures.metrics import run_totals
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.reports.report.run_json import listed_run, totals_record
from fairtrial.runs.opening import run_completed
from fairtrial.store import Label, RunRecord, RunStore, export_results, open_store, save_run
from fairtrial.viewer.access import Access
from fairtrial.viewer.app import make_app
from fairtrial.viewer.pages.context import Viewer
from fairtrial.viewer.work import Jobs
from fairtrial.viewer.working import Workbench
from tests.history_figures import figures_of, flips_of, mean_over_samples, shares_of
from tests.history_suites import HistorySuite, Judge, prune, rescore

STEPS = 10
RATES = ("pass_rate", "pass_rate_all", "mean_score", "mean_reward")
ERRORS = ("task_error", "timeout", "scorer_error", "dead_letter")


@dataclass
class Known:
    """What a run must have: its record, results by ordinal, and the samples whose content was stored."""

    run: RunRecord
    results: dict[int, EvalResult] = field(default_factory=dict)
    labels: dict[tuple[str, str, int], bool] = field(default_factory=dict)
    held: EvalReport[Any] | None = None  # A report that somebody made long ago and still has.
    real: HistorySuite | None = None  # The suite that made the run.

    def of(self, experiment: str) -> list[EvalResult]:
        return [self.results[at] for at in sorted(self.results) if self.results[at].experiment == experiment]


class History:
    """One random history. The same seed gives the same history in every kind of store."""

    def __init__(self, store: RunStore, seed: int, folder: Path, url: str | None = None) -> None:
        self.store, self.folder, self.url = store, folder, url
        self.chance = random.Random(seed)
        self.seed = seed
        self.runs: dict[str, Known] = {}
        self.made = 0
        self.steps: list[str] = []

    def step(self) -> None:
        """Let something happen."""
        chance = self.chance
        if len(self.runs) < 2:
            self.start()
            return
        known = self.runs[chance.choice(list(self.runs))]
        ended, few = known.run.finished_at is not None, len(self.runs) < 3
        choices = {
            "commit": 6, "late worker": 6 if ended else 0, "end": 0 if ended else 4, "resume": 2 if ended else 0,
            "rescore": int(few and ended), "label": 2, "note": 1, "delete": 1, "start": int(few), "run": 2 * few,
            "prune": int(self.url is not None),
        }  # fmt: skip
        name = chance.choices(list(choices), list(choices.values()))[0]
        self.steps.append(f"{name} {known.run.run_id}")
        actions: dict[str, Callable[[Known], object]] = {
            "commit": self.commit, "late worker": self.late_worker, "end": self.end, "resume": self.resume,
            "rescore": self.rescore, "label": self.label, "note": self.note, "delete": self.delete,
            "start": lambda _known: self.start(), "run": lambda _known: self.run(),
            "prune": lambda _known: self.prune(),
        }  # fmt: skip
        actions[name](known)

    def start(self) -> None:
        """Start a run; half of the runs share a dataset."""
        self.made += 1
        chance = self.chance
        shape: dict[str, Any] = {
            "dataset_fingerprint": chance.choice(["shared", f"own{self.made}"]) * 4, "dataset_size": 5,
            "experiments": chance.choice([("a",), ("a", "b")]), "repeats": chance.choice([1, 1, 2]),
        }  # fmt: skip
        if shape["dataset_fingerprint"].startswith("own"):
            shape["dataset_size"] = chance.randint(2, 7)
        run = RunRecord(
            run_id=f"r{self.seed}x{self.made}", suite="s", dataset_name="d", dataset_version="1", evaluator="exact",
            created_at=1000.0 + self.made, **shape,
        )  # fmt: skip
        known = self.runs[run.run_id] = Known(self.store.create_run(run))
        self.commit(known)

    def sample(self, place: int) -> Sample[str, str]:
        return Sample(f"q{place}", f"input {place // 2 if place == 1 else place}", "e", {"topic": f"t{place % 3}"})

    def result(self, known: Known, ordinal: int, attempt: int) -> EvalResult:
        chance, run = self.chance, known.run
        place, experiment, repeat = run.split(ordinal)
        key = TrialKey(run.run_id, run.experiments[experiment], f"q{place}", repeat)
        shared: dict[str, Any] = {
            "latency_ms": chance.randint(1, 900), "attempt": attempt, "execution": chance.getrandbits(50),
            "usage": TokenUsage(chance.randint(0, 90), chance.randint(0, 40), cost_usd=chance.choice([None, 0.5, 2])),
            "started_at": 2000.0 + chance.randint(0, 99),
        }  # fmt: skip
        if chance.random() < 0.4:
            outcome: Any = chance.choice(ERRORS)
            stage: Any = "score" if outcome == "scorer_error" else "task"
            return EvalResult(key=key, ordinal=ordinal, outcome=outcome, error=f"{outcome}: no", stage=stage, **shared)
        value = chance.choice([0.0, 0.25, 0.5, 1.0])
        metrics = (Metric("length", chance.choice([0.0, 0.5, 1.0])),) if chance.random() < 0.3 else ()
        passed = value >= 0.5 if chance.random() < 0.9 else not value >= 0.5
        return EvalResult(
            key=key,
            ordinal=ordinal,
            outcome="scored",
            score=Score(value, passed=passed, metrics=metrics),
            output="out",
            **shared,
        )

    def commit(self, known: Known) -> None:
        """Commit new results, replacements, duplicates and results that come too late, with or without samples."""
        run = known.run
        ordinals = self.chance.sample(range(run.planned), self.chance.randint(1, run.planned))
        batch = []
        for ordinal in ordinals:
            stored = known.results.get(ordinal)
            attempt = self.chance.randint(1, 3)
            result = self.result(known, ordinal, attempt)
            batch.append(result)
            if stored is None or (
                stored.outcome != "scored" and (result.outcome == "scored" or attempt > stored.attempt)
            ):
                known.results[ordinal] = result
        places = {run.split(ordinal)[0] for ordinal in ordinals}
        samples = {place: self.sample(place) for place in places} if self.chance.random() < 0.7 else {}
        committed = self.store.commit(run.run_id, batch, samples)
        assert not committed.refused
        assert not committed.unstorable, committed

    def end(self, known: Known) -> None:
        full = len(known.results) == known.run.planned
        # The end of a run that is continued may be at the same moment, by a clock that was set back.
        self._update(known, status="finished" if full else "stopped", finished_at=5000.0 + self.chance.randint(0, 1))

    def resume(self, known: Known) -> None:
        self._update(known, status="running")
        self.commit(known)

    def note(self, known: Known) -> None:
        self._update(known, notes={"stopped": f"note {len(self.steps)}"})

    def _update(self, known: Known, **changes: Any) -> None:
        self.store.update_run(known.run.run_id, **changes)
        known.run = self.store.get_run(known.run.run_id)

    def run(self) -> None:
        """Run a suite."""
        self.made += 1
        experiments, repeats = self.chance.choice([("a",), ("a", "b")]), self.chance.choice([1, 2])
        samples = [self.sample(place) for place in range(self.chance.randint(3, 6))]
        real = HistorySuite(f"real{self.seed}x{self.made}", samples, experiments, repeats)
        run = self.store.get_run(real.run(self.store))
        known = self.runs[run.run_id] = Known(run, real=real)
        self._took_place(known, {at: real.outcome(*self._trial(run, at)) for at in range(run.planned)}, real.judge)

    def late_worker(self, known: Known) -> None:
        """Let a worker retry what failed, after the end of the run; results of other runs come from nowhere."""
        outcomes = {one.outcome for one in known.results.values()}
        if known.real is None or outcomes == {"scored"} or "scorer_error" in outcomes:
            self.commit(known)  # What only needs a score never reaches a worker.
            return
        kept = {at: one.execution for at, one in known.results.items() if one.score is not None}
        broker = self.url if self.url is not None and self.url.startswith("postgresql:") else None
        known.real.run_late(self.store, known.run.run_id, broker, lambda: self.end(known))
        retried = {at: known.real.outcome(*self._trial(known.run, at)) for at in known.results.keys() - kept.keys()}
        self._took_place(known, retried, known.real.judge, kept)

    def rescore(self, known: Known) -> None:
        """Score the outputs again: a run of its own with the same trials."""
        self.made += 1
        everything = [self.sample(place) for place in range(7)]
        run_id, judge = rescore(self.store, known.run.run_id, everything, f"judge{self.made}")
        made = self.runs[run_id] = Known(self.store.get_run(run_id))
        kept = {at: one.outcome for at, one in known.results.items()}
        scored = {at: "scored" if one == "scorer_error" else one for at, one in kept.items()}
        self._took_place(made, scored, judge)

    def _trial(self, run: RunRecord, ordinal: int) -> tuple[str, str, int]:
        place, experiment, repeat = run.split(ordinal)
        return run.experiments[experiment], self.sample(place).input, repeat

    def _took_place(
        self, known: Known, expected: Mapping[int, str], judge: Judge, kept: dict[int, int] | None = None
    ) -> None:
        """Take over what was stored; it must have these outcomes and the scores of this evaluator."""
        known.run = self.store.get_run(known.run.run_id)
        known.results = {one.ordinal: one for one in self.store.results(known.run.run_id)}
        changed = {at: one for at, one in known.results.items() if at not in (kept or {})}
        assert {at: one.outcome for at, one in changed.items()} == expected
        assert {at: known.results[at].execution for at in kept or {}} == (kept or {})
        for at, one in changed.items():
            score = judge.score(self._trial(known.run, at)[1]) if one.outcome == "scored" else None
            assert (one.score and (one.score.value, one.score.passed)) == (score and (score.value, score.passed))

    def prune(self) -> None:
        """Delete old runs by the command; all that ended have ended long ago, unless a suite has just made them."""
        assert self.url is not None
        keep = self.chance.randint(0, 1)
        newest: Counter[str] = Counter()
        expected = set()
        for run in self.store.runs():
            if run.status in ("finished", "stopped"):
                newest[run.suite] += 1
                if newest[run.suite] > keep and (run.finished_at or 0) < 1e6:
                    expected.add(run.run_id)
        assert set(prune(self.url, self.folder, keep_last=keep)) == expected
        for run_id in expected:
            del self.runs[run_id]

    def label(self, known: Known) -> None:
        for result in known.results.values():
            key = (result.experiment, result.sample_id, result.repeat)
            if result.outcome == "scored" and key not in known.labels and self.chance.random() < 0.5:
                known.labels[key] = self.chance.random() < 0.5
                self.store.label(Label(result.key, "passed", known.labels[key], "ann", at=1.0))

    def delete(self, known: Known) -> None:
        """Delete a run, as retention does; sometimes it is imported again, with fewer or other results."""
        self.store.delete_run(known.run.run_id)
        if hasattr(self.store, "vacuum") and self.chance.random() < 0.3:
            self.store.vacuum()
        del self.runs[known.run.run_id]
        if self.chance.random() < 0.5:
            again = self.runs[known.run.run_id] = Known(self.store.create_run(replace(known.run, number=0)))
            again.held = known.held
            self.commit(again)


class _Direct:
    """Does the jobs of the viewer's children in this process."""

    def __init__(self, store: RunStore) -> None:
        self._jobs = Jobs(store)

    async def do(self, job: Any) -> dict[str, Any]:
        return json.loads(json.dumps(self._jobs.answer(job)))  # type: ignore[no-any-return]


class Screens:
    """Every screen with figures, open for a whole history."""

    def __init__(self, store: RunStore, folder: Path, loop: asyncio.Runner | None) -> None:
        self.store, self.folder, self.loop = store, folder, loop
        self.figures: Counter[str] = Counter()
        if loop is not None:
            access = Access.create(port=1, user="me")
            bench = Workbench("unused", read_only=True)
            bench._children = {name: _Direct(store) for name in ("statistics", "search")}  # type: ignore[misc]
            self.viewer = Viewer(store, bench, access, store_name="here", read_only=False)
            self.app = make_app(self.viewer)
            self.cookie = f"{access.cookie}={access.sessions.open()}"

    def get(self, path: str, *, accept: str = "application/json") -> str:
        """Request a page of the viewer."""
        assert self.loop is not None
        return self.loop.run(self._get(path, accept))

    async def _get(self, path: str, accept: str) -> str:
        address, _, query = path.partition("?")
        root = f"/{self.viewer.access.prefix}/{address}"
        headers = [("host", "127.0.0.1:1"), ("cookie", self.cookie), ("accept", accept)]
        scope = {
            "type": "http", "method": "GET", "path": root, "raw_path": root.encode(), "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers], "root_path": "",
            "scheme": "http", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "http_version": "1.1",
        }  # fmt: skip
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in sent).decode()
        assert sent[0]["status"] == 200, (path, sent[0]["status"], text)
        return text

    def same(self, screen: str, found: Any, expected: Any) -> None:
        """Compare a figure, or several."""
        self.figures[screen] += _count(expected)
        assert _close(found, expected), f"{screen}: {found} instead of {expected}"

    def check(self, history: History) -> None:
        """Compare all screens of all runs with a plain loop."""
        reports = {}
        for run_id, known in history.runs.items():
            run = self.store.get_run(run_id)
            report: EvalReport[Any] = EvalReport(self.store, run)
            reports[run_id] = report
            known.held = known.held or report
            self.check_store(known, run)
            self.check_report(known, report)
            self.check_files(known, report)
            if self.loop is not None:
                self.check_viewer(known, run, report)
            self.check_labels(known, report)
        sides = [
            (known, reports[run_id], name) for run_id, known in history.runs.items() for name in known.run.experiments
        ]
        for (one, left, a), (two, right, b) in pairwise(sides):
            self.check_comparison(one, left, a, two, right, b)
        if self.loop is not None:
            listed = json.loads(self.get(""))["runs"]
            self.same("viewer runs", [one["run_id"] for one in listed], [run.run_id for run in self.store.runs()])
            for one in listed:
                run = self.store.get_run(one["run_id"])
                self.same("viewer runs", one, _plain(listed_run(run, self.store.totals(run.run_id))))

    def check_store(self, known: Known, run: RunRecord) -> None:
        stored = {result.ordinal: result for result in self.store.results(run.run_id)}
        assert {at: one.execution for at, one in stored.items()} == {
            at: one.execution for at, one in known.results.items()
        }
        for screen, totals in (("store", self.store.totals(run.run_id)), ("totals", run_totals(self.store, run))):
            for part in totals:
                record, expected = totals_record(part), figures_of(known.of(part.experiment))
                found = {name: record[name] for name in expected if name in record}
                self.same(screen, found, {name: expected[name] for name in found})
        if self.loop is not None:
            columns = TrialColumns.open(self.store, run)
            rows = columns.rows(sorted(known.results))
            expected_rows = [known.results[at] for at in sorted(known.results)]
            self.same("columns", [row["outcome"] for row in rows], [one.outcome for one in expected_rows])
            self.same(
                "columns", [row["score"] for row in rows],
                [None if one.score is None else one.score.value for one in expected_rows],
            )  # fmt: skip
            self.same("columns", columns.select().total, len(known.results))

    def check_report(self, known: Known, report: EvalReport[Any]) -> None:
        tree: Any = report.to_json()
        html = report.to_html()
        for part in tree["experiments"]:
            expected = figures_of(known.of(part["name"]))
            trials = {name: part["trials"][name] for name in ("finished", "scored", "passed", *ERRORS)}
            wanted = {"finished": expected["trials"], "scored": expected["scored"], "passed": expected["passed"]}
            self.same("json", trials, wanted | {name: expected["errors"].get(name, 0) for name in ERRORS})
            estimates = {one["name"]: one["value"] for one in part["estimates"]}
            for name in ("pass_rate", "pass_rate_all", "mean_score"):
                self.same("json", estimates.get(name), expected[name])
            self.same("json", part["latency_ms"]["mean"], expected["mean_latency_ms"])
            self.same("json", part["cost_usd"], expected["cost_usd"])
            self.same("json", part["tokens"]["input"], expected["tokens"]["input"])
            if expected["pass_rate"] is not None:
                assert rate(expected["pass_rate"]) in html, part["name"]
                self.figures["html"] += 1
            # A report of a run that goes on is a snapshot.
            kept = known.held if report.run.finished_at is not None else None
            for screen, one in (("python", report), ("python, held", kept or report)):
                python = one[part["name"]]
                rates = [python.pass_rate, python.pass_rate_all, python.mean_score, python.mean_reward]
                self.same(screen, rates, [expected[name] for name in RATES])
                self.same(screen, _rates(python.summary), _rates(expected))
                self.same(screen, dict(python.scores_by_criterion), criteria_of(known, part["name"]))
                self.same(
                    screen,
                    [python.total, python.successful, dict(python.errors), python.total_tokens, python.cost_usd,
                     python.mean_latency_ms, len(python.results)],
                    [expected["trials"], expected["scored"], expected["errors"],
                     sum(expected["tokens"].values()), expected["cost_usd"],
                     expected["mean_latency_ms"], expected["trials"]],
                )  # fmt: skip
            self.check_parts(known, report, part["name"])
        if known.held is not None and report.run.finished_at is not None:
            self.same("python, held", known.held.total, report.total)
            self.same("python, held", len(list(known.held.results)), len(known.held.results))

    def check_parts(self, known: Known, report: EvalReport[Any], name: str) -> None:
        """Compare what is said of a run at its end, of any results, and of slices."""
        results = known.of(name)
        said = run_completed(self.store, report.run).experiments[name]
        expected = figures_of(results)
        self.same("event", [said.pass_rate, said.mean_score], [expected["pass_rate"], expected["mean_score"]])
        self.same("summary", _rates(summarize(results)), _rates(expected))
        topics: dict[Any, list[EvalResult]] = {}
        stored = dict(self.store.samples(report.run_id))
        for one in results:
            sample = stored.get(report.run.split(one.ordinal)[0])
            topics.setdefault(None if sample is None else sample.metadata["topic"], []).append(one)
        if set(topics) - {None}:
            found = {value: _rates(summary) for value, summary in report[name].group_by("topic").items()}
            self.same("slices", found, {value: _rates(figures_of(some)) for value, some in topics.items()})

    def check_files(self, known: Known, report: EvalReport[Any]) -> None:
        """Compare an exported table, and a saved run that overwrites the one saved before."""
        path = self.folder / f"{report.run_id}.csv"
        export_results(self.store, report.run_id, path, "csv")
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for experiment in known.run.experiments:
            expected = figures_of(known.of(experiment))
            some = [row for row in rows if row["experiment"] == experiment]
            self.same("csv", len(some), expected["trials"])
            self.same("csv", Counter(row["outcome"] for row in some if row["outcome"] in ERRORS), expected["errors"])
            passed = sum(row["passed"].lower() == "true" for row in some)
            self.same("csv", passed, expected["passed"])
        saved = self.folder / f"{report.run_id}.db"
        save_run(self.store, report.run_id, saved)
        loaded = EvalReport.load(saved)
        TrialColumns.open(loaded.store, loaded.run)
        figures, own = _figures(loaded.to_json()), _figures(report.to_json())
        loaded.store.close()
        self.same("saved", figures, own)

    def check_viewer(self, known: Known, run: RunRecord, report: EvalReport[Any]) -> None:
        name = run.run_id
        self.same("viewer report", json.loads(self.get(name)), _plain(report.to_json()))
        page = self.get(name, accept="text/html")
        trials = json.loads(self.get(f"{name}/trials"))
        self.same("viewer trials", trials["total"], len(known.results))
        for experiment in run.experiments:
            expected = figures_of(known.of(experiment))
            if run.status != "running" and expected["pass_rate"] is not None:
                assert rate(expected["pass_rate"]) in page
                self.figures["viewer report"] += 1
            for state in ("passed", "failed", *ERRORS):
                total = json.loads(self.get(f"{name}/trials?e={experiment}&outcome={state}"))["total"]
                wanted = {"passed": expected["passed"], "failed": expected["scored"] - expected["passed"]}
                self.same("viewer trials", total, (wanted | expected["errors"]).get(state, 0))
            if run.status != "running":
                said = json.loads(self.get(f"{name}/rates?e={experiment}"))["rates"]
                rates = [text.split()[1] for text in said if "nothing" not in text]
                self.same("viewer rates", rates, [rate(expected["pass_rate"])] * (expected["pass_rate"] is not None))
        text = self.get(f"{name}/trials.csv")
        rows = list(csv.DictReader(io.StringIO(text)))
        self.same(
            "viewer csv", Counter(row["outcome"] for row in rows), Counter(r.outcome for r in known.results.values())
        )

    def check_labels(self, known: Known, report: EvalReport[Any]) -> None:
        for experiment in known.run.experiments:
            wanted = sum(key[0] == experiment for key in known.labels)
            if wanted:
                self.same("calibration", calibrate(report[experiment]).labelled, wanted)

    def check_comparison(
        self, one: Known, left: EvalReport[Any], a: str, two: Known, right: EvalReport[Any], b: str
    ) -> None:
        found = compare(left[a], right[b])
        gained, lost, both = flips_of(one.of(a), two.of(b))
        flips = found.candidates[0].flips
        self.same("compare", [flips.gained_count, flips.lost_count], [len(gained), len(lost)])
        self.same("compare", [set(flips.gained), set(flips.lost)], [gained, lost])
        (changes,) = found.changes
        kinds: tuple[ChangeKind, ...] = ("gained", "lost", "changed", "same")
        self.same("compare", sum([changes.count(kind) for kind in kinds]), both)
        passed = found.candidates[0]["passed"]
        self.same("compare", passed.n, both)
        if both >= 3:  # Two of the samples are equal, and one cluster has no variance.
            table = leaderboard(left[a], right[b])
            means = [one for one in (passed.baseline, passed.candidate) if one is not None]
            self.same("leaderboard", sorted(entry.mean for entry in table.systems), sorted(means))
        for report, name, results in ((left, a, one.of(a)), (right, b, two.of(b))):
            (rule,) = gate(report[name], {"floors": {"passed": 0.5}}).checks
            shares = list(shares_of(results).values())
            self.same("gate", rule.value, sum(shares) / len(shares) if shares else None)
        if self.loop is not None:
            path = f"compare?a={left.run_id}:{a}&b={right.run_id}:{b}"
            self.same("viewer compare", json.loads(self.get(path)), _plain(found.to_json()))
            page = self.get(path, accept="text/html")
            said = re.search(r"samples that changed: ([\d,]+) lost, ([\d,]+) gained", page)
            assert said is not None
            self.same("viewer compare", [int(said[1]), int(said[2])], [len(lost), len(gained)])


def criteria_of(known: Known, experiment: str) -> dict[str, float]:
    """Return the mean of each metric; without any, that of the scores under the name of the evaluator."""
    results = known.of(experiment)
    with_metrics = [one for one in results if one.score is not None and one.score.metrics]
    mean = mean_over_samples(with_metrics, lambda score: score.metrics[0].value)
    whole = mean_over_samples(results, lambda score: score.value)
    found = {"length": mean} if with_metrics else {known.run.evaluator: whole}
    return {name: value for name, value in found.items() if value is not None}


def _rates(figures: dict[str, Any]) -> list[float | None]:
    return [figures[name] for name in RATES if name != "mean_reward"]


def _figures(tree: dict[str, Any]) -> Any:
    return tree["experiments"]


def _plain(tree: Any) -> Any:
    return json.loads(json.dumps(tree))


def _count(value: Any) -> int:
    """Return how many figures there are in a value."""
    if isinstance(value, dict):
        return sum(_count(one) for one in value.values())
    if isinstance(value, list | tuple | set):
        return sum(_count(one) for one in value)
    return int(value is None or isinstance(value, int | float | str))


def _close(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_close(found[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_close, found, expected))
    if isinstance(expected, float) and isinstance(found, float | int):
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
    return bool(found == expected)


def play(
    store: RunStore, seed: int, folder: Path, url: str | None, *, viewed: bool = True, steps: int = STEPS
) -> Counter[str]:
    """Play a history; raises at the first figure on which two screens differ. Returns the figures compared.

    Args:
        store: The store.
        seed: Determines the history.
        folder: For files.
        url: The address of the store for commands; None if it is in memory.
        viewed: Whether the viewer is one of the screens.
        steps: How much happens.
    """
    history = History(store, seed, folder, url)
    with asyncio.Runner() as loop:
        screens = Screens(store, folder, loop if viewed else None)
        for number in range(steps):
            history.step()
            if number % 3 == 0:
                try:
                    screens.check(history)
                except AssertionError as error:
                    raise AssertionError(f"history {seed}, after {'; '.join(history.steps)}: {error}") from error
    return screens.figures


def main() -> None:
    """Play histories and print what was compared."""
    numbers = [int(text) for text in sys.argv[1:]] or [100]
    first, end = numbers if len(numbers) == 2 else (0, numbers[0])
    compared: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAIRTRIAL_CACHE_DIR"] = f"{folder}/cache"
        for seed in range(first, end):
            url = f"{folder}/{seed}.db"
            store = open_store(url)
            compared += play(store, seed, Path(folder), url)
            store.close()
    print(f"{end - first} histories, {sum(compared.values()):,} figures compared: {dict(compared)}")


if __name__ == "__main__":
    main()
