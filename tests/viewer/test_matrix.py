"""The matrix: samples as rows, experiments as columns, against a plain loop over what was stored."""

from __future__ import annotations

import html
import math
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from fairtrial import EvalResult, Sample, Score, TrialKey, open_store
from fairtrial.store import RunRecord, RunStore
from fairtrial.viewer.matrix import ROWS, Matrix
from fairtrial.viewer.pages.matrix import MOST_COLUMNS, _marked
from fairtrial.viewer.question import SHOWS, MatrixQuestion, read_matrix_question
from fairtrial.viewer.trial_table import open_columns_of
from tests.viewer.conftest import Viewed, open_session, record, start_server, support_samples, trial

NAMES = tuple(f"e{number}" for number in range(7))
SIZE = 60
ARABIC = "الطلب 1003 وصل يوم الجمعة"
ODD = {0: ARABIC, 1: "x" * 1_000_000, 2: "<script>hit=1</script>", 3: None, 4: "", 5: {"answer": [1, "two"]}}


def odd_trial(run: RunRecord, ordinal: int) -> EvalResult | None:
    """One in eleven is missing, one in seven an error; passing depends on sample, experiment and repeat."""
    place, experiment, repeat = run.split(ordinal)
    if ordinal % 11 == 4:
        return None
    key = TrialKey(run.run_id, run.experiments[experiment], f"q{place:02}", repeat)
    if ordinal % 7 == 3:
        error = f"ValueError: <b>no</b> {ordinal}"
        return EvalResult(key=key, ordinal=ordinal, outcome="timeout", error=error, execution=ordinal + 1)
    passed = place % 4 == 0 or (place * 5 + experiment * 3 + repeat) % 6 != 0
    output = ODD.get(place, f"answer {place} of {'all' if place % 3 else run.experiments[experiment]}, as asked for")
    score = Score(float(passed), passed, "" if passed else f"wrong {place}")
    return EvalResult(key=key, ordinal=ordinal, outcome="scored", score=score, output=output, execution=ordinal + 1)


def add(store: RunStore, run: RunRecord) -> None:
    kinds = ("refund", "delivery", "address")
    samples: dict[int, Sample[Any, Any]] = {
        place: Sample(f"q{place:02}", f"question {place}", None, {"kind": kinds[place % 3]} if place % 5 else {})
        for place in range(run.dataset_size)
    }
    found = (odd_trial(run, ordinal) for ordinal in range(run.planned))
    store.commit(run.run_id, [one for one in found if one is not None], samples)
    store.update_run(run.run_id, status="finished", finished_at=1010.0)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    """Seven experiments, twice, with odd outputs; another run of one experiment with its samples turned round."""
    path = tmp_path_factory.mktemp("matrix") / "runs.db"
    store = open_store(path)
    add(store, store.create_run(record("odd-run", "odd", SIZE, experiments=NAMES, repeats=2)))
    add_turned(store)
    server, thread = start_server(path, reviewers=("rev",), user="me")
    yield Viewed(server, store, open_session(server))
    server.stop()
    thread.join(60)
    store.close()


def add_turned(store: RunStore) -> None:
    """The samples 0 to 49, the last one first."""
    run = store.create_run(record("turned-run", "odd", 50, experiments=("only",), dataset_fingerprint="other"))
    results: list[EvalResult] = []
    samples: dict[int, Sample[Any, Any]] = {}
    for place in range(50):
        name = f"q{49 - place:02}"
        samples[place] = Sample(name, f"question {49 - place}", None, {})
        key = TrialKey(run.run_id, "only", name, 0)
        output = f"turned {name}"
        results.append(
            EvalResult(key=key, ordinal=place, outcome="scored", score=Score(1.0), output=output, execution=place + 1)
        )
    store.commit(run.run_id, results, samples)
    store.update_run(run.run_id, status="finished", finished_at=1020.0)


def plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def rows_of(text: str) -> list[str]:
    return re.findall(r'<a class="main" href="[^"]+">(q\d\d)', text)


def row_of(text: str, sample: str) -> str:
    """The HTML of one row."""
    return next(row for row in text.split("<tr ")[1:] if f">{sample}</a>" in row)


def cells(run: RunRecord, place: int) -> list[tuple[float | None, bool, bool]]:
    """Of each experiment: the share that passed, whether a trial failed, whether one ended in an error."""
    made: list[tuple[float | None, bool, bool]] = []
    for experiment in range(len(run.experiments)):
        found = [odd_trial(run, run.ordinal(place, experiment, repeat)) for repeat in range(run.repeats)]
        stored = [one for one in found if one is not None]
        verdicts = [one.score is not None and one.score.passed for one in stored]
        failed = any(one.score is not None and not one.score.passed for one in stored)
        share = sum(verdicts) / len(verdicts) if verdicts else None
        made.append((share, failed, any(one.score is None for one in stored)))
    return made


EXPECTED: dict[str, Callable[[Any], bool]] = {
    "": lambda found: True,
    "differ": lambda found: len({(share, error) for share, _, error in found if share is not None}) > 1,
    "worse": lambda found: found[0][0] is not None and any(s is not None and s < found[0][0] for s, _, _ in found[1:]),
    "better": lambda found: found[0][0] is not None and any(s is not None and s > found[0][0] for s, _, _ in found[1:]),
    "failed": lambda found: any(failed for _, failed, _ in found),
    "errors": lambda found: any(error for _, _, error in found),
}


@pytest.mark.parametrize("show", EXPECTED)
@pytest.mark.parametrize("names", [NAMES, ("e3", "e1"), ("e2",)], ids=len)
def test_rows_are_chosen_by_what_came_of_their_trials(odd: Viewed, show: str, names: tuple[str, ...]) -> None:
    run = odd.store.get_run("odd-run")
    columns = open_columns_of(odd.store, run)
    matrix = Matrix([(columns, name) for name in names])
    numbers = [run.experiments.index(name) for name in names]
    expected = []
    for place in range(SIZE):
        found = [cells(run, place)[number] for number in numbers]
        if any(share is not None for share, _, _ in found) and EXPECTED[show](found):
            expected.append(place)
    question = MatrixQuestion((), show)
    assert matrix.rows(question).tolist() == expected
    assert matrix.counts(question, [show]) == {show: len(expected)}
    assert expected or len(names) == 1


def test_pages_show_every_row_once_forwards_and_backwards(odd: Viewed) -> None:
    matrix = Matrix([(open_columns_of(odd.store, odd.store.get_run("odd-run")), "e0")])
    seen: list[int] = []
    page = matrix.page(MatrixQuestion(()))
    starts = [0]
    while True:
        assert (page.first, page.total) == (len(seen) + 1, matrix.rows(MatrixQuestion(())).size)
        seen += page.rows
        if page.next is None:
            break
        starts.append(page.next)
        page = matrix.page(_at(page.next))
    assert seen == matrix.rows(MatrixQuestion(())).tolist()
    assert page.previous is not None
    assert matrix.page(_at(page.previous)).rows == tuple(seen[ROWS : 2 * ROWS])
    assert matrix.page(_at(10**9)).rows == ()


def _at(row: int) -> MatrixQuestion:
    return read_matrix_question([("from", str(row))])[0]


def test_a_question_is_its_address() -> None:
    pairs = [("c", "odd@1:e0"), ("c", "odd@2"), ("show", "worse"), ("repeat", "1"), ("length", "1500"),
             ("m.kind", "refund"), ("m.kind", "address"), ("q", "x"), ("from", "7")]  # fmt: skip
    question, complaints = read_matrix_question(pairs)
    assert (question.pairs(), complaints) == (pairs, [])
    question, complaints = read_matrix_question([("a", "s:x"), ("b", "s:y"), ("show", "bad"), ("length", "9")])
    assert question == MatrixQuestion(("s:x", "s:y"))
    assert complaints == ["show must be one of differ, worse, better, failed, errors, outputs (got 'bad')"]


def test_outputs_stand_side_by_side_with_verdicts_links_and_marks(viewed: Viewed) -> None:
    text = viewed.get("matrix?c=support@2").text
    row = row_of(text, "q03")
    assert 'class="row differs"' in "<tr " + row
    assert "failed 0.250" in plain(row)
    assert "passed 1.000 better" in plain(row)
    assert "not what was asked for" in row
    assert "Order 3 <mark>was never seen, </mark>says <mark>baseline.</mark>" in row
    assert "Order 3 <mark>arrives on Friday, </mark>says <mark>careful.</mark>" in row
    assert f'href="./support@2/t/careful/q03?o={3 * 2 + 1}"' in row
    error = row_of(text, "q09")
    assert plain(error).count("task error") == 2
    assert "ValueError: no such order" in error
    assert "same text" in error
    assert "24 passed, 12 failed, 4 errors" in plain(text)
    assert "compare?a=support%402%3Abaseline&amp;b=support%402%3Acareful" in text
    assert rows_of(text) == [f"q{place:02}" for place in range(25)]
    assert rows_of(viewed.get("matrix?c=support@2&from=25").text)[0] == "q25"


def test_filters_by_metadata_verdict_text_and_output_add_up(viewed: Viewed) -> None:
    assert rows_of(viewed.get("matrix?c=support@2&m.kind=delivery&show=worse").text) == ["q10", "q25"]
    assert rows_of(viewed.get("matrix?c=support@2&show=worse").text) == ["q05", "q10", "q20", "q25", "q35"]
    found = viewed.get("matrix?c=support@2&q=order+3?").text
    assert rows_of(found) == ["q03"]
    assert "1 hit in 40 samples of 40 searched" in plain(found)
    assert rows_of(viewed.get("matrix?c=support@2&q=NEVER+SEEN,+says+careful&m.kind=delivery").text) == ["q10", "q25"]
    differing = viewed.get("matrix?c=support@2&show=outputs").text
    assert "q09" not in rows_of(differing)
    on = re.search(r'rel="next" href="\./([^"]+)">search on', differing)
    assert on is not None
    assert "q39" not in rows_of(viewed.get(html.unescape(on[1])).text)
    assert "No sample fits" in viewed.get("matrix?c=support@2&m.kind=none").text


def test_experiments_of_other_runs_are_found_by_the_ids_of_samples(odd: Viewed) -> None:
    text = odd.get("matrix?c=odd@1:e0&c=odd@2").text
    for name in ("q00", "q07", "q20"):
        assert f"turned {name}" in row_of(text, name)
    last = odd.get("matrix?c=odd@1:e0&c=odd@2&from=48").text
    assert "turned q49" in row_of(last, "q49")
    assert "no result" in row_of(last, "q50")
    turned = odd.get("matrix?c=odd@2&c=odd@1:e0").text
    assert rows_of(turned)[:2] == ["q49", "q48"]
    assert "turned q48" in row_of(turned, "q48")


def test_the_first_column_is_what_the_others_are_compared_with(odd: Viewed) -> None:
    text = odd.get("matrix?c=odd@1:e5&c=odd@1:e2").text
    head = text.partition("<thead>")[2].partition("</thead>")[0]
    assert re.findall(r'class="who">(\w+)<', head) == ["e5", "e2"]
    first = re.search(r'href="\./([^"]+)" aria-label="make odd@1:e2 the first', head)
    assert first is not None
    again = odd.get(html.unescape(first[1])).text
    assert re.findall(r'class="who">(\w+)<', again.partition("<thead>")[2].partition("</thead>")[0]) == ["e2", "e5"]
    boxes = re.findall(r'name="c" value="([^"]+)" checked', again)
    assert boxes == ["odd@1:e2", "odd@1:e5"]  # The form keeps the order.


def test_repeats_are_counted_linked_and_chosen(odd: Viewed) -> None:
    run = odd.store.get_run("odd-run")
    place = next(at for at in range(6, 25) if {one.score.passed for one in both(run, at) if one.score} == {True, False})
    results = both(run, place)
    text = odd.get("matrix?c=odd@1:e0").text
    row = row_of(text, f"q{place:02}")
    assert f"1 of {len(results)} passed" in plain(row)
    assert 'aria-label="repeat 1: ' in row
    shown = "passed" if results[0].score and results[0].score.passed else "failed"
    assert f"{shown} {float(shown == 'passed'):.3f} #0" in plain(row)
    other = row_of(odd.get("matrix?c=odd@1:e0&repeat=1").text, f"q{place:02}")
    assert f"{'failed' if shown == 'passed' else 'passed'} {float(shown != 'passed'):.3f} #1" in plain(other)


def both(run: RunRecord, place: int) -> list[EvalResult]:
    found = [odd_trial(run, run.ordinal(place, 0, repeat)) for repeat in (0, 1)]
    return [one for one in found if one is not None] if None not in found else []


def test_odd_outputs_are_shown_safely_and_cut(odd: Viewed) -> None:
    answer = odd.get("matrix?c=odd@1")
    assert len(answer.text) < 400_000
    assert ARABIC in row_of(answer.text, "q00")
    assert 'dir="auto"' in row_of(answer.text, "q00")
    long = row_of(answer.text, "q01")
    assert "x" * 400 in long
    assert "x" * 401 not in long
    assert ">more</a>" in long
    assert "same beginning" in long
    assert "same text" not in long
    assert "&lt;script&gt;hit=1" in row_of(answer.text, "q02")
    assert "<script>hit" not in answer.text
    assert "no output" in row_of(answer.text, "q04")
    assert "&lt;b&gt;no&lt;/b&gt;" in answer.text
    assert "x" * 1_500 in odd.get("matrix?c=odd@1:e0&length=1500").text


def test_columns_are_limited_and_missing_ones_explained(odd: Viewed) -> None:
    text = odd.get("matrix?c=odd@1&c=odd@2").text
    assert text.count('scope="col"') == 1 + MOST_COLUMNS
    assert odd.get("matrix").status == 404
    assert "matrix?c=support@3" in odd.get("matrix").text
    assert "did you mean odd@1:e6" in plain(odd.get("matrix?c=odd@1:e66").text)
    assert odd.get("matrix?c=odd@1:e1&show=nonsense&from=x").status == 200


def test_a_running_run_shows_what_is_there(viewed: Viewed) -> None:
    text = viewed.get("matrix?c=endless@1").text
    assert len(rows_of(text)) == 10
    assert 'data-live="./endless@1/live"' in text
    assert "passed," not in text.partition("<thead>")[2].partition("</thead>")[0]


def test_the_matrix_is_reached_from_lists_reports_and_comparisons(viewed: Viewed) -> None:
    assert 'href="./matrix?c=support%402"' in viewed.get().text
    assert 'href="./matrix?c=support%402"' in viewed.get("support@2").text
    assert 'href="../matrix?c=support%402"' in viewed.get("support@2/trials").text
    assert 'href="../../../matrix?c=support%402&amp;from=3"' in viewed.get("support@2/t/careful/q03").text
    both_sides = urlencode([("c", "support@2:baseline"), ("c", "support@2:careful")])
    page = viewed.get("compare?a=support@2:baseline&b=support@2:careful").text
    assert f'href="./matrix?{html.escape(both_sides)}"' in page


def test_reviewers_see_no_matrix(odd: Viewed) -> None:
    reviewer = open_session(odd.server, "rev")
    answer = odd.get("matrix?c=odd@1", Cookie=reviewer)
    assert (answer.status, answer.text) == (403, "this session is for reviews only\n")


def test_texts_that_have_little_in_common_are_not_marked() -> None:
    texts = ["the order is late", "the order is lost", "no", "the order is late", None]
    first, near, far, same, missing = _marked(texts, math.inf)
    assert [part.changed for part in first[0]] == [False]
    assert [part.text for part in near[0] if part.changed] == ["lost"]
    assert (far[1], [part.changed for part in far[0]]) == ("other text", [False])
    assert (same[1], missing[1]) == ("same text", "")
    assert [remark for _, remark in _marked(texts, 0.0)] == ["", "not marked", "not marked", "same text", ""]
    before, after = _marked(texts[:2], math.inf)
    assert [part.text for part in before[0] if part.changed] == ["late"]
    assert [part.text for part in after[0] if part.changed] == ["lost"]


def test_rows_that_differ_are_those_of_the_filter(odd: Viewed) -> None:
    for names in ("c=odd@1:e0&c=odd@1:e3", "c=odd@1:e0&c=odd@1:e2", "c=odd@1"):
        every = odd.get(f"matrix?{names}").text
        marked = [name for name in rows_of(every) if 'class="badge">differs' in row_of(every, name)]
        kept = rows_of(odd.get(f"matrix?{names}&show=differ").text)
        assert marked == [name for name in kept if name <= "q24"]


def test_every_choice_of_rows_is_offered(odd: Viewed) -> None:
    text = odd.get("matrix?c=odd@1").text
    offered = re.findall(r'<option value="(\w*)"', text.partition('name="show"')[2].partition("</select>")[0])
    assert offered == list(SHOWS)


@pytest.mark.long
def test_a_page_of_a_hundred_thousand_samples_is_quick_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = open_store(path)
    size, made = 100_000, 100
    run = store.create_run(record("large", size=size))
    store.commit(run.run_id, [trial(run, ordinal) for ordinal in range(2 * made)], support_samples(made))
    with closing(sqlite3.connect(path)) as connection, connection:
        for table, step in (("results", 2 * made), ("details", 2 * made), ("samples", made)):
            copy_rows(connection, table, step, size // made)
    store.update_run(run.run_id, status="finished", finished_at=1010.0)
    server, thread = start_server(path, user="me")
    viewed = Viewed(server, store, open_session(server))
    viewed.get("matrix?c=support@1")  # Builds the columns.
    for query in ("", "&show=differ&from=99000", "&show=worse&m.kind=delivery", "&from=50000"):
        began = time.process_time()
        answer = viewed.get(f"matrix?c=support@1{query}")
        assert (answer.status, time.process_time() - began < 2) == (200, True), query
        assert len(rows_of(answer.text)) == ROWS, query
    server.stop()
    thread.join(60)
    store.close()


def copy_rows(connection: sqlite3.Connection, table: str, step: int, times: int) -> None:
    """Repeat the rows of a table with other ordinals: the samples of the copies have other ids."""
    names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    changed = {
        "ordinal": f"old.ordinal + n * {step}",
        "execution": f"old.execution + n * {step}",
        "sample": f"old.sample + n * {step // 2}",
        "id": "old.id || '-' || n",
        "transcript": "NULL",
    }
    values = ", ".join(changed.get(name, f"old.{name}") for name in names)
    counted = f"WITH RECURSIVE count(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count WHERE n < {times - 1}) "
    connection.execute(f"INSERT INTO {table} {counted} SELECT {values} FROM count, {table} AS old")
