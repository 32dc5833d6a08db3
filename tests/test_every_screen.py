"""A figure is the same on every screen, whatever happened to the stored results."""

from __future__ import annotations

import asyncio
import json
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from fairtrial import Dataset, EvalReport, EvalSuite, Metric, Sample, Score, TokenUsage, compare, exact_match, gate
from fairtrial.base.formatting import rate
from fairtrial.integrations.inspect import write_log
from fairtrial.reports.figures.metrics import run_totals
from fairtrial.reports.figures.summaries import summarize
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.reports.report.run_json import totals_record
from fairtrial.runs.opening import run_completed
from fairtrial.store import RunStore, open_store
from fairtrial.trials import EvalConfig, StopWhen
from fairtrial.viewer.work import Jobs
from tests.histories import Screens, play
from tests.store.build import result, run_record, samples

SCREENS = {
    "store", "totals", "columns", "json", "html", "csv", "saved", "python", "python, held", "compare", "gate",
    "leaderboard", "viewer report", "viewer trials", "viewer rates", "viewer csv", "viewer compare", "viewer runs",
    "event", "summary", "slices",
}  # fmt: skip


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    url = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path / 'runs.db'}"}.get(request.param)
    opened = open_store(url or str(request.getfixturevalue("pg_url")))
    yield opened
    opened.close()


def ended_run(store: RunStore, **changes: Any) -> str:
    """A finished run of which one trial is an error and one is scored."""
    run = store.create_run(run_record(size=1, experiments=("baseline",), **changes))
    store.commit(run.run_id, [result(run, 0), result(run, 1, "task_error")], samples([0]))
    store.update_run(run.run_id, status="finished", finished_at=3000.0)
    return run.run_id


def revision(store: RunStore, run_id: str) -> int:
    return store.get_run(run_id).revision


class TestRevisions:
    def test_a_new_result_of_a_running_run_keeps_the_revision(self, store: RunStore) -> None:
        run = store.create_run(run_record())
        before = revision(store, run.run_id)
        store.commit(run.run_id, [result(run, 0)], samples([0]))
        store.commit(run.run_id, [result(run, 0)], samples([0]))  # A duplicate.
        assert revision(store, run.run_id) == before

    def test_a_replaced_result_changes_the_revision(self, store: RunStore) -> None:
        run = store.create_run(run_record())
        store.commit(run.run_id, [result(run, 0, "task_error")], samples([0]))
        before = revision(store, run.run_id)
        store.commit(run.run_id, [result(run, 0, attempt=2)])
        assert revision(store, run.run_id) != before

    def test_a_result_after_the_end_changes_the_revision_and_a_duplicate_does_not(self, store: RunStore) -> None:
        run = store.create_run(run_record())
        store.update_run(run.run_id, status="stopped", finished_at=1.0)
        before = revision(store, run.run_id)
        store.commit(run.run_id, [result(run, 0)], samples([0]))
        late = revision(store, run.run_id)
        assert late != before
        store.commit(run.run_id, [result(run, 0)], samples([0]))
        assert revision(store, run.run_id) == late

    def test_a_sample_that_is_completed_later_changes_the_revision(self, store: RunStore) -> None:
        run = store.create_run(run_record())
        store.commit(run.run_id, [result(run, 0)])
        before = revision(store, run.run_id)
        store.commit(run.run_id, [], samples([0]))
        assert revision(store, run.run_id) != before

    def test_a_run_that_is_continued_or_made_again_has_another_revision(self, store: RunStore) -> None:
        run_id = ended_run(store)
        seen = {revision(store, run_id)}
        store.update_run(run_id, status="running")
        seen.add(revision(store, run_id))
        store.delete_run(run_id)
        ended_run(store)
        assert len(seen | {revision(store, run_id)}) == 3


def test_a_report_that_is_kept_sees_a_result_that_replaces_an_error_after_the_end(store: RunStore) -> None:
    run_id = ended_run(store)
    report: EvalReport[Any] = EvalReport(store, store.get_run(run_id))
    assert (report.successful, dict(report.errors)) == (1, {"task_error": 1})
    run = store.get_run(run_id)
    if hasattr(store, "identity"):
        TrialColumns.open(store, run)
    store.commit(run_id, [result(run, 1)])
    assert (report.successful, dict(report.errors), len(report.results)) == (2, {}, 2)
    assert [dict(part.outcomes) for part in run_totals(store, run)] == [{"scored": 2}]
    if hasattr(store, "identity"):
        assert [row["outcome"] for row in TrialColumns.open(store, run).rows([0, 1])] == ["scored", "scored"]


def test_a_pass_rate_is_a_mean_over_samples_where_repeats_are_not_scored(store: RunStore) -> None:
    run = store.create_run(run_record(size=3, experiments=("baseline",), repeats=3))
    passed, failed = Score(1.0, passed=True, metrics=(Metric("gain", 4.0, weight=1.0),)), Score(0.25, passed=False)
    kinds = [passed, passed, passed, failed, None, None, None, passed, failed]
    made = [result(run, at, score=one) if one else result(run, at, "task_error") for at, one in enumerate(kinds)]
    store.commit(run.run_id, made, samples(range(3)))
    store.update_run(run.run_id, status="finished", finished_at=3000.0)
    report: EvalReport[Any] = EvalReport(store, store.get_run(run.run_id))
    figures = {one.name: one.value for one in report.estimates}
    names = ("pass_rate", "pass_rate_all", "mean_score")
    for found in (report, summarize(report.results), report.summary, totals_record(*store.totals(run.run_id))):
        shown = [found[name] if isinstance(found, dict) else getattr(found, name) for name in names]
        assert shown == pytest.approx([(1 + 0 + 1 / 2) / 3, (1 + 0 + 1 / 3) / 3, (1 + 0.25 + 1.25 / 2) / 3])
        assert shown == pytest.approx([figures[name] for name in names])
    assert report.mean_reward == pytest.approx(figures["mean_reward"])
    assert run_completed(store, run).pass_rate == report.pass_rate
    if hasattr(store, "identity"):
        TrialColumns.open(store, run)  # Writes the file that has the sums.
        assert run_totals(store, store.get_run(run.run_id)) == store.totals(run.run_id)


def test_rates_of_a_run_that_stopped_by_itself_are_those_of_the_samples_on_which_it_decided(
    store: RunStore, tmp_path: Path
) -> None:
    data = Dataset([Sample(f"q{at}", at, 0, {"half": at // 20}) for at in range(40)], name="d")
    rule = StopWhen(narrower_than=0.6, shuffle=False)
    suite = EvalSuite("s", data, lambda given: given % 3, exact_match, config=EvalConfig(stop_when=rule))
    run = suite.run_sync(store=store).run
    note = run.noted.adaptive
    assert note is not None
    used = note.samples
    assert used < 30
    # Of the others, all fail: they were in flight when the run stopped.
    late = [replace(result(run, at), key=result(run, at).key._replace(sample_id=f"q{at}")) for at in range(used, 40)]
    late = [replace(one, score=Score(0.0, metrics=(Metric("m", 0.5),))) for one in late]
    store.commit(run.run_id, late, {at: data[at] for at in range(used, 40)})
    report: EvalReport[Any] = EvalReport(store, store.get_run(run.run_id))
    figures = {one.name: one.value for one in report.estimates}
    names = ("pass_rate", "pass_rate_all", "mean_score")
    passed = sum(at % 3 == 0 for at in range(used)) / used
    for found in (report, report.summary, totals_record(*store.totals(run.run_id)), figures):
        shown = [found[name] if isinstance(found, dict) else getattr(found, name) for name in names]
        assert shown == pytest.approx([passed] * 3)
    assert report.adaptive is not None
    assert report.adaptive["experiments"]["baseline"]["estimate"] == pytest.approx(passed)
    assert (report.total, run_completed(store, run).pass_rate) == (40, report.pass_rate)
    assert rate(passed) in report.to_html()
    halves = report.group_by("half")
    assert halves[0]["pass_rate"] == pytest.approx(sum(at % 3 == 0 for at in range(min(used, 20))) / min(used, 20))
    (path,) = write_log(store, report.run, tmp_path / "s.eval")
    with zipfile.ZipFile(path) as log:
        written = json.loads(log.read("header.json"))["results"]["scores"][0]["metrics"]["pass_rate"]["value"]
    assert written == pytest.approx(passed)
    if hasattr(store, "identity"):
        TrialColumns.open(store, report.run)  # Writes the file that has the sums.
        assert run_totals(store, store.get_run(run.run_id)) == store.totals(run.run_id)
        with asyncio.Runner() as loop:
            screens = Screens(store, tmp_path, loop)
            (listed,) = json.loads(screens.get(""))["runs"]
            assert listed["experiments"][0]["pass_rate"] == pytest.approx(passed)


def test_a_run_does_not_end_while_a_result_is_being_stored(pg_url: str) -> None:
    store, other = open_store(pg_url), open_store(pg_url)
    run = store.create_run(run_record())
    done = threading.Event()
    waited: list[bool] = []

    def end_run() -> None:
        other.update_run(run.run_id, status="stopped", finished_at=1.0)
        done.set()

    thread = threading.Thread(target=end_run)

    def begin(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "INTO results" in statement and not waited:
            thread.start()
            waited.append(not done.wait(0.5))  # Else a report could be cached that lacks the result forever.

    event.listen(store._engine, "before_cursor_execute", begin)  # type: ignore[attr-defined]
    store.commit(run.run_id, [result(run, 0)], samples([0]))
    thread.join(30)
    assert (waited, done.is_set()) == ([True], True)
    store.close()
    other.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Any:
    store = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    yield store
    store.close()


def test_pages_notice_samples_that_another_run_stored(sqlite: RunStore, tmp_path: Path) -> None:
    stopped = sqlite.create_run(run_record("r1"))
    sqlite.commit("r1", [result(stopped, 0)], samples([0]))
    sqlite.update_run("r1", status="stopped", finished_at=1.0)
    other = sqlite.create_run(run_record("r2"))
    with asyncio.Runner() as loop:
        screens = Screens(sqlite, tmp_path, loop)
        before = loop.run(screens.viewer.state_of(sqlite.get_run("r1")))
        assert loop.run(screens.viewer.state_of(sqlite.get_run("r1"))) == before
        sqlite.commit("r2", [result(other, 4)], samples([1]))
        assert loop.run(screens.viewer.state_of(sqlite.get_run("r1"))) != before
        sqlite.commit("r2", [], samples(range(10)))
        complete = loop.run(screens.viewer.state_of(sqlite.get_run("r1")))
        assert loop.run(screens.viewer.state_of(sqlite.get_run("r1"))) == complete


def test_pages_notice_changed_notes(sqlite: RunStore, tmp_path: Path) -> None:
    run_id = ended_run(sqlite)
    with asyncio.Runner() as loop:
        screens = Screens(sqlite, tmp_path, loop)
        assert json.loads(screens.get(run_id))["run"]["notes"] == {}
        sqlite.update_run(run_id, notes={"stopped": "manually"})
        assert json.loads(screens.get(run_id))["run"]["notes"] == {"stopped": "manually"}


def test_the_comparison_page_counts_flips_as_compare_does(sqlite: RunStore) -> None:
    run = sqlite.create_run(run_record(size=6, repeats=1))
    kinds = [("scored", "scored"), ("task_error", "scored"), ("scored", "timeout"), ("scored", "scorer_error")]
    made = []
    for place, (left, right) in enumerate(kinds):
        passing = Score(1.0, passed=True)
        made += [
            result(run, 2 * place + side, outcome, score=passing if outcome == "scored" else None)  # type: ignore[arg-type]
            for side, outcome in enumerate((left, right))
        ]
    sqlite.commit(run.run_id, made, samples(range(4)))
    sqlite.update_run(run.run_id, status="stopped", finished_at=1.0)
    report: EvalReport[Any] = EvalReport(sqlite, sqlite.get_run(run.run_id))
    found = compare(report["baseline"], report["terse"])
    job = {"job": "compare", "a": "r1", "b": "r1", "a_experiment": "baseline", "b_experiment": "terse"}
    page = Jobs(sqlite).answer({**job, "other_users": False})
    assert page["counts"] == {"lost": 1, "gained": 1, "changed": 0, "same": 1, "missing": 3}
    flips = found.candidates[0].flips
    assert (flips.gained_count, flips.lost_count) == (1, 1)
    assert [(flip["id"], flip["kind"], flip["samples"]) for flip in page["flips"]] == [
        (flips.lost[0], "lost", [2, 2]),
        (flips.gained[0], "gained", [1, 1]),
    ]


@pytest.mark.parametrize(("size", "differs"), [(12, False), (200, True)])
def test_a_gate_says_that_its_interval_is_not_that_of_the_report_only_where_it_is_not(size: int, differs: bool) -> None:
    data = Dataset([Sample(str(at), at, 0) for at in range(size)])
    report = EvalSuite("s", data, lambda given: int(given % 7 == 0), exact_match).run_sync(store="memory:")
    decided = gate(report, {"floors": {"passed": 0.5}})
    (check,) = decided.checks
    interval = report.pass_rate_interval
    assert interval is not None
    assert (rate(interval.low) in check.reason and rate(interval.high) in check.reason) != differs
    remark = "Gates use the exact interval of a rate, which is not that of reports."
    for shown in (str(decided), decided.to_html(), decided.to_markdown()):
        assert (remark in " ".join(shown.split())) == differs


@pytest.mark.parametrize(("usage", "shown"), [
    (TokenUsage(9, 9), "unknown"), (TokenUsage(9, 9, cost_usd=0.5), "at least $0.5000"),
])  # fmt: skip
def test_a_cost_of_which_a_part_is_unknown_is_said_to_be_at_least_that(
    sqlite: RunStore, tmp_path: Path, usage: TokenUsage, shown: str
) -> None:
    run = sqlite.create_run(run_record(size=1, experiments=("baseline",)))
    sqlite.commit(run.run_id, [replace(result(run, 0), usage=usage, unpriced_calls=1)], samples([0]))
    sqlite.update_run(run.run_id, status="finished", finished_at=3000.0)
    with asyncio.Runner() as loop:
        page = Screens(sqlite, tmp_path, loop).get("", accept="text/html")
    assert f'<td class="more">{shown}</td>' in page
    assert shown in EvalReport(sqlite, sqlite.get_run(run.run_id)).to_html()


def test_a_saved_run_that_is_overwritten_is_read_again(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    run_id = ended_run(store)
    path = tmp_path / "saved.db"
    found = []
    for late in ([], [result(store.get_run(run_id), 1)]):
        store.commit(run_id, late)
        EvalReport(store, store.get_run(run_id)).save(path)
        loaded = EvalReport.load(path)
        TrialColumns.open(loaded.store, loaded.run)
        found.append(loaded.successful)
        loaded.store.close()
    assert found == [1, 2]
    store.close()


def test_a_report_of_samples_that_were_never_stored_is_shown() -> None:
    store = open_store("memory:")
    run = store.create_run(run_record(size=1, experiments=("baseline",)))
    store.commit(run.run_id, [result(run, 0, "task_error"), replace(result(run, 1))])
    assert "(not stored)" in EvalReport(store, store.get_run(run.run_id)).to_html()


def test_every_screen_shows_the_same_figures_after_a_short_history(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    store = open_store(url)
    assert sum(play(store, 2, tmp_path, url, steps=4).values()) > 1_000
    store.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0])
def test_every_screen_shows_the_same_figures_after_a_history(tmp_path: Path, seed: int) -> None:
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    store = open_store(url)
    compared = play(store, seed, tmp_path, url)
    assert set(compared) - {"calibration"} == SCREENS
    store.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["memory", "postgresql"])
def test_every_screen_shows_the_same_figures_in_other_stores(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = None if kind == "memory" else str(request.getfixturevalue("pg_url"))
    store = open_store(url or "memory:")
    assert sum(play(store, 4, tmp_path, url, viewed=kind != "memory").values()) > 1_000
    store.close()
