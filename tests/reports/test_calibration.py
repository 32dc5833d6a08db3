"""Calibration: judges compared with people's labels."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Label, Metric, Sample, Score, calibrate, open_store, stats
from fairtrial.base.codec import dumps
from fairtrial.errors import DataError
from fairtrial.reports import Calibration, EvalReport
from fairtrial.reports.figures.labels import UNKNOWN_DRAW
from fairtrial.suites import evaluate_sync
from fairtrial.trials import EvalConfig, Experiment, StopWhen, TrialContext, TrialKey

pytestmark = pytest.mark.proves("R39")


def echo(given: Any) -> Any:
    return given


def judge(output: Mapping[str, Any], expected: Any) -> Score:
    """A stand-in for a judge: it says what the sample says it will say."""
    if output["judge"] is None:
        raise RuntimeError("the judge gave no verdict")
    details = {"judge_model": "claude-x", **({"same_family": "claude-y"} if output.get("kin") else {})}
    return Score(output["judge"], metrics=[Metric("rating", output["judge"], metadata=details)])


def run(
    verdicts: list[Any], *, kin: bool = False, metadata: Any = None, store: Any = None, **settings: Any
) -> EvalReport:
    data: Dataset[Any, Any] = Dataset(
        [
            Sample(f"s{i}", {"judge": verdict, "kin": kin, "text": "x" * i}, None, metadata(i) if metadata else {})
            for i, verdict in enumerate(verdicts)
        ]
    )
    return evaluate_sync(data, echo, judge, EvalConfig(**settings), store=store)


def matrix(true_passes: int, false_passes: int, false_fails: int, true_fails: int) -> tuple[list[int], list[bool]]:
    kinds = (
        [(1, True)] * true_passes + [(1, False)] * false_passes + [(0, True)] * false_fails + [(0, False)] * true_fails
    )
    random.Random(4).shuffle(kinds)
    return [verdict for verdict, _ in kinds], [label for _, label in kinds]


def test_the_figures_are_those_of_the_statistics() -> None:
    verdicts, people = matrix(50, 10, 5, 35)
    unlabelled = [1] * 300 + [0] * 100
    calibration = calibrate(run(verdicts + unlabelled), {f"s{i}": label for i, label in enumerate(people)})
    assert (calibration.judged, calibration.labelled, calibration.metric) == (500, 100, "passed")
    table = calibration.confusion
    assert table is not None
    assert (table.true_passes, table.false_passes, table.false_fails, table.true_fails, table.n) == (50, 10, 5, 35, 100)
    assert calibration.agreement.value == 0.85
    counts = [[35, 5], [10, 50]]
    kappa = stats.kappa_interval(counts)
    assert isinstance(kappa, stats.Interval)
    assert calibration.kappa.value == stats.cohen_kappa_table(counts)
    assert (calibration.kappa.low, calibration.kappa.high) == (kappa.low, kappa.high)
    assert calibration.sensitivity.value == pytest.approx(50 / 55)
    assert calibration.specificity.value == pytest.approx(35 / 45)
    assert calibration.judge_rate.value == 360 / 500
    assert calibration.label_rate.value == 0.55
    assert calibration.corrected.value == pytest.approx(360 / 500 * 50 / 60 + 140 / 500 * 5 / 40)
    labels = np.array([*people, *([np.nan] * 400)], dtype=float)
    corrected = stats.corrected_mean(stats.JudgedTrials(np.array(verdicts + unlabelled, dtype=float), labels))
    assert corrected.interval is not None
    assert (calibration.corrected.n, calibration.corrected.method) == (100, "post-stratified by verdict")
    assert (calibration.corrected.low, calibration.corrected.high) == (corrected.interval.low, corrected.interval.high)
    other = stats.rogan_gladen(300, 400, true_passes=50, positives=55, true_fails=35, negatives=45)
    assert calibration.rogan_gladen.value == other.estimate
    assert calibration.judge_models == ("claude-x",)


def test_it_is_a_record_and_a_table() -> None:
    verdicts, people = matrix(20, 4, 3, 13)
    calibration = calibrate(
        run(verdicts + [1, 1, 0] * 20, kin=True), {f"s{i}": label for i, label in enumerate(people)}
    )
    read = json.loads(dumps(calibration))
    assert read["confusion"] == {"true_passes": 20, "false_passes": 4, "false_fails": 3, "true_fails": 13}
    assert read["corrected"]["low"] == calibration.corrected.low
    text = str(calibration)
    for line in (
        "judge against labels",
        "people: pass",
        "judge: fail",
        "Cohen's kappa",
        "corrected",
        "score with length",
    ):
        assert line in text
    said = "If the labels were drawn at random, people would pass 60.1% (45.3% to 73.2%); the judge says 64.0%."
    assert said in " ".join(text.split())
    assert "40 labels, 100 judged" in text
    assert "Rogan" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert calibration.to_json() == {"format": "fairtrial.calibration/1", **read}
    assert "| agreement | 82.5% |" in calibration.to_markdown()
    assert "<td>82.5%</td>" in calibration.to_html()
    assert hash(calibration) == hash(calibration)
    with pytest.raises(AttributeError):
        calibration.judged = 3  # type: ignore[misc]


@pytest.mark.proves("R115")
class TestLabelsInTheStore:
    def labelled(self, *labels: tuple[str, Any, str], name: str = "ok", extra: Any = ()) -> EvalReport:
        report = run([1, 1, 0, 0, 1, 1, None], store=open_store("memory:"))
        for sample, value, annotator in labels:
            report.store.label(Label(TrialKey(report.run_id, "baseline", sample), name, value, annotator))
        for label in extra:
            report.store.label(label(report.run_id))
        return report

    def test_people_review_trials_and_their_last_word_counts(self) -> None:
        report = self.labelled(
            ("s0", "fail", "ann"), ("s0", "pass", "ann"), ("s2", False, "ann"), ("s3", "good", "ann")
        )
        calibration = calibrate(report)
        assert calibration.confusion is not None
        assert (calibration.labelled, calibration.label, calibration.annotators) == (3, "ok", ("ann",))
        assert (calibration.confusion.true_passes, calibration.confusion.false_fails) == (1, 1)

    def test_a_majority_decides_and_a_tie_is_left_out(self) -> None:
        votes = [("s0", 1, "ann"), ("s0", 1, "bob"), ("s0", 0, "cy"), ("s1", 1, "ann"), ("s1", 0, "bob")]
        votes += [("s2", 0, "ann"), ("s2", 0, "bob"), ("s2", 0, "cy")]
        calibration = calibrate(self.labelled(*votes))
        assert (calibration.labelled, calibration.annotators) == (2, ("ann", "bob", "cy"))
        panel = calibration.panel
        assert panel is not None
        assert (panel.annotators, panel.trials) == (3, 3)
        assert panel.pairs.value == pytest.approx((1 / 3 + 0 + 1) / 3)
        assert panel.fleiss.note == "Trials have different numbers of labels."
        expected = stats.krippendorff_alpha([[1, 1, 0], [1, 0, 0], [0, None, 0]])
        assert panel.krippendorff.value == expected
        interval = stats.krippendorff_alpha_interval([[1, 1, 0], [1, 0, 0], [0, None, 0]])
        assert isinstance(interval, stats.Interval)
        assert (panel.krippendorff.low, panel.krippendorff.high) == (interval.low, interval.high)
        assert any(
            "1 trial on which the annotators are evenly split is left out, a hard one: one more label" in line
            for line in calibration.warnings
        )
        assert "annotators: Fleiss' kappa" in str(calibration)

    def test_a_panel_of_fixed_size_has_fleiss_kappa(self) -> None:
        votes = [("s0", 1, "a"), ("s0", 1, "b"), ("s2", 0, "a"), ("s2", 1, "b"), ("s3", 0, "a"), ("s3", 0, "b")]
        panel = calibrate(self.labelled(*votes)).panel
        assert panel is not None
        table = [[0, 2], [1, 1], [2, 0]]
        interval = stats.fleiss_kappa_interval(table)
        assert isinstance(interval, stats.Interval)
        assert (panel.fleiss.value, panel.fleiss.low) == (stats.fleiss_kappa(table), interval.low)

    def test_labels_of_other_trials_are_counted_and_left_out(self) -> None:
        report = self.labelled(("s0", 1, ""), ("s6", 1, ""), ("s99", 1, ""))
        calibration = calibrate(report)
        assert calibration.labelled == 1
        assert calibration.notes == (
            "1 label is of a trial that this run does not have, and left out.",
            "1 label is of a trial that the judge has not scored, and left out.",
        )
        assert any(line.startswith("1 label is too few") for line in calibration.warnings)

    def test_several_names_need_a_choice(self) -> None:
        report = self.labelled(
            ("s0", 1, ""), extra=[lambda run_id: Label(TrialKey(run_id, "baseline", "s1"), "polite", True)]
        )
        with pytest.raises(
            ConfigurationError, match=r"several names, 'ok' \(1\), 'polite' \(1\): choose one with name="
        ):
            calibrate(report)
        assert calibrate(report, name="polite").labelled == 1

    def test_names_that_begin_with_a_tilde_are_left_out_unless_they_are_named(self) -> None:
        report = self.labelled(
            ("s0", 1, ""),
            extra=[
                lambda run_id: Label(TrialKey(run_id, "baseline", "s0"), "~comment:ok", "well put"),
                lambda run_id: Label(TrialKey(run_id, "baseline", "s1"), "~picked:ok", True),
                lambda run_id: Label(TrialKey(run_id, "baseline", "s2"), "~picked:ok", False),
            ],
        )
        assert calibrate(report).labelled == 1
        assert calibrate(report, name="~picked:ok").labelled == 2

    def test_a_label_without_a_value_withdraws_what_its_annotator_said_of_that_trial(self) -> None:
        def label(sample: str, value: bool | None, annotator: str) -> Callable[[str], Label]:
            return lambda run_id: Label(TrialKey(run_id, "baseline", sample), "ok", value, annotator)

        votes = [label("s0", True, "ann"), label("s1", True, "ann"), label("s1", False, "bob")]
        withdrawn = [label("s0", None, "ann"), label("s1", None, "ann"), label("s2", None, "bob")]
        report = self.labelled(extra=[*votes, *withdrawn])
        calibration = calibrate(report)
        assert calibration.labelled == 1
        assert calibration.label_rate.value == 0.0
        again = self.labelled(extra=[*votes, *withdrawn, label("s0", True, "ann")])
        assert calibrate(again).labelled == 2

    def test_labels_outlive_the_judge_that_they_were_made_for(self) -> None:
        store = open_store("memory:")
        data: Dataset[Any, Any] = Dataset([Sample(f"s{i}", {"judge": i % 2}, None) for i in range(8)])
        suite = EvalSuite("s", data, echo, judge)
        first = suite.run_sync(store=store)
        for i in range(8):
            store.label(Label(TrialKey(first.run_id, "baseline", f"s{i}"), "ok", i % 2 == 0))
        from fairtrial.base.sync_bridge import blocking_portal

        second = blocking_portal().call(lambda: suite.rescore(first.run_id, lambda output, expected: True, store=store))
        assert calibrate(first).agreement.value == 0.0
        calibration = calibrate(second)
        assert (calibration.labelled, calibration.agreement.value) == (8, 0.5)


class TestEdges:
    def test_no_labels(self) -> None:
        calibration = calibrate(run([1, 0, 1]))
        assert calibration.labelled == 0
        for figure in (calibration.agreement, calibration.kappa, calibration.corrected, calibration.sensitivity):
            assert figure.value is None
            assert figure.note
        assert calibration.judge_rate.value == pytest.approx(2 / 3)
        assert calibration.warnings == (
            "There are no labels to compare the judge with: label a random sample of the judged trials first.",
        )
        assert "-" in str(calibration)

    def test_one_label(self) -> None:
        calibration = calibrate(run([1, 0, 1, 1]), {"s0": True})
        assert (calibration.labelled, calibration.agreement.value, calibration.kappa.value) == (1, 1.0, None)
        assert calibration.kappa.note is not None
        assert "the same label to every item" in calibration.kappa.note
        assert calibration.corrected.low is not None
        assert calibration.corrected.low < 0.5
        assert calibration.specificity.note == "People passed every labelled trial."

    def test_labels_all_of_one_class(self) -> None:
        calibration = calibrate(run([1, 0] * 40), {f"s{i}": False for i in range(40)})
        assert calibration.sensitivity.note == "People failed every labelled trial."
        assert calibration.rogan_gladen.value is None
        assert calibration.kappa.value == 0.0

    def test_a_judge_that_is_always_right_is_not_held_for_infallible(self) -> None:
        calibration = calibrate(run([1, 0] * 60), {f"s{i}": i % 2 == 0 for i in range(40)})
        assert (calibration.kappa.value, calibration.agreement.value) == (1.0, 1.0)
        assert calibration.kappa.low is not None
        assert calibration.kappa.low < 0.95
        assert calibration.corrected.low is not None
        assert calibration.corrected.low < 0.45

    def test_every_trial_labelled(self) -> None:
        verdicts, people = matrix(20, 8, 2, 10)
        calibration = calibrate(run(verdicts), {f"s{i}": label for i, label in enumerate(people)})
        assert calibration.corrected.value == calibration.label_rate.value == 22 / 40
        assert calibration.corrected.note == "Every trial is labelled."

    def test_labels_that_were_picked_are_noticed(self) -> None:
        calibration = calibrate(run([0] * 40 + [1] * 160), {f"s{i}": False for i in range(35)})
        assert any("do not look like a random sample" in line for line in calibration.warnings)
        names = "corrected rogan_gladen label_rate agreement kappa sensitivity specificity length_error"
        for figure in (getattr(calibration, name) for name in names.split()):
            assert (figure.value, figure.low, figure.note) == (None, None, calibration.warnings[0])
        assert "These labels do not show what people would say; the judge says 80.0%." in str(calibration)
        assert str(calibration).count("do not look like") == 1

    def test_a_random_sample_has_no_warning(self) -> None:
        verdicts, people = matrix(20, 8, 2, 10)
        labels = {f"s{i}": label for i, label in enumerate(people)}
        calibration = calibrate(run(verdicts * 5), labels, drawn=True)
        assert calibration.warnings == ()
        assert calibration.notes == ("The trials with labels are declared to be drawn at random.",)

    def test_a_judge_of_the_same_family_is_warned_about(self) -> None:
        calibration = calibrate(run([1, 0, 1], kin=True), {"s0": True})
        assert calibration.same_family == ("claude-y",)
        assert any("are of one family (claude-y)" in line for line in calibration.warnings)

    def test_a_judge_that_likes_length_is_found_out(self) -> None:
        verdicts = [int(i >= 100) for i in range(200)]
        labels = {f"s{i}": (i * 7) % 10 < 5 for i in range(0, 200, 2)}
        calibration = calibrate(run(verdicts), labels)
        assert calibration.length.value is not None
        assert calibration.length.value > 0.8
        assert calibration.length_error.low is not None
        assert calibration.length_error.low > 0.3

    def test_a_run_that_stopped_by_itself_is_warned_about(self) -> None:
        report = run([1] * 200, stop_when=StopWhen(0.2, shuffle=False))
        assert any("The run could stop early" in line for line in calibrate(report, {"s0": True}).warnings)

    @pytest.mark.parametrize("value", ["maybe", 2, -1, float("nan"), None, [1]])
    def test_a_label_that_says_nothing_is_refused(self, value: Any) -> None:
        with pytest.raises(DataError, match=r"cannot be compared with 'passed'"):
            calibrate(run([1, 0]), {"s0": value})

    def test_a_metric_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="has a metric 'tone'; there are passed, value, rating"):
            calibrate(run([1, 0]), {}, metric="tone")

    def test_of_several_experiments_one_is_named(self) -> None:
        data: Dataset[Any, Any] = Dataset([Sample("s0", {"judge": 1}, None)])
        experiments = [Experiment("baseline"), Experiment("terse")]
        report = evaluate_sync(data, echo, judge, experiments=experiments)
        with pytest.raises(ConfigurationError, match="covers 2 experiments"):
            calibrate(report, {"s0": True})
        labels = [Label(TrialKey(report.run_id, name, "s0"), "", name == "terse") for name in report.experiments]
        assert calibrate(report["terse"], labels).agreement.value == 1.0
        assert calibrate(report["baseline"], labels).agreement.value == 0.0


class TestGraded:
    def test_graded_figures_have_a_corrected_mean_and_no_confusion(self) -> None:
        rng = random.Random(2)
        truth = [rng.choice([0.25, 0.5, 0.75]) for _ in range(200)]
        report = run([value + 0.25 for value in truth])
        labels = {f"s{i}": truth[i] for i in range(60)}
        calibration = calibrate(report, labels, metric="value")
        assert calibration.confusion is None
        assert calibration.corrected.value == pytest.approx(sum(truth[60:]) / 140, abs=0.02)
        assert calibration.agreement.note == "Only pass/fail figures have it."
        assert calibration.kappa.value is not None
        assert calibration.kappa.low is not None
        assert calibration.kappa.high is not None
        assert -1 <= calibration.kappa.low < calibration.kappa.value < calibration.kappa.high <= 1
        assert "Krippendorff's alpha" in str(calibration)
        assert "judge's mean" in str(calibration)

    def test_people_who_rate_nearly_the_same_agree_more_than_by_equal_ratings(self) -> None:
        report = run([0.2, 0.4, 0.6, 0.8], store=open_store("memory:"))
        ratings = {"a": [0.2, 0.4, 0.6, 0.8], "b": [0.3, 0.4, 0.7, 0.9]}
        for who, given in ratings.items():
            for place, rating in enumerate(given):
                report.store.label(Label(TrialKey(report.run_id, "baseline", f"s{place}"), "ok", rating, who))
        panel = calibrate(report, metric="value").panel
        assert panel is not None
        expected = stats.krippendorff_alpha(list(ratings.values()), measurement="interval")
        assert panel.krippendorff.value == expected != stats.krippendorff_alpha(list(ratings.values()))

    def test_ratings_can_be_given_in_the_judges_words(self) -> None:
        report = run([1.0, 0.75, 0.5, 0.0])
        words = {"s0": "excellent", "s1": "Good", "s2": "fair", "s3": "wrong"}
        assert calibrate(report, words, metric="rating").label_rate.value == pytest.approx(2.25 / 4)
        assert calibrate(report, words).confusion is not None
        assert calibrate(report, words).label_rate.value == 0.5

    def test_numbers_between_pass_and_fail_are_rounded_and_said_to_be(self) -> None:
        calibration = calibrate(run([1, 0, 1]), {"s0": 0.7, "s1": 0.2})
        assert calibration.label_rate.value == 0.5
        assert calibration.notes == ("2 labels are numbers between 0 and 1: from 0.5 on, a label counts as a pass.",)
        assert UNKNOWN_DRAW.format(option="drawn=True, --labels-drawn") in calibration.warnings

    def test_a_metric_beyond_0_to_1_is_taken_as_it_is(self) -> None:
        def turns(output: Mapping[str, Any], expected: Any) -> Score:
            return Score(1.0, metrics=[Metric("turns", output["n"])])

        data: Dataset[Any, Any] = Dataset([Sample(f"s{i}", {"n": i}, None) for i in range(20)])
        report = evaluate_sync(data, echo, turns)
        calibration = calibrate(report, {f"s{i}": i + 2 for i in range(0, 20, 2)}, metric="turns")
        assert calibration.corrected.value == pytest.approx(9.5 + 2)
        narrow = calibrate(report, {f"s{i}": i for i in (0, 1)}, metric="turns")
        assert narrow.agreement.value is None


class TestTrialsThatBelongTogether:
    def test_clusters_widen_what_can_be_widened(self) -> None:
        verdicts, people = matrix(40, 15, 5, 20)
        labels = {f"s{i}": label for i, label in enumerate(people)}
        alone = calibrate(run(verdicts + [1, 1, 1, 0] * 60), labels)
        together = calibrate(run(verdicts + [1, 1, 1, 0] * 60, metadata=lambda i: {"cluster": i // 40}), labels)
        assert together.corrected.value == alone.corrected.value
        assert together.corrected.method == "post-stratified by verdict, clustered"
        assert width(together.corrected) > width(alone.corrected)
        assert together.kappa.value == alone.kappa.value
        assert together.kappa.note == together.rogan_gladen.note == "No interval: trials are not independent."
        for name in ("length", "length_error"):
            free, bound = getattr(alone, name), getattr(together, name)
            assert free.low is not None
            assert (bound.value, bound.low, bound.high) == (free.value, None, None)
            assert bound.note == "No interval: trials are not independent."

    def test_repeats_are_labelled_by_key(self) -> None:
        def task(given: Any, ctx: TrialContext) -> Any:
            return {"judge": (ctx.key.repeat + int(ctx.sample.id[1:])) % 2}

        data: Dataset[Any, Any] = Dataset([Sample(f"s{i}", None, None) for i in range(30)])
        report = evaluate_sync(data, task, judge, EvalConfig(repeats=2))
        with pytest.raises(ConfigurationError, match="2 repeats of sample 's0'"):
            calibrate(report, {"s0": True})
        labels = {TrialKey(report.run_id, "baseline", f"s{i}", i % 2): True for i in range(10)}
        labels |= {TrialKey(report.run_id, "baseline", "s0", 7): True, TrialKey("another", "baseline", "s0"): True}
        calibration = calibrate(report, labels)
        assert (calibration.judged, calibration.labelled) == (60, 10)
        assert calibration.notes[0].startswith("2 labels are of trials that this run does not have")
        assert calibration.corrected.method == "post-stratified by verdict, clustered"

    def test_a_panels_interval_has_the_level_of_the_others(self) -> None:
        report = run([1, 0] * 10, store=open_store("memory:"))
        for place in range(20):
            for annotator in ("a", "b"):
                told = place % 2 == 0 or (annotator == "a" and place < 6)
                report.store.label(Label(TrialKey(report.run_id, "baseline", f"s{place}"), "ok", told, annotator))
        panels = [calibrate(report, level=level).panel for level in (0.8, 0.95)]
        assert panels[0] is not None
        assert panels[1] is not None
        assert width(panels[0].pairs) < width(panels[1].pairs)

    def test_a_panels_interval_needs_independent_trials(self) -> None:
        report = run([1, 0, 1, 0], metadata=lambda i: {"cluster": i // 2}, store=open_store("memory:"))
        for sample in ("s0", "s1"):
            for annotator in ("a", "b"):
                report.store.label(Label(TrialKey(report.run_id, "baseline", sample), "ok", sample == "s0", annotator))
        panel = calibrate(report).panel
        assert panel is not None
        assert (panel.pairs.value, panel.pairs.low) == (1.0, None)


def width(figure: Any) -> float:
    return float(figure.high - figure.low)


class TestLabelsThatWereDrawn:
    """More of the judge's fails are labelled than of its passes, and something says so."""

    VERDICTS: ClassVar = [1] * 160 + [0] * 40
    PEOPLE: ClassVar = {f"s{i}": i % 10 != 0 for i in range(20)} | {f"s{i}": i % 4 == 0 for i in range(160, 180)}
    TRUTH = 0.8 * 0.9 + 0.2 * 0.25

    def test_labels_drawn_by_verdict_correct_the_rate(self) -> None:
        report = run(self.VERDICTS)
        assert calibrate(report, self.PEOPLE).corrected.value is None
        calibration = calibrate(report, self.PEOPLE, by_verdict=True)
        assert calibration.corrected.value == pytest.approx(self.TRUTH)
        assert calibration.agreement.value == pytest.approx(0.8 * 0.9 + 0.2 * 0.75)
        assert calibration.agreement.low is not None
        assert calibration.sensitivity.value == pytest.approx(0.8 * 0.9 / self.TRUTH)
        assert calibration.specificity.value == pytest.approx(0.2 * 0.75 / (1 - self.TRUTH))
        assert calibration.kappa.value == stats.cohen_kappa_table([[30, 10], [16, 144]])
        assert (calibration.label_rate.value, calibration.rogan_gladen.value) == (None, None)
        assert "same chance of being labelled" in (calibration.kappa.note or "")
        assert not any("random sample" in line for line in (*calibration.warnings, *calibration.notes))

    def test_weights_that_explain_the_picking_correct_the_rate(self) -> None:
        store = open_store("memory:")
        report = run(self.VERDICTS, store=store)
        for sample, value in self.PEOPLE.items():
            weight = 8.0 if int(sample[1:]) < 160 else 2.0
            store.label(Label(TrialKey(report.run_id, "baseline", sample), "ok", value, weight=weight))
        assert next(iter(store.labels(report.run_id))).weight == 8.0
        calibration = calibrate(report)
        assert calibration.corrected.value == pytest.approx(self.TRUTH)
        assert calibration.warnings == ()

    def test_weights_that_do_not_explain_it_are_of_no_use(self) -> None:
        report = run(self.VERDICTS)
        wrong = [
            Label(TrialKey(report.run_id, "baseline", sample), "", value, weight=1.0 + i % 2)
            for i, (sample, value) in enumerate(self.PEOPLE.items())
        ]
        calibration = calibrate(report, wrong)
        assert calibration.corrected.value is None
        assert "weighted, do not look like a random sample" in (calibration.corrected.note or "")

    def test_weights_within_a_verdict_count(self) -> None:
        report = run([1] * 100)
        labels = [
            Label(TrialKey(report.run_id, "baseline", f"s{i}"), "", i % 2 == 0, weight=3.0 if i % 2 else 1.0)
            for i in range(40)
        ]
        assert calibrate(report, labels).corrected.value == pytest.approx(0.25)

    @pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_weight_that_is_no_positive_number_is_refused(self, weight: float) -> None:
        with pytest.raises(ConfigurationError, match="must be a number above 0"):
            Label(TrialKey("r", "baseline", "s0"), "", True, weight=weight)


def test_the_same_through_stored_runs_and_labels() -> None:
    rng = np.random.default_rng(12)
    held = naive = 0
    for _ in range(8):
        truth = rng.random(300) < 0.7
        verdicts = np.where(truth, rng.random(300) < 0.97, rng.random(300) < 0.6).astype(int).tolist()
        calibration: Calibration = calibrate(run(verdicts), {f"s{i}": bool(truth[i]) for i in range(60)})
        assert calibration.corrected.low is not None
        assert calibration.corrected.high is not None
        held += calibration.corrected.low <= 0.7 <= calibration.corrected.high
        naive += (calibration.judge_rate.low or 0) <= 0.7 <= (calibration.judge_rate.high or 1)
    assert held >= 6
    assert naive <= 1
