"""Comparisons as shown, samples that changed, and trials that were repeated."""

from __future__ import annotations

import importlib.util
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy
from rich.console import Console

from fairtrial import (
    Dataset,
    EvalConfig,
    EvalReport,
    EvalResult,
    EvalSuite,
    Metric,
    Sample,
    Score,
    TrialKey,
    compare,
    exact_match,
    gate,
    leaderboard,
    open_store,
    plan,
)
from fairtrial.base import formatting
from fairtrial.cli import command_show as screen
from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.fleet import EvalLoop, EvalReply, EvalRequest, collect_results, submit_dataset
from fairtrial.mailbox.memory import InMemoryMailbox
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.pairing import pair
from fairtrial.reports.figures.columns import Columns, SampleContents, compare_contents
from fairtrial.reports.render import terminal
from fairtrial.reports.render.renderable import Renderable
from fairtrial.reports.render.safe_text import executions_text
from fairtrial.store.schema import samples as samples_table
from fairtrial.viewer.pages.trial import _facts
from tests.figures import Figure
from tests.reports.browser import Browser
from tests.reports.made import FAIL, HOSTILE, PASS, TASK_ERROR, Made, hostile_report, made_report
from tests.reports.test_formats import read

# Comparisons and gates as they are shown: several candidates, slices, undefined differences, hostile names.


def three(**changes: Any) -> EvalReport:
    share = {"plain": 10, "terse": 3, "kind": 9}

    def trial(place: int, experiment: str, repeat: int) -> Made:
        if place == 7 and experiment == "terse":
            return TASK_ERROR
        value = 1.0 if place % share[experiment] else 0.0
        return Made(
            value, reason=f"because of {place}", output=f"{experiment} says", metrics=(Metric("cost", 50.0 + place),)
        )

    options: dict[str, Any] = {"samples": 60, "experiments": ("plain", "terse", "kind")}
    return made_report(trial, **{**options, **changes})


def flat(said: Renderable) -> str:
    return " ".join(str(said).split())


def test_several_candidates_stand_below_each_other_under_their_names() -> None:
    report = three()
    compared = compare(report["plain"], report["terse"], report["kind"], metrics=None)
    text = str(compared)
    assert text.splitlines()[0] == "support@1: 2 candidates against plain"
    assert re.search(r"^terse\n  passed .*\n  cost .*\nkind\n  passed ", text, re.MULTILINE)
    assert text.count("60 samples on both sides; none is on one side only") == 1
    assert re.search(r"Adjusted p-values allow for \d tests made together\.", str(compared.in_detail()))
    page = read(compared.to_html()).text
    assert "Lost by terse: " in page
    assert "Wins and losses, passed: kind" in page
    assert "because of 3" in page
    assert "task error: ValueError: no" in page


def test_samples_of_a_metric_without_a_declared_direction_are_not_won_or_lost() -> None:
    def trial(place: int, experiment: str, _: int) -> Made:
        shift = 0 if experiment == "plain" else 1 if place % 3 else -1
        return Made(1.0, metrics=(Metric("words", 50.0 + place + shift), Metric("marks", 1.0, higher_is_better=True)))

    report = made_report(trial, samples=30, experiments=("plain", "terse"))
    alone = compare(report["plain"], report["terse"], metrics=["words"])
    assert re.search(r"\| metric .*\| higher \| lower \| tied \|", alone.to_markdown())
    assert "Higher and lower, words" in read(alone.to_html()).text
    mixed = compare(report["plain"], report["terse"], metrics=["words", "marks"]).to_markdown()
    assert re.search(r"\| words .*\| 20 higher \| 10 lower \| 0 \|", mixed)
    assert re.search(r"\| marks .*\| 0 \| 0 \| 30 \|", mixed)


def test_the_title_of_a_comparison_of_two_runs_names_runs_and_experiments() -> None:
    before = three()
    after = three(run_id="run0000002", store=before.store)
    assert str(compare(before["plain"], after["plain"])).splitlines()[0] == "support@2:plain against support@1:plain"
    assert str(compare(before["plain"], after["terse"])).splitlines()[0] == "support@2:terse against support@1:plain"


def test_five_candidates_of_which_nothing_can_be_told_take_half_a_screen_at_80_columns() -> None:
    names = tuple(f"model-{number}" for number in range(6))
    report = made_report(lambda place, name, _: Made(float(place % 2 == 0)), samples=40, experiments=names)
    compared = compare(*(report[name] for name in names))
    lines = str(compared).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    said = "passed: no detectable difference between model-0 and model-1, model-2, model-3, model-4, model-5."
    assert said in flat(compared)
    assert len(re.findall("passed: no detectable difference", str(compared.in_detail()))) == 5


def test_every_difference_has_its_interval_counts_and_both_kinds_of_errors() -> None:
    report = three()
    compared = compare(report["plain"], report["terse"])
    text = str(compared)
    assert re.search(r"passed +90\.0% +65\.0% +-25\.0 +-\d+\.\d to -\d+\.\d ", text)
    assert "Trials" not in text
    detailed = str(compared.in_detail())
    assert re.search(r"passed +60 +0\.00\d ", detailed)
    assert re.search(r"terse +run0000001 +60 +60 +59 +1 +0", detailed)
    assert "on the 59 pairs scored on both sides" in flat(compared.in_detail())
    assert len(text.splitlines()) < 0.6 * len(detailed.splitlines())


def test_slices_are_in_the_table_and_in_the_plot_of_wins_and_losses() -> None:
    report = three(metadata=lambda place: {"topic": "even" if place % 2 == 0 else "odd"})
    compared = compare(report["plain"], report["terse"], slice_by="topic", metrics=["passed", "cost"])
    text = terminal.as_text(compared.document(0), width=140)
    assert re.search(r"^  topic = even +30 ", text, re.MULTILINE)
    page = compared.to_html()
    assert "Wins and losses by slice, passed" in page
    plot = page[page.index("Wins and losses by slice") :]
    assert "topic = odd: " in plot[: plot.index("</desc>")]
    both = compare(report["plain"], report["terse"], report["kind"], slice_by="topic")
    assert "Slices of kind" in str(both)


def test_samples_on_one_side_only_are_counted() -> None:
    small = made_report(lambda *_: PASS, samples=10)
    large = made_report(lambda *_: PASS, samples=14, name=lambda place: f"sample-{place + 2:02d}")
    assert "8 samples on both sides; 2 only in the baseline and 6 only in the candidate are left out" in flat(
        compare(small, large)
    )


def test_where_nothing_can_be_compared_every_figure_is_a_dash() -> None:
    report = made_report(lambda *_: PASS, samples=3)
    other = made_report(lambda *_: PASS, samples=3, name="other-{}".format)
    compared = compare(report, other)
    text = str(compared)
    assert re.search(r"passed +- +- +- +- +- +0 +0 +0$", text, re.MULTILINE)
    assert "cannot be compared" in flat(compared)
    assert "no sample in common" in flat(compared)
    assert "<svg" in compared.to_html()


def test_a_comparison_of_numbers_alone_shows_all_but_the_samples() -> None:
    sides = [Columns.of({"value": [0.1 * place for place in range(9)], "passed": [1] * 9}, name=name) for name in "ab"]
    page = compare_columns(sides[0], [sides[1]], metrics=["value"]).to_html()
    assert "b against a" in page
    assert "Lost" not in page
    assert "<h2>Scores" not in page


def test_repeats_of_a_flipped_sample_are_read_side_by_side() -> None:
    report = made_report(
        lambda place, name, repeat: PASS if name == "a" or (place + repeat) % 3 else FAIL,
        samples=12,
        repeats=2,
        experiments=("a", "b"),
    )
    page = read(compare(report["a"], report["b"]).to_html()).text
    assert "candidate, repeat 1" in page


def test_margins_of_graded_metrics_and_ceilings_are_rules_in_words() -> None:
    report = three()
    rules = {"floors": {"value": 0.1}, "ceilings": {"cost": 200.0}, "margins": {"value": 0.05}}
    result = gate(report["terse"], rules, report["plain"])
    text = terminal.as_text(result.document(0), width=120)
    assert "value at least 0.100" in text
    assert "cost at most 200.0" in text
    assert "value at most 0.050 worse" in text
    shown = io.StringIO()
    Console(file=shown, width=100).print(result)
    assert "value at most 0.050 worse" in shown.getvalue()


def test_a_rule_about_nothing_is_open_and_its_figures_are_dashes() -> None:
    report = made_report(lambda *_: TASK_ERROR, samples=3)
    result = gate(report, {"floors": {"value": 0.5}})
    assert "<table>" in result._repr_html_()
    assert gate(made_report(lambda *_: None, samples=3), {"min_pass_rate": 0.5}).status == "inconclusive"
    assert re.search(
        r"passed at least 50\.0% +inconclusive +- +- +0",
        str(gate(made_report(lambda *_: None, samples=3), {"min_pass_rate": 0.5})),
    )


@pytest.mark.parametrize("render", ["to_html", "_repr_html_", "to_markdown", "__str__"])
def test_hostile_names_are_text(render: str) -> None:
    report = hostile_report(samples=40)
    first, second = report.experiments
    compared = compare(report[first], report[second], slice_by="topic", metrics=None)
    decided = gate(report[first], {"min_pass_rate": 0.5, "margin": 0.1}, report[second])
    for said in (compared, decided):
        text = getattr(said, render)()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202e]", text)
        if "html" in render:
            tags = {tag for tag, _ in read(text).tags}
            assert not tags & {"script", "img", "a", "iframe", "b"}, sorted(tags)


def test_a_comparison_in_a_real_browser_fetches_nothing(tmp_path: Path) -> None:
    report = hostile_report(samples=12)
    first, second = report.experiments
    with Browser(tmp_path) as browser:
        dom = browser.open(compare(report[first], report[second], slice_by="topic").to_html())
        assert browser.requests == []
    assert HOSTILE[:39] in read(dom).text
    assert "<title>owned" not in dom


class TestWords:
    @pytest.mark.parametrize(
        ("value", "shown"),
        [(None, "-"), (0.0, "0.0%"), (0.0001, "<0.1%"), (0.9999, ">99.9%"), (1.0, "100.0%"), (0.12345, "12.3%")],
    )
    def test_rates(self, value: float | None, shown: str) -> None:
        assert formatting.rate(value) == shown

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (None, "-"), (0.0, "0.000"), (1e-5, "1.00e-05"), (0.5, "0.500"), (123.45, "123.5"), (54321.0, "54,321"),
            (2e9, "2.00e+09"),
        ],
    )  # fmt: skip
    def test_numbers(self, value: float | None, shown: str) -> None:
        assert formatting.number(value) == shown

    def test_a_sentence_does_not_write_out_hundreds_of_digits(self) -> None:
        assert formatting.mean_text(5.61e299, percent=False) == "5.61e+299"
        assert formatting.mean_text(1e9 + 2, percent=False) == "1,000,000,002"

    @pytest.mark.parametrize(
        ("value", "percent", "shown"),
        [
            (None, True, "-"), (0.051, True, "+5.1"), (-0.051, True, "-5.1"), (-1e-9, True, "0.0"),
            (0.0, False, "0.000"), (1e-5, False, "+1.00e-05"), (12.34, False, "+12.3"), (-4321.0, False, "-4,321"),
        ],
    )  # fmt: skip
    def test_differences(self, value: float | None, percent: bool, shown: str) -> None:
        assert formatting.signed(value, percent=percent) == shown

    def test_times_money_and_p_values(self) -> None:
        assert [formatting.duration(value) for value in (None, 12, 999.7, 61_000, 180_000)] == [
            "-", "12 ms", "1.0 s", "61.0 s", "3.0 min",
        ]  # fmt: skip
        assert [formatting.money(value) for value in (None, 0.01, 1234.5)] == ["-", "$0.0100", "$1,234.50"]
        assert [formatting.p_value(value) for value in (None, 1e-9, 0.04)] == ["-", "<0.001", "0.040"]
        assert (formatting.level(0.95), formatting.level(0.999)) == ("95%", "99.9%")


# Samples are pairs if their id means the same on both sides: the same input and the same expected value.


def report(
    passed: Sequence[bool],
    *,
    inputs: Mapping[int, Any] | None = None,
    expected: Mapping[int, Any] | None = None,
    topics: int = 1,
    known: bool = True,
    experiment: str = "baseline",
) -> EvalReport:
    results = []
    for place, value in enumerate(passed):
        asked = {"question": place, "of": "a form"} | (inputs or {}).get(place, {})
        sample = Sample(f"q{place}", asked, (expected or {}).get(place, "yes"), {"topic": place % topics})
        key = TrialKey("r", experiment, sample.id)
        given: dict[str, Any] = {"sample": sample} if known else {"sample_id": sample.id}
        results.append(EvalResult(key=key, ordinal=0, outcome="scored", score=Score(float(value)), **given))
    return EvalReport(results=results, dataset_name="data")


SAME = [True] * 180 + [False] * 20


def test_ids_that_mean_other_questions_are_no_pairs_and_a_gate_cannot_pass_on_them() -> None:
    old = report(SAME)
    new = report([True] * 200, inputs={place: {"question": -1 - place} for place in range(200)})
    found = gate(new, {"margin": 0.02}, baseline=old)
    assert (found.status, found.exit_code) == ("inconclusive", 3)
    assert "no sample in common" in found.reasons[0]
    compared = compare(old, new).candidates[0]
    assert (compared.matched, compared["passed"].n, compared.verdict) == (0, 0, "unknown")
    assert "they have no sample in common" in compared["passed"].sentence
    said = "Changed between the sides: the input of 200 samples (q0, q1, q2 and 197 more)."
    assert any(said in line for line in compared.warnings)


def test_changed_samples_are_named_by_what_changed_and_left_out_of_every_figure() -> None:
    old = report(SAME)
    new = report(SAME, inputs={7: {"of": "a letter"}, 9: {"of": "a letter"}}, expected={9: "no", 4: "no"})
    found = compare(old, new)
    one = found.candidates[0]
    assert (one.matched, one["passed"].n, one["passed"].missing) == (197, 197, 3)
    assert one.changed is not None
    assert (one.changed.inputs, one.changed.expected) == (2, 1)
    assert (one.changed.input_ids, one.changed.expected_ids) == (("q7", "q9"), ("q4",))
    text = " ".join(str(found).split())
    assert "197 samples on both sides; none is on one side only; 3 changed between the sides" in text
    assert "the input of 2 samples (q7, q9) and the expected value of 1 sample (q4). Changed samples are not" in text
    assert found.to_json()["candidates"][0]["changed"] == {  # type: ignore[index, call-overload]
        "inputs": 2, "expected": 1, "input_ids": ["q7", "q9"], "expected_ids": ["q4"],
    }  # fmt: skip


def test_changed_samples_are_taken_at_their_worst_by_as_good_as_and_by_gates() -> None:
    old = report([True] * 400)
    few, many = (dict.fromkeys(range(size), "no") for size in (2, 18))
    for changed, verdict, status in ((few, "as good as", "pass"), (many, "no detectable difference", "inconclusive")):
        new = report([True] * 400, expected=changed)
        found = compare(old, new).candidates[0]["passed"]
        assert (found.verdict, found.missing) == (verdict, len(changed))
        gated = gate(new, {"margin": 0.05}, baseline=old)
        assert (gated.status, gated.checks[0].missing) == (status, len(changed))
        assert f"whatever the {len(changed)} missing would have been" in gated.checks[0].reason


def test_a_gate_says_how_many_changed_samples_are_too_many() -> None:
    new = report([True] * 200, expected=dict.fromkeys(range(30), "no"))
    reason = gate(new, {"margin": 0.02}, baseline=report([True] * 200)).reasons[0]
    assert "30 changed samples are among them. Run both sides on the same data." in reason


def test_a_slice_counts_the_changed_samples_that_belong_to_it() -> None:
    old, new = report(SAME, topics=4), report(SAME, topics=4, expected={1: "no", 5: "no"})
    found = compare(old, new, slice_by="topic").candidates[0]
    assert [part["passed"].n for part in found.slices] == [50, 48, 50, 50]
    assert [part["passed"].missing for part in found.slices] == [0, 2, 0, 0]


def test_other_metadata_other_samples_and_another_order_of_keys_change_nothing() -> None:
    old = report(SAME)
    new = report([*SAME, True], topics=3, inputs={3: {"of": "a form", "question": 3}})
    found = compare(old, new).candidates[0]
    assert (found.matched, found.changed, found.only_candidate) == (200, None, 1)
    assert not any("must mean the same" in line for line in found.warnings)
    first = report([True], expected={0: {"a": 1, "b": [2]}})
    assert compare(first, report([True, False], expected={0: {"b": [2], "a": 1}})).candidates[0].matched == 1


def test_samples_whose_inputs_are_not_known_are_paired_by_id_and_that_is_said() -> None:
    found = compare(report(SAME), report(SAME, known=False)).candidates[0]
    assert (found.matched, found.changed) == (200, None)
    assert any("the inputs of 200 samples are not stored: an id must mean the same" in line for line in found.warnings)


def test_a_leaderboard_leaves_changed_samples_out_and_allows_for_them() -> None:
    old = report([True] * 400, experiment="old")
    for changed, verdict in ((4, "as good as"), (30, "no detectable difference")):
        new = report([True] * 400, expected=dict.fromkeys(range(changed), "no"), experiment="new")
        found = leaderboard(old, new, baseline="old")
        suite = found.suites[0]
        assert (found.n, suite.missing, suite.changed and suite.changed.expected) == (400 - changed, changed, changed)
        assert any(f"the expected value of {changed} samples (q0, q1, q2 and " in line for line in found.warnings)
        against = found["new"].against_baseline
        assert against is not None
        assert against.verdict == verdict


def test_a_plan_does_not_learn_from_changed_samples() -> None:
    old, unequal = report(SAME), (*range(20), *range(180, 200))
    unchanged, changed = (
        report(SAME[::-1], inputs={place: {"of": form} for place in unequal}) for form in ("a form", "a letter")
    )
    few, many = plan(old, changed).samples, plan(old, unchanged).samples
    assert few is not None
    assert many is not None
    assert 2 * few < many


@pytest.mark.parametrize("address", ["memory:", "file"])
def test_runs_of_stores_are_compared_by_content_even_from_before_inputs_were_hashed(
    address: str, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "runs.db") if address == "file" else address)
    saved = []
    for made in (report(SAME), report(SAME, inputs={8: {"of": "a letter"}}, expected={2: {"a": 1}})):
        run = store.create_run(made.run)
        results = list(made.store.results(run.run_id))
        store.commit(run.run_id, results, dict(made.store.samples(run.run_id)))
        saved.append(EvalReport(store, store.get_run(run.run_id)))
    assert pairs_of(*saved) == (198, ("q8",), ("q2",))
    if address == "file":
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'runs.db'}")
        with engine.begin() as connection:
            first = sqlalchemy.select(sqlalchemy.func.min(samples_table.c.dataset)).scalar_subquery()
            connection.execute(samples_table.update().where(samples_table.c.dataset == first).values(input_hash=None))
        assert pairs_of(*saved) == (198, ("q8",), ("q2",))
    store.close()


def pairs_of(old: EvalReport, new: EvalReport) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    found = compare(old, new).candidates[0]
    assert found.changed is not None
    return found.matched, found.changed.input_ids, found.changed.expected_ids


def test_what_is_unknown_differs_from_nothing() -> None:
    sides = [[1, UNKNOWN, 3, UNKNOWN], [1, 2, UNKNOWN, UNKNOWN], [1, 5, 3, UNKNOWN]]
    contents = [SampleContents(lambda row=row: (np.array(row), np.full(4, 0))) for row in sides]  # type: ignore[misc]
    found = compare_contents(contents)
    assert found.inputs.tolist() == [False, True, False, False]
    assert found.unknown == 2


def test_contents_are_not_read_for_runs_of_one_dataset() -> None:
    def never() -> Any:
        raise AssertionError("read")

    sides = [
        Columns("a", ["x"], 1, np.ones((1, 1), dtype=np.int8), {}, fingerprint="f", contents=SampleContents(never))
        for _ in range(2)
    ]
    assert pair(*sides).matched == 1


# Why a trial was executed again, as `show` and the viewer say it.


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def said(report: Any) -> list[str]:
    """What the screens say about each trial; both say the same."""
    texts = []
    for result in report.results:
        facts = dict(_facts(report.run, result))
        assert facts.get("repeated", "") == executions_text(result)
        assert not [name for name in facts if "earlier_attempts" in name or "deliveries" in name]
        texts.append(executions_text(result))
    return texts


async def test_retries_and_retried_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fairtrial.trials.run_trial.retry_pause", lambda failures, retry_after: 0.0)
    failures = tmp_path / "failures"

    async def unsteady(given: int) -> int:
        left = int(failures.read_text())
        if left:
            failures.write_text(str(left - 1))
            raise ConnectionError("away")
        return given

    data = Dataset([Sample("1", 1, 1)])
    store = open_store("memory:")
    failures.write_text("2")
    report = await EvalSuite("a", data, unsteady, exact_match, config=EvalConfig(max_retries=2)).run(store=store)
    assert said(report) == ["2 retries after an error or a timeout (max_retries)"]

    failures.write_text("1")
    suite = EvalSuite("b", data, unsteady, exact_match)
    assert said(await suite.run(store=store)) == [""]
    again = await suite.run(store=store, resume="errors")
    assert said(again) == [
        "1 attempt in an earlier execution that ended in an error (--resume errors, or a resumed run)"
    ]
    assert again.pass_rate == 1.0


async def test_a_request_that_was_delivered_again_leaves_a_trace() -> None:
    requests, results = InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply)
    loop = EvalLoop(loop=lambda given: given, evaluator=exact_match, requests=requests, results=results)
    await submit_dataset(Dataset([Sample("1", 1, 1), Sample("2", 2, 2)]), requests)
    (first,) = await requests.receive(1, 60, 1)
    await first.nack(0)
    await loop.run(until_empty=True)
    report = await collect_results(results, 2, timeout_seconds=20)
    again = first.body.sample.id
    assert {result.sample_id: executions_text(result) for result in report.results} == {
        again: "its request was delivered 2 times (a worker stopped, lost its lease or handed it back)",
        {"1": "2", "2": "1"}[again]: "",
    }
    assert len(said(report)) == 2


def test_a_result_that_does_not_say_why_is_not_explained() -> None:
    made = EvalResult(key=TrialKey("r", "e", "1", 0), ordinal=0, outcome="timeout", attempt=3)
    assert executions_text(made) == ""
    assert "attempt 3" in screen._timing(made)


# Two large runs are compared quickly and in little memory, from the store to the verdicts.


path = Path(__file__).parents[2] / "benchmarks" / "compare.py"
spec = importlib.util.spec_from_file_location("compare_benchmark", path)
assert spec is not None
assert spec.loader is not None
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


@pytest.mark.measured
def test_a_hundred_thousand_samples_and_ten_metrics_are_compared_in_seconds(
    tmp_path: Path, child: Any, figure: Figure
) -> None:
    where = str(tmp_path / "runs.db")
    store = open_store(where)
    for run_id, lift in (("one", 0.0), ("other", 0.01)):
        benchmark.fill(store, run_id, samples=100_000, metrics=10, repeats=1, lift=lift)
    store.close()
    found = json.loads(child(benchmark.MEASURE, where, "[]"))
    assert (found["matched"], found["metrics"]) == (100_000, 12)
    assert "better" in found["verdicts"]
    figure("compare 100,000 samples, 10 metrics: seconds", found["seconds"], at_most=15)
    figure("compare 100,000 samples, 10 metrics: MB of memory", found["grown_mb"], at_most=400)
