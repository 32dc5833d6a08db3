"""What a report says first: a row for each experiment, how they compare, the worst trials, what to do next."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from fairtrial import EvalReport, GateRules, TokenUsage, compare, gate
from fairtrial.errors import ConfigurationError
from fairtrial.reports.render import terminal
from fairtrial.reports.render.document import TrialGroups
from fairtrial.reports.report.answer import without_output
from fairtrial.scoring.score import Metric
from tests.reports.made import FAIL, PASS, TASK_ERROR, Made, made_report

SCREENS = Path(__file__).parent.parent / "cli" / "golden"


def words(text: object) -> str:
    return " ".join(str(text).split())


def answered(output: str, reason: str, value: float = 0.0) -> Made:
    return Made(value, output=output, reason=reason, passed=False)


def drawn(rates: dict[str, float], *, seed: int, samples: int = 60, errors: float = 0.0, **options: Any) -> EvalReport:
    rng = random.Random(seed)

    def trial(place: int, experiment: str, repeat: int) -> Made | None:
        if rng.random() < errors:
            return TASK_ERROR if rng.random() < 0.7 else Made(None, "scorer_error", error="judge down")
        return PASS if rng.random() < rates[experiment] else FAIL

    return made_report(trial, samples=samples, experiments=tuple(rates), **options)


def test_two_experiments_of_the_demo_fit_on_25_lines_of_80_columns() -> None:
    _, *lines, _ = (SCREENS / "run.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 25
    assert max(map(cell_len, lines)) <= 80
    assert any(line.startswith("passed: ") for line in lines)
    assert sum(line.startswith("  fairtrial ") for line in lines) == 3


@pytest.mark.parametrize("seed", range(12))
def test_the_sentence_is_the_verdict_of_compare(seed: int) -> None:
    rng = random.Random(seed)
    rates = {name: rng.choice([0.3, 0.6, 0.9]) for name in ["old", "new", "other"][: rng.choice([2, 3])]}
    report = drawn(
        rates, seed=seed, samples=rng.choice([4, 40, 120]), errors=rng.choice([0, 0.2]), repeats=rng.choice([1, 2])
    )
    compared = compare(*(report[name] for name in report.experiments))
    answer = report.answer()
    assert len(answer.conclusions) == len(compared.candidates)
    for said, candidate in zip(answer.conclusions, compared.candidates, strict=True):
        found = candidate["passed"]
        assert f"{said.word}: {said.text}" == found.headline
        assert found.sentence.startswith(found.headline)
        assert words(found.headline) in words(report)
        for warning in (*candidate.warnings, *compared.warnings):
            assert words(warning) in words(report)


def test_more_than_three_experiments_are_listed_by_verdict() -> None:
    report = drawn({"a": 0.5, "b": 0.9, "c": 0.5, "d": 0.1}, seed=3)
    compared = compare(*(report[name] for name in report.experiments))
    assert [one.verdict for one in compared.candidates] == ["better", "no detectable difference", "worse"]
    (said,) = report.answer().conclusions
    assert said.text.startswith("against a, better: b +")
    assert "; worse: d -" in said.text
    assert "; no detectable difference: c. p-values are adjusted for 3 tests." in said.text


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("interrupted", "Not compared: the run is not finished (interrupted)."),
        ("incomplete", "Not compared: the run is not finished (incomplete)."),
        ("running", "Not compared: the run is not finished (running)."),
    ],
)
def test_an_unfinished_run_is_not_compared(status: str, said: str) -> None:
    report = made_report(
        lambda place, *_: PASS if place < 5 else None, experiments=("a", "b"), samples=40, status=status
    )
    assert report.answer().conclusions == ()
    assert said in str(report)


def test_what_compare_refuses_is_said_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigurationError("the sides have different plans\nname one")

    monkeypatch.setattr("fairtrial.reports.compare.compare.compare", refuse)
    assert "Not compared: the sides have different plans.\n" in str(drawn({"a": 0.5, "b": 0.5}, seed=1)) + "\n"


def test_where_nothing_was_scored_nothing_is_compared() -> None:
    said = str(made_report(lambda *_: TASK_ERROR, experiments=("a", "b"), samples=8))
    assert "Not compared: no trial was scored." in said
    assert "No trial was scored." in said
    assert "the same figures" not in said
    assert "16 x task error: ValueError: no" in said


@pytest.mark.parametrize("trial", [TASK_ERROR, Made(None, "scorer_error", error="down")])
def test_compare_and_gate_say_of_nothing_scored_what_the_report_says(trial: Made) -> None:
    report = made_report(lambda *_: trial, experiments=("a", "b"), samples=200)
    compared = compare(*report.parts)
    found = compared["b"]["passed"]
    assert (found.verdict, found.n, found.difference) == ("unknown", 0, None)
    assert found.sentence == "passed: b and a cannot be compared: no trial was scored."
    assert "as good as" not in str(compared)
    decided = gate(report["b"], GateRules(margin=0.05), baseline=report["a"])
    assert decided.status == "inconclusive"
    why = "no trial was scored." if trial is TASK_ERROR else "200 of 200 pairs (100.0%) have no number for it"
    assert decided.reasons[0].startswith(f"passed of b against a: cannot be decided: {why}")
    assert decided.comparison is not None
    assert decided.comparison["b"]["passed"].verdict == "unknown"


def test_errors_of_one_side_count_against_the_scores_of_the_other() -> None:
    report = made_report(
        lambda _, experiment, *__: TASK_ERROR if experiment == "b" else PASS, experiments=("a", "b"), samples=40
    )
    assert compare(*report.parts)["b"]["passed"].verdict == "worse"
    assert gate(report["b"], GateRules(margin=0.05), baseline=report["a"]).status == "fail"


def test_warnings_are_never_left_to_the_details() -> None:
    report = made_report(
        lambda place, *_: Made(None, "scorer_error", error="down") if place < 4 else PASS,
        samples=20,
        status="unscored",
        notes={"code_changed": True, "stopped": "the cost limit was reached"},
        metadata=lambda place: {"cluster": place % 2},
    )
    short = words(report)
    for text in (
        "4 trials could not be scored; run the same command again",
        "ended early: the cost limit was reached",
        "results of two code versions",
        "Only 2 clusters",
    ):
        assert text in short
    assert short.count("95% interval") == 1


def test_remarks_that_do_not_warn_are_in_the_details() -> None:
    report = made_report(lambda *_: PASS, samples=40)
    remark = "The mean score has the same figures as the pass rate."
    assert remark not in str(report)
    assert remark in str(report.in_detail())


def test_scores_without_verdicts_are_shown_by_their_mean() -> None:
    rng = random.Random(4)
    report = made_report(lambda *_: Made(round(rng.random(), 2)), samples=50, experiments=("a", "b"))
    text = str(report)
    assert text.splitlines()[2].split() == ["mean", "pass", "median"]
    assert report.answer().conclusions[0].word == "value"
    verdicts = made_report(lambda *_: Made(0.4, passed=rng.random() < 0.5), samples=50)
    assert "mean" not in str(verdicts)
    criteria = made_report(lambda *_: Made(0.75, metrics=(Metric("short", 0.75, passed=True),)), samples=50)
    assert "mean" not in str(criteria)


def test_a_rate_with_errors_as_failures_is_shown_only_where_it_differs() -> None:
    assert "errors as" not in str(made_report(lambda *_: PASS))
    mixed = str(
        made_report(lambda place, name, _: TASK_ERROR if name == "b" and not place else PASS, experiments=("a", "b"))
    )
    rows = {line.split()[0]: line.split() for line in mixed.splitlines() if line[:2] in ("a ", "b ")}
    assert rows["a"][6:8] == ["0", "-"]
    assert rows["b"][6:8] == ["1", "90.0%"]


def test_cost_is_unknown_where_tokens_have_no_price_and_absent_without_calls() -> None:
    paid = made_report(lambda *_: Made(1.0, usage=TokenUsage(10, 5, 0, 0.001)))
    unknown = made_report(lambda *_: Made(1.0, usage=TokenUsage(10, 5)))
    assert [one.answer().rows[0].cost for one in (paid, unknown, made_report(lambda *_: PASS))] == [
        "$0.0100",
        "unknown",
        "",
    ]


class TestWorstTrials:
    def groups(self, report: EvalReport) -> TrialGroups:
        return report.answer().groups

    def test_equal_reasons_are_one_group_whatever_the_output(self) -> None:
        long = "The order {} should arrive on Friday."
        report = made_report(
            lambda place, *_: answered(long.format(place), f"expected 'lost' in {long.format(place)!r}"), samples=8
        )
        (group,) = self.groups(report).groups
        assert (group.title, group.trials) == ("8 x failed: expected 'lost' in …", 8)
        assert [one.sample_id for one in group.examples] == [f"sample-{place:02d}" for place in range(5)]
        assert group.examples[1].output == long.format(1)

    def test_the_most_frequent_is_first_then_errors_then_the_lower_score_then_the_plan(self) -> None:
        made = [answered("x", "twice"), answered("x", "twice"), answered("x", "b", 0.4), answered("x", "a", 0.4)]
        made += [answered("x", "low", 0.1), TASK_ERROR, answered("x", "sixth", 0.45), answered("x", "last", 0.45)]
        found = self.groups(made_report(lambda place, *_: made[place], samples=8))
        assert [one.reason for one in found.groups] == ["twice", "ValueError: no", "low", "b", "a"]
        assert [len(one.examples) for one in found.groups] == [1] * 5
        assert found.others == 2
        assert "and 2 more" in str(made_report(lambda place, *_: made[place], samples=8))

    def test_what_was_not_read_is_not_counted_as_if_it_were(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fairtrial.reports.report.answer._READ", 10)
        found = self.groups(made_report(lambda *_: FAIL, samples=30))
        assert (found.groups[0].title, found.others) == ("10+ x failed: not the same", 20)

    def test_there_is_none_where_all_passed(self) -> None:
        report = made_report(lambda *_: PASS)
        assert self.groups(report) == TrialGroups(())
        assert not any("--failed" in command for command, _ in report.answer().commands)

    @pytest.mark.parametrize("width", [40, 80, 140])
    def test_long_and_hostile_texts_are_cut_and_keep_what_differs(self, width: int) -> None:
        texts = [f"{'the same beginning of every prompt ' * 9}{end}" for end in ("alpha", "omega")]
        report = made_report(
            lambda place, *_: answered(f"line one\nline two {place}\x1b[31m", "no"), samples=2, text=texts[0]
        )
        lines = terminal.as_text(report.document(0), width=width).splitlines()
        assert max(map(cell_len, lines)) <= width
        assert "\x1b" not in "".join(lines)
        assert any("line" in line for line in lines)

    @pytest.mark.parametrize(
        ("reason", "output", "said"),
        [
            ("expected 'Rome', got 'Paris'", "Paris", "expected 'Rome', got …"),
            ("expected 'Par' in 'Paris'", "Paris", "expected 'Par' in …"),
            ("expected 'x' in 'a long answer of many wor'...", "a long answer of many words", "expected 'x' in …"),
            ("""expected "it's", got 'no'""", "no", """expected "it's", got …"""),
            ("too long", "Paris", "too long"),
            ("expected 'Rome', got 'Paris'", "", "expected 'Rome', got 'Paris'"),
        ],
    )
    def test_a_reason_does_not_repeat_the_output(self, reason: str, output: str, said: str) -> None:
        assert without_output(reason, output) == said


def test_next_commands_name_a_run_that_is_not_the_latest_by_its_number() -> None:
    first = made_report(lambda *_: FAIL, experiments=("a", "b"))
    made_report(lambda *_: FAIL, experiments=("a", "b"), store=first.store, run_id="run0000002")
    said = [command for command, _ in first.answer().commands]
    assert said == [
        "fairtrial show support@1 --full",
        "fairtrial trials support@1 --failed",
        "fairtrial compare support@1",
    ]
