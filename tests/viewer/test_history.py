"""The history of a suite: figures as in reports, changes, gaps, the alarm, and the work for a thousand runs."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from fairtrial import EvalReport, open_store
from fairtrial.base.frozen import LruCache
from fairtrial.reports import watch_alarm
from fairtrial.store import RunStore
from fairtrial.store.sql import SqlStore
from fairtrial.viewer.history import read_history
from tests.reports.build import stored
from tests.viewer.conftest import Viewed, open_session, start_server
from tests.viewer.days import DAY, FIRST, add_day, add_days

ASKED = {"suite": "daily", "experiment": "", "dataset": "", "by": "", "span": 90, "end": ""}


def history(store: RunStore, **asked: Any) -> dict[str, Any]:
    return read_history(store, ASKED | asked, LruCache(1_000))


def points(store: RunStore, **asked: Any) -> dict[str, dict[str, Any]]:
    return {point["name"]: point for point in history(store, **asked)["points"]}


def page(viewed: Viewed, path: str) -> str:
    """Return a page when its figures are there: the server answers after some seconds without them."""
    for _ in range(40):
        answer = viewed.get(path)
        assert answer.status == 200
        if "this page loads itself again" not in answer.text:
            return answer.text
    raise AssertionError(f"no figures on {path}")


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    path = tmp_path_factory.mktemp("history") / "runs.db"
    store = open_store(path)
    add_days(store)
    server, thread = start_server(path)
    yield Viewed(server, store, open_session(server))
    server.stop()
    thread.join(60)
    store.close()


def as_reported(report: EvalReport[Any], experiment: str, name: str) -> tuple[Any, ...]:
    figures = report[experiment].figures
    [found] = [one for one in (*figures.estimates, *figures.per_trial) if one.name == name]
    return found.value, found.low, found.high


def test_figures_of_runs_are_those_of_their_reports_to_the_last_digit(database: str) -> None:
    store = open_store(database)
    common: dict[str, Any] = {"store": store, "suite": "daily", "evaluator": "grade"}
    some = [1.0, 0.0, 1.0, 1.0, "task_error", 1.0, 0.0, 1.0, 1.0, 1.0, "scorer_error", 1.0]
    clusters = [{"cluster": f"c{place // 3}"} for place in range(12)]
    stored({"a": some, "b": some[::-1]}, run_id="plain", created_at=FIRST, **common)
    stored(some, run_id="clusters", metadata=clusters, fingerprint="e" * 32, created_at=FIRST + DAY, **common)
    stored([[1.0, 0.0, 1.0]] * 6 + [[0.0, 0.0, "timeout"]] * 6, run_id="repeats", created_at=FIRST + 2 * DAY, **common)
    inputs = ["the same" if place < 4 else f"another {place}" for place in range(12)]
    stored(some, run_id="inputs", inputs=inputs, fingerprint="d" * 32, created_at=FIRST + 3 * DAY, **common)
    stored(["task_error"] * 3, run_id="nothing", fingerprint="b" * 32, created_at=FIRST + 4 * DAY, **common)
    add_day(store, 5, errors=3, dataset_name="data")
    compared = 0
    for experiment in ("a", "b", "baseline", "careful"):
        for point in history(store, by="run", experiment=experiment)["points"]:
            for facts in point["runs"]:
                report = EvalReport(store, store.get_run(facts["run_id"]))
                rate = point["rate"]
                assert (rate["value"], rate["low"], rate["high"]) == as_reported(report, experiment, "pass_rate")
                if point["cost"] is not None:
                    cost = point["cost"]
                    assert (cost["value"], cost["low"], cost["high"]) == as_reported(report, experiment, "cost_usd")
                assert facts["errors"] == sum(report[experiment].errors.values())
                compared += 1
    assert compared == 8
    store.close()


def test_runs_of_a_day_count_together_as_repeats_of_the_samples(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    first, second = [1.0] * 14 + [0.0] * 6, [1.0, 0.0] * 10
    whole = stored([[a, b] for a, b in zip(first, second, strict=True)], store=store, run_id="whole", suite="other")
    stored(first, store=store, run_id="one", suite="daily", created_at=FIRST)
    stored(second, store=store, run_id="two", suite="daily", created_at=FIRST + 3600)
    [day] = points(store).values()
    rate = day["rate"]
    assert (rate["value"], rate["low"], rate["high"]) == as_reported(whole, "baseline", "pass_rate")
    assert [facts["run_id"] for facts in day["runs"]] == ["one", "two"]
    store.close()


def test_days_without_a_run_are_gaps_and_unfinished_runs_are_in_no_rate(days: Viewed) -> None:
    found = points(days.store)
    places = {name: point["place"] for name, point in found.items()}
    assert "2026-09-01" not in found
    assert places["2026-09-04"] - places["2026-08-31"] == 4
    unfinished = found["2026-09-09"]
    assert (unfinished["rate"], unfinished["runs"]) == (None, [])
    assert [status for _, status in unfinished["others"]] == ["interrupted"]
    several = found["2026-09-17"]
    assert ([one["scored"] for one in several["runs"]], len(several["others"])) == ([60, 60], 1)
    assert [one["errors"] for one in found["2026-08-28"]["runs"]] == [4]
    text = page(days, "history?suite=daily")
    assert "interrupted, left out" in text
    assert "4 errors</a>" in text


def test_neighbours_are_joined_and_gaps_and_other_datasets_are_not(days: Viewed, tmp_path: Path) -> None:
    drawing = _plot(page(days, "history?suite=daily"))
    shown = [point for point in points(days.store).values() if point["rate"]]
    neighbours = sum(after["place"] - before["place"] == 1 for before, after in pairwise(shown))
    assert drawing.count('<circle class="dot"') == len(shown)
    assert len(re.findall(r'<line class="zero"[^>]*/>', drawing)) - drawing.count("stroke-dasharray") == neighbours
    store = open_store(tmp_path / "runs.db")
    for number in range(6):
        changes: dict[str, Any] = {"dataset_fingerprint": "ab"[number > 2] * 32}
        add_day(store, number, n=20, experiments=("baseline",), **changes)
    server, thread = start_server(tmp_path / "runs.db")
    drawing = _plot(page(Viewed(server, store, open_session(server)), "history?suite=daily"))
    assert len(re.findall(r'<line class="zero"[^>]*/>', drawing)) - drawing.count("stroke-dasharray") == 4
    assert [change["what"] for change in points(store)["2026-08-23"]["changes"]] == ["dataset"]
    server.stop()
    thread.join(60)
    store.close()


def _plot(text: str) -> str:
    return text[text.index('<svg class="ft-plot"') :].partition("</svg>")[0]


def test_datasets_of_other_names_have_histories_of_their_own(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    for number in range(4):
        name = ("questions", "complaints")[number % 2]
        add_day(store, number, n=20, dataset_name=name, dataset_fingerprint=name[0] * 32)
    newest, other = history(store), history(store, dataset="questions")
    assert (newest["datasets"], newest["dataset"]) == (["complaints", "questions"], "complaints")
    assert [point["name"] for point in newest["points"]] == ["2026-08-21", "2026-08-23"]
    assert [point["name"] for point in other["points"]] == ["2026-08-20", "2026-08-22"]
    assert all(not point["changes"] for point in newest["points"])
    store.close()


def test_changes_of_model_code_and_prompt_are_at_the_run_that_has_them_first(days: Viewed) -> None:
    changed = {
        name: {(change["kind"], change["before"], change["after"]) for change in point["changes"]}
        for name, point in points(days.store).items()
        if point["changes"]
    }
    assert changed == {
        "2026-09-13": {
            ("code", "c0dec0de", "beefbeef (app.py, app.py:SYSTEM_PROMPT)"),
            ("prompt", None, "app.py:SYSTEM_PROMPT"),
        },
        "2026-09-29": {("model", "helper-1", "helper-2")},
    }
    first = history(days.store, span=30, end="2026-10-18")["points"][0]
    assert first["name"] > "2026-09-13"
    [first, *_] = history(days.store, span=20, end="2026-10-18")["points"]  # What was before is on another page.
    assert (first["name"], first["changes"][0]["what"]) == ("2026-09-29", "model")
    text = _plot(page(days, "history?suite=daily"))
    assert "<title>model: helper-1 \u2192 helper-2</title>" in text
    assert ">prompt</text>" in text


def test_a_prompt_that_is_a_parameter_is_a_change_of_the_prompt(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    for number, prompt in enumerate(("Be kind.", "Be quick.")):
        add_day(store, number, n=20, params={"baseline": {"prompt": prompt, "top": 1}})
    [change] = points(store)["2026-08-21"]["changes"]
    assert (change["kind"], change["what"], change["after"]) == ("prompt", "parameter prompt", "Be quick.")
    store.close()


@pytest.mark.parametrize("by", ["", "run", "code"])
def test_pages_show_every_run_once(days: Viewed, by: str) -> None:
    seen: list[str] = []
    end, pages = "", []
    while True:
        found = history(days.store, by=by, span=7, end=end)
        pages.append(found)
        seen += [run for point in found["points"] for run in (*_ids(point), *(one for one, _ in point["others"]))]
        if not (end := found["older"]):
            break
    assert sorted(seen) == sorted(run.run_id for run in days.store.runs(suite="daily"))
    assert by == "code" or len(pages) > 6
    assert pages[0]["newer"] == ""
    back = history(days.store, by=by, span=7, end=pages[-1]["points"][-1]["key"])
    while back["newer"]:
        back = history(days.store, by=by, span=7, end=back["newer"])
    assert back["points"][-1] == pages[0]["points"][-1]


def _ids(point: dict[str, Any]) -> list[str]:
    return [facts["run_id"] for facts in point["runs"]]


def test_the_alarm_is_that_of_the_command(days: Viewed) -> None:
    found = watch_alarm(days.store, "daily", experiment="baseline", reference=800)
    assert found.status == "alarm"
    text = page(days, "history?suite=daily&experiment=baseline&alarm=1&reference=800")
    assert found.system.sentence in text
    assert "fairtrial watch alarm daily:baseline --reference 800" in text
    assert f">dropped, likely on {found.system.likely}<" in text
    row = text[text.index(f'scope="row">{found.system.alarm_on}') :].partition("</th>")[0]
    assert '<span class="badge bad">alarm</span>' in row
    careful = watch_alarm(days.store, "daily", experiment="careful", since="2026-10-01")
    shown = page(days, "history?suite=daily&experiment=careful&alarm=1&since=2026-10-01")
    assert careful.system.sentence in shown
    refused = page(days, "history?suite=daily&alarm=1&reference=7")
    assert "No alarm can be computed: reference must be at least 200 scores (got 7)" in refused
    assert "alarm</span>" not in page(days, "history?suite=daily")


def test_rows_lead_to_the_trials_behind_their_counts(days: Viewed) -> None:
    text = page(days, "history?suite=daily&experiment=careful")
    [row] = [part for part in text.split('<tr class="row">') if 'scope="row">2026-08-28' in part]
    run = next(run for run in days.store.runs(suite="daily") if run.run_id == "daily-8-0-")
    totals = next(part for part in days.store.totals(run.run_id) if part.experiment == "careful")
    failed = totals.outcomes["scored"] - totals.passed
    assert f'href="./{run.name}/trials?e=careful&amp;outcome=failed">{failed} failed</a>' in row
    [address] = re.findall(r'class="unsure" href="\./([^"]*)">4 errors', row)
    answer = days.get(address.replace("&amp;", "&"))
    assert (answer.status, answer.text.count('<tr class="row"')) == (200, 4)


def test_a_new_run_is_on_the_page_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    add_day(store, 0, n=20)
    server, thread = start_server(tmp_path / "runs.db")
    seen = Viewed(server, store, open_session(server))
    assert "2026-08-21" not in page(seen, "history?suite=daily")
    add_day(store, 1, n=20, stored=10)
    assert "interrupted, left out" in page(seen, "history?suite=daily")
    store.delete_run("daily-1-0-")
    add_day(store, 1, n=20)
    assert "left out" not in (text := page(seen, "history?suite=daily"))
    assert "2026-08-21" in text
    assert seen.get("history?suite=nothing").status == 404
    for odd in (
        "by=x&span=7",
        "end=zz",
        "end=%00",
        "reference=-1&alarm=1",
        "experiment=zz&dataset=zz",
        "since=zz&alarm=1",
    ):
        assert seen.get(f"history?suite=daily&{odd}").status == 200, odd
    server.stop()
    thread.join(60)
    store.close()


RUNS = 1_000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    """A run that the store made, and copies of its rows, one for each day."""
    path = tmp_path_factory.mktemp("thousand") / "runs.db"
    store = open_store(path)
    add_day(store, 0, n=50)
    changed = {"id": "n", "run_id": "'run' || n", "number": "n", "run": "n", "created_at": f"{FIRST} + n * {DAY}"}
    counted = f"WITH RECURSIVE count(n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM count WHERE n < {RUNS}) "
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in ("runs", "results", "details"):
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(changed.get(name, f"old.{name}") for name in names)
            connection.execute(f"INSERT INTO {table} {counted} SELECT {values} FROM count, {table} AS old")
    server, thread = start_server(path)
    yield Viewed(server, store, open_session(server))
    server.stop()
    thread.join(60)
    store.close()


def _statements(store: RunStore, **asked: Any) -> tuple[int, int]:
    """Return the number of statements of a page, and of its points."""
    assert isinstance(store, SqlStore)
    count = 0

    def add(*_: Any) -> None:
        nonlocal count
        count += 1

    sa.event.listen(store._engine, "before_cursor_execute", add)
    found = len(history(store, **asked)["points"])
    sa.event.remove(store._engine, "before_cursor_execute", add)
    return count, found


def test_the_queries_of_a_page_do_not_grow_with_its_runs(many: Viewed) -> None:
    few, most = _statements(many.store, span=30), _statements(many.store, span=365)
    assert (few[1], most[1]) == (30, 365)
    assert most[0] == few[0] <= 12


@pytest.mark.measured
def test_a_page_of_a_thousand_runs_takes_as_long_as_what_it_shows(many: Viewed) -> None:
    history(many.store)
    before = time.process_time()
    listed = many.store.runs(suite="daily")
    bare = time.process_time() - before
    before = time.process_time()
    history(many.store)
    took = time.process_time() - before
    assert len(listed) == RUNS
    assert took < 8 * bare + 0.5
    page(many, "history?suite=daily")
    before = time.process_time()
    assert many.get("history?suite=daily").status == 200
    assert time.process_time() - before < 4 * bare + 0.5
