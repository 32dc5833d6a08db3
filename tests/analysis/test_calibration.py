"""Judges held against people's labels."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fairtrial import (
    Calibration,
    ConfigurationError,
    DataError,
    Dataset,
    EvalConfig,
    EvalReport,
    EvalSuite,
    Experiment,
    Metric,
    Sample,
    Score,
    StopWhen,
    TrialContext,
    calibrate,
    evaluate_sync,
    open_store,
    stats,
)
from fairtrial.analysis.columns import Columns
from fairtrial.analysis.estimates import mean_of
from fairtrial.codec import dumps
from fairtrial.store.protocol import Label
from fairtrial.trials.keys import TrialKey

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
    assert calibration.corrected.value == pytest.approx(0.75 - 0.05)
    corrected = stats.prediction_powered_mean([float(p) for p in people], verdicts, unlabelled)
    assert corrected.interval is not None
    assert (calibration.corrected.low, calibration.corrected.high) == (corrected.interval.low, corrected.interval.high)
    other = stats.rogan_gladen(300, 400, true_passes=50, positives=55, true_fails=35, negatives=45)
    assert calibration.rogan_gladen.value == other.estimate
    assert calibration.judge_models == ("claude-x",)
    assert any("random sample" in line for line in calibration.warnings)


def test_it_is_a_record_and_a_table() -> None:
    verdicts, people = matrix(20, 4, 3, 13)
    calibration = calibrate(run(verdicts + [1] * 60, kin=True), {f"s{i}": label for i, label in enumerate(people)})
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
    assert "warning: The corrected rate holds if the labelled trials are a random sample" in text
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
        assert any("1 trials on which the annotators are evenly split" in line for line in calibration.warnings)
        assert "annotators: Fleiss' kappa" in str(calibration)

    def test_a_panel_of_fixed_size_has_fleiss_kappa(self) -> None:
        votes = [("s0", 1, "a"), ("s0", 1, "b"), ("s2", 0, "a"), ("s2", 1, "b"), ("s3", 0, "a"), ("s3", 0, "b")]
        panel = calibrate(self.labelled(*votes)).panel
        assert panel is not None
        assert panel.fleiss.value == stats.fleiss_kappa([[0, 2], [1, 1], [2, 0]])

    def test_labels_of_other_trials_are_counted_and_left_out(self) -> None:
        report = self.labelled(("s0", 1, ""), ("s6", 1, ""), ("s99", 1, ""))
        calibration = calibrate(report)
        assert calibration.labelled == 1
        assert calibration.notes == (
            "1 labels are of trials that this run does not have; they are left out.",
            "1 labels are of trials that the judge has not scored; they are left out.",
        )
        assert any(line.startswith("1 label say little") for line in calibration.warnings)

    def test_several_names_need_a_choice(self) -> None:
        report = self.labelled(
            ("s0", 1, ""), extra=[lambda run_id: Label(TrialKey(run_id, "baseline", "s1"), "polite", True)]
        )
        with pytest.raises(
            ConfigurationError, match=r"several names, 'ok' \(1\), 'polite' \(1\): choose one with name="
        ):
            calibrate(report)
        assert calibrate(report, name="polite").labelled == 1

    def test_labels_outlive_the_judge_that_they_were_made_for(self) -> None:
        store = open_store("memory:")
        data: Dataset[Any, Any] = Dataset([Sample(f"s{i}", {"judge": i % 2}, None) for i in range(8)])
        suite = EvalSuite("s", data, echo, judge)
        first = suite.run_sync(store=store)
        for i in range(8):
            store.label(Label(TrialKey(first.run_id, "baseline", f"s{i}"), "ok", i % 2 == 0))
        from fairtrial.portal import portal

        second = portal().call(lambda: suite.rescore(first.run_id, lambda output, expected: True, store=store))
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
            "There are no labels to hold the judge against: label a random sample of the judged trials first.",
        )
        assert "-" in str(calibration)

    def test_one_label(self) -> None:
        calibration = calibrate(run([1, 0, 1, 1]), {"s0": True})
        assert (calibration.labelled, calibration.agreement.value, calibration.kappa.value) == (1, 1.0, None)
        assert calibration.kappa.note is not None
        assert "one and the same label" in calibration.kappa.note
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
        assert calibration.corrected.note is not None
        assert "pseudo-cases" in calibration.corrected.note

    def test_every_trial_labelled(self) -> None:
        verdicts, people = matrix(20, 8, 2, 10)
        calibration = calibrate(run(verdicts), {f"s{i}": label for i, label in enumerate(people)})
        assert calibration.corrected.value == calibration.label_rate.value == 22 / 40
        assert calibration.corrected.note == "Every trial is labelled."

    def test_labels_that_were_picked_are_noticed(self) -> None:
        calibration = calibrate(run([0] * 40 + [1] * 160), {f"s{i}": False for i in range(35)})
        assert any("do not look like a random sample" in line for line in calibration.warnings)

    def test_a_judge_of_the_same_family_is_warned_about(self) -> None:
        calibration = calibrate(run([1, 0, 1], kin=True), {"s0": True})
        assert calibration.same_family == ("claude-y",)
        assert any("one family with what it judges (claude-y)" in line for line in calibration.warnings)

    def test_a_judge_that_likes_length_is_found_out(self) -> None:
        verdicts = [int(i >= 100) for i in range(200)]
        labels = {f"s{i}": (i * 7) % 10 < 5 for i in range(0, 200, 2)}
        calibration = calibrate(run(verdicts), labels)
        assert calibration.length.value is not None
        assert calibration.length.value > 0.8
        assert calibration.length_error.low is not None
        assert calibration.length_error.low > 0.3

    def test_a_run_that_stopped_by_itself_is_warned_about(self) -> None:
        report = run([1] * 200, stop_when=StopWhen(0.2))
        assert any("allowed to stop by itself" in line for line in calibrate(report, {"s0": True}).warnings)

    @pytest.mark.parametrize("value", ["maybe", 2, -1, float("nan"), None, [1]])
    def test_a_label_that_says_nothing_is_refused(self, value: Any) -> None:
        with pytest.raises(DataError, match=r"cannot be held against 'passed'"):
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
        assert calibration.kappa.method == "Krippendorff's alpha, interval"
        assert "Krippendorff's alpha" in str(calibration)
        assert "judge's mean" in str(calibration)

    def test_ratings_can_be_given_in_the_judges_words(self) -> None:
        report = run([1.0, 0.75, 0.5, 0.0])
        words = {"s0": "excellent", "s1": "Good", "s2": "fair", "s3": "wrong"}
        assert calibrate(report, words, metric="rating").label_rate.value == pytest.approx(2.25 / 4)
        assert calibrate(report, words).confusion is not None
        assert calibrate(report, words).label_rate.value == 0.5

    def test_numbers_between_pass_and_fail_are_rounded_and_said_to_be(self) -> None:
        calibration = calibrate(run([1, 0, 1]), {"s0": 0.7, "s1": 0.2})
        assert calibration.label_rate.value == 0.5
        assert calibration.notes == ("2 labels are numbers between 0 and 1: from 0.5 on they count as a pass.",)

    def test_a_metric_beyond_0_to_1_is_taken_as_it_is(self) -> None:
        def turns(output: Mapping[str, Any], expected: Any) -> Score:
            return Score(1.0, metrics=[Metric("turns", output["n"])])

        data: Dataset[Any, Any] = Dataset([Sample(f"s{i}", {"n": i}, None) for i in range(20)])
        report = evaluate_sync(data, echo, turns)
        calibration = calibrate(report, {f"s{i}": i + 2 for i in range(0, 20, 2)}, metric="turns")
        assert calibration.corrected.value == pytest.approx(10.0 + 2)
        narrow = calibrate(report, {f"s{i}": i for i in (0, 1)}, metric="turns")
        assert narrow.agreement.value is None


class TestTrialsThatBelongTogether:
    def test_clusters_widen_what_can_be_widened(self) -> None:
        verdicts, people = matrix(40, 15, 5, 20)
        labels = {f"s{i}": label for i, label in enumerate(people)}
        alone = calibrate(run(verdicts + [1, 1, 1, 0] * 60), labels)
        together = calibrate(run(verdicts + [1, 1, 1, 0] * 60, metadata=lambda i: {"cluster": i // 40}), labels)
        assert together.corrected.value == alone.corrected.value
        assert together.corrected.method == "prediction-powered, clustered, t"
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
        assert calibration.corrected.method == "prediction-powered, clustered, t"

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


def test_the_corrected_interval_holds_the_truth_where_the_judges_own_does_not() -> None:
    """People pass 70%; the judge passes 95% of those and 40% of the rest, so its own rate is 78.5%."""
    rng = np.random.default_rng(11)
    corrected = rogan = naive = 0
    runs = 1_000
    for _ in range(runs):
        truth = rng.random(600) < 0.7
        verdicts = np.where(truth, rng.random(600) < 0.95, rng.random(600) < 0.4).astype(float)
        y, f, rest = truth[:100].astype(float), verdicts[:100], verdicts[100:]
        found = stats.prediction_powered_mean(y, f, rest)
        other = stats.rogan_gladen(
            int(rest.sum()),
            500,
            true_passes=int((f * y).sum()),
            positives=int(y.sum()),
            true_fails=int(((1 - f) * (1 - y)).sum()),
            negatives=int((1 - y).sum()),
        )
        own = mean_of(Columns.of({"passed": verdicts}), "passed", "scored").interval
        assert found.interval is not None
        assert other.interval is not None
        assert own is not None
        corrected += found.interval.contains(0.7)
        rogan += other.interval.contains(0.7)
        naive += own.contains(0.7)
    assert corrected / runs >= 0.93
    assert rogan / runs >= 0.93
    assert naive / runs < 0.05


def test_the_same_through_stored_runs_and_labels() -> None:
    rng = np.random.default_rng(12)
    held = naive = 0
    for _ in range(20):
        truth = rng.random(300) < 0.7
        verdicts = np.where(truth, rng.random(300) < 0.97, rng.random(300) < 0.6).astype(int).tolist()
        calibration: Calibration = calibrate(run(verdicts), {f"s{i}": bool(truth[i]) for i in range(60)})
        assert calibration.corrected.low is not None
        assert calibration.corrected.high is not None
        held += calibration.corrected.low <= 0.7 <= calibration.corrected.high
        naive += (calibration.judge_rate.low or 0) <= 0.7 <= (calibration.judge_rate.high or 1)
    assert held >= 17
    assert naive <= 3


def test_the_clustered_correction_covers_where_the_plain_one_does_not() -> None:
    rng = np.random.default_rng(13)
    plain = clustered = 0
    runs, clusters, size = 400, 40, 15
    for _ in range(runs):
        chance = np.repeat(rng.beta(1.4, 0.6, clusters), size)
        truth = rng.random(clusters * size) < chance
        verdicts = np.where(truth, rng.random(truth.size) < 0.95, rng.random(truth.size) < 0.4).astype(float)
        codes = np.repeat(np.arange(clusters), size)
        order = rng.permutation(truth.size)
        chosen, rest = order[:150], order[150:]
        arrays = truth[chosen].astype(float), verdicts[chosen], verdicts[rest]
        one = stats.prediction_powered_mean(*arrays)
        other = stats.prediction_powered_mean(*arrays, clusters=codes[order])
        assert one.interval is not None
        assert other.interval is not None
        plain += one.interval.contains(0.7)
        clustered += other.interval.contains(0.7)
    assert clustered / runs >= 0.93
    assert plain < clustered
