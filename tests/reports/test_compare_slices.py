"""Comparisons by slice and of repeated inputs; their coverage."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fairtrial import ConfigurationError, Dataset, EvalSuite, GateRules, Sample, compare, gate, open_store, stats
from fairtrial.reports import Comparison, EvalReport, by_input, by_metric
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.trials import EvalConfig, Experiment, StopWhen, TrialContext
from tests.reports.build import Trial, graded
from tests.reports.sides import one, two

# Comparisons of slices, and of slices with each other.


pytestmark = pytest.mark.proves("R113")


class TestSlices:
    def test_each_value_of_a_metadata_key_is_a_slice(self) -> None:
        topics = [{"topic": "maths" if place < 50 else "law"} for place in range(100)]
        report = two([0.0] * 30 + [1.0] * 70, [1.0] * 30 + [1.0] * 70, metadata=topics)
        law, maths = one(report, slice_by="topic", metrics=["passed"])["terse"].slices
        assert (law.name, law.n, law["passed"].verdict) == ("topic = law", 50, "no detectable difference")
        assert (maths.name, maths.by, maths["passed"].verdict) == ("topic = maths", "topic", "better")

    def test_slices_are_adjusted_by_benjamini_and_hochberg(self) -> None:
        rng = random.Random(4)
        topics = [{"topic": place % 4} for place in range(120)]
        sides: list[list[Trial]] = [[float(rng.random() < 0.6) for _ in range(120)] for _ in "ab"]
        found = one(two(*sides, metadata=topics), slice_by=["topic"], metrics=["passed"])["terse"]
        raw = [part["passed"].p or 0.0 for part in found.slices]
        assert [part["passed"].adjusted_p for part in found.slices] == pytest.approx(
            stats.benjamini_hochberg(raw).tolist()
        )
        assert found["passed"].adjusted_p == found["passed"].p

    def test_values_of_other_kinds_are_slices_of_their_own(self) -> None:
        values = [1, True, 1.5, "1", None, [1], {"a": 1}]
        report = two([1.0] * 7, [1.0] * 7, metadata=[{"k": value} for value in values])
        names = {part.name for part in one(report, slice_by="k")["terse"].slices}
        assert names == {"k = 1", "k = True", "k = 1.5", "k not given", "k = [1]", 'k = {"a":1}'}
        assert sum(part.n for part in one(report, slice_by="k")["terse"].slices) == 7

    def test_inputs_are_sliced_by_a_function(self) -> None:
        def size(text: str) -> str:
            return "long" if len(text) > 3 else "short"

        report = two([1.0] * 4, [0.0] * 4, inputs=["a", "bb", "cccc", "ddddd"])
        slices = one(report, slice_by=[size, by_input("starts early", lambda text: text < "c")])["terse"].slices
        assert {part.name: part.n for part in slices} == {
            "size = long": 2,
            "size = short": 2,
            "starts early": 2,
            "not starts early": 2,
        }
        with pytest.raises(ConfigurationError, match="function without a name"):
            one(report, slice_by=[lambda text: text])
        with pytest.raises(ConfigurationError, match="share a name: size, size"):
            one(report, slice_by=[size, "size"])
        with pytest.raises(ConfigurationError, match="slice_by must be metadata keys"):
            one(report, slice_by=[7])

    def test_metrics_are_cut_at_thresholds_or_into_equal_parts(self) -> None:
        base = [graded(1, words=float(n)) for n in range(8)]
        report = two([*base, 1.0], [*base, 1.0])
        cut = one(report, slice_by=by_metric("words", at=(2, 5)), metrics=["passed"])["terse"].slices
        assert {part.name: part.n for part in cut} == {
            "words < 2": 2,
            "2 <= words < 5": 3,
            "words >= 5": 3,
            "words not given": 1,
        }
        halves = one(report, slice_by=by_metric("words", quantiles=2), metrics=["passed"])["terse"].slices
        assert [part.n for part in halves] == [4, 4, 1]
        assert [part.n for part in one(report, slice_by=by_metric("words", at=100))["terse"].slices] == [8, 1]
        for wrong in ({}, {"at": 1, "quantiles": 2}):
            with pytest.raises(ConfigurationError, match="need either at="):
                by_metric("words", **wrong)
        with pytest.raises(ConfigurationError, match=r"at least 2 \(got 1"):
            by_metric("words", quantiles=1)
        with pytest.raises(ConfigurationError, match="no sample has the metric 'f1' on every side"):
            compare(report["plain"], report["terse"], slice_by=by_metric("f1", at=1))

    def test_small_slices_are_named(self) -> None:
        report = two([1.0] * 40, [1.0] * 40, metadata=[{"k": min(place, 6)} for place in range(40)])
        warnings = one(report, slice_by="k")["terse"].warnings
        assert any(
            "Slices of fewer than 30 samples show only large differences: k = 0 (1), k = 1 (1)" in text
            and "and 1 more" in text
            for text in warnings
        )

    def test_a_key_that_names_every_sample_or_none_makes_no_slices(self) -> None:
        report = two([1.0] * 101, [1.0] * 101, metadata=[{"id": place} for place in range(101)])
        with pytest.raises(ConfigurationError, match="'id' has 101 different values"):
            one(report, slice_by="id")
        with pytest.raises(ConfigurationError, match="no sample has 'topic' in its metadata"):
            one(report, slice_by="topic")
        with pytest.raises(ConfigurationError, match="nothing was read to slice by 'topic'"):
            compare_columns(Columns.of({"passed": [1.0]}), [Columns.of({"passed": [1.0]})], slice_by="topic")


class TestSlicesAgainstEachOther:
    def sides(self, clusters: list[int] | None = None, **extra: Any) -> list[Columns]:
        """Sixty samples in two slices, of which one gains and the other loses."""
        rng = np.random.default_rng(4)
        groups = {"kind": ["a"] * 30 + ["b"] * 30, "size": [["s", "m", "l"][i % 3] for i in range(60)]}
        old = (rng.random(60) < 0.5).astype(float)
        new = np.where(np.arange(60) % 3 == 0, np.repeat([1.0, 0.0], 30), old)
        sides = [{"passed": new}, {"passed": old}]
        return [
            Columns.of(values, name=name, groups=groups, clusters=clusters, **extra)
            for values, name in zip(sides, ("new", "old"), strict=True)
        ]

    def test_slices_that_change_differently_are_said_to_differ(self) -> None:
        new, old = self.sides()
        made = compare_columns(old, [new], metrics=["passed"], slice_by="kind").candidates[0]
        (test,) = made.slice_tests
        assert (test.by, test.metric, test.slices, test.n, test.differ) == ("kind", "passed", 2, 60, True)
        assert test.adjusted_p == test.p < 0.01
        assert test.sentence == f"passed: changes by kind differ from each other (p = {test.p:.3f})."
        assert made.metrics[0].verdict == "no detectable difference"
        even = compare_columns(old, [new], metrics=["passed"], slice_by="size").candidates[0].slice_tests[0]
        assert "changes by size do not differ detectably from each other (p = " in even.sentence

    def test_clusters_and_other_tests_are_allowed_for(self) -> None:
        new, old = self.sides()
        both = compare_columns(old, [new], metrics=["passed"], slice_by=["kind", "size"]).candidates[0].slice_tests
        assert [test.by for test in both] == ["kind", "size"]
        assert both[0].adjusted_p == pytest.approx(2 * both[0].p)
        assert both[0].sentence.endswith(", adjusted for 2 tests).")
        clustered = self.sides([i // 5 for i in range(60)])
        made = compare_columns(clustered[1], clustered[:1], metrics=["passed"], slice_by="kind").candidates[0]
        assert made.slice_tests[0].p != both[0].p
        few = self.sides([i // 10 for i in range(60)])
        assert not compare_columns(few[1], few[:1], metrics=["passed"], slice_by="kind").candidates[0].slice_tests

    def test_a_run_that_looked_at_its_own_results_has_no_such_test(self) -> None:
        new, old = self.sides(adaptive=60)
        assert not compare_columns(old, [new], metrics=["passed"], slice_by="kind").candidates[0].slice_tests


# Samples with the same input are treated as clusters automatically.


def ran(
    inputs: list[Any], *, metadata: Mapping[int, dict[str, Any]] | None = None, store: Any = "memory:", **settings: Any
) -> EvalReport:
    def task(given: Any, ctx: TrialContext) -> bool:
        return (int(ctx.sample.id) * 7 + (ctx.experiment.name == "b")) % 5 != 0

    facts = metadata or {}
    samples: list[Sample[Any, Any]] = [Sample(str(i), given, None, facts.get(i, {})) for i, given in enumerate(inputs)]
    suite = EvalSuite(
        "s",
        Dataset(samples),
        task,
        lambda output, expected: bool(output),
        experiments=[Experiment("a"), Experiment("b")],
        config=EvalConfig(**settings),
    )
    return suite.run_sync(store=store)


def clusters(report: EvalReport) -> int | None:
    return report["a"].estimates[0].clusters


@pytest.mark.parametrize("kept", ["memory:", "file"])
def test_samples_with_equal_inputs_are_clusters_and_one_line_says_so(kept: str, tmp_path: Path) -> None:
    inputs = [{"q": i % 40, "lang": "en"} if i < 60 else {"lang": "en", "q": i % 40} for i in range(80)]
    store = open_store(kept if kept == "memory:" else str(tmp_path / "runs.db"))
    report = ran(inputs, store=store)
    line = "40 samples repeat the input of another; they count as clusters."
    assert clusters(report) == 40
    assert line in str(report)
    comparison = compare(report["a"], report["b"])
    assert comparison["b"]["passed"].clusters == 40
    assert line in str(comparison)
    assert line in gate(report["a"], GateRules(min_pass_rate=0.1)).warnings
    assert line in gate(report["b"], GateRules(margin=0.5), report["a"]).warnings
    store.close()


def test_samples_without_repeated_inputs_stay_independent() -> None:
    report = ran([f"q{i}" for i in range(30)])
    assert clusters(report) is None
    assert "input of another" not in str(report)


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_empty_inputs_are_no_repeated_inputs(empty: Any) -> None:
    assert clusters(ran([empty] * 10 + ["x", "y"])) is None


def test_one_input_for_all_samples_is_no_cluster() -> None:
    report = ran(["Play the game."] * 20)
    assert clusters(report) is None
    assert "input of another" not in str(report)


def test_declared_clusters_win_over_equal_inputs() -> None:
    inputs = ["x", "x", "y", "y", "z", *[f"q{i}" for i in range(20)]]
    report = ran(inputs, metadata={0: {"cluster": "A"}, 1: {"cluster": "B"}, 4: {"cluster": "A"}})
    assert clusters(report) == 3 - 1 + 1 + 20  # A (0 and 4), B, the two of "y", and the others.
    said = " ".join(str(report).split())
    assert "2 samples repeat the input of another; 1 input is in more than one declared cluster, which" in said


def test_equal_inputs_are_independent_if_the_run_says_so() -> None:
    report = ran([i % 10 for i in range(40)], cluster="")
    assert clusters(report) is None
    assert "input of another" not in str(report)
    clustered = ran([i % 10 for i in range(40)])
    assert clusters(clustered) == 10
    assert compare(clustered["a"], clustered["b"], cluster="")["b"]["passed"].clusters is None


def test_a_run_that_ended_by_its_own_rule_only_says_so() -> None:
    report = ran([i % 100 for i in range(200)], stop_when=StopWhen(narrower_than=0.5))
    assert clusters(report) is None
    assert "in a run that used its own results to stop they count as independent" in " ".join(str(report).split())


# Power of whole comparisons, by seeded simulation on columns.


RUNS = 2_000
type Array = NDArray[np.float64]
type Rng = np.random.Generator


def versus(sides: Sequence[Columns], run: int, metrics: Sequence[str], **given: Any) -> Comparison:
    settings = ComparisonSettings(draws=499, seed=run)
    return compare_columns(sides[0], sides[1:], metrics=metrics, settings=settings, **given)


# --- a true difference at the reported minimum detectable effect ---------------------------------------------------

type Draw = Callable[[Rng, float], list[Columns]]


def detected(draw: Draw, rng: Rng, metric: str, metrics: Sequence[str], runs: int) -> float:
    """How often the difference that is reported as just detectable, when it is the true one, is found."""
    effect = 0.1
    for pilot in range(5):
        found = [versus(draw(rng, effect), 40 * pilot + run, metrics)["b"][metric].mde for run in range(30)]
        effect = (effect + float(np.mean([one for one in found if one is not None]))) / 2
    return sum(versus(draw(rng, effect), run, metrics)["b"][metric].verdict == "better" for run in range(runs)) / runs


def pass_fail(n: int, disagreement: float) -> Draw:
    def draw(rng: Rng, effect: float) -> list[Columns]:
        shares = [disagreement / 2 + effect, disagreement / 2, 1 - disagreement - effect]
        change = rng.choice([1.0, -1.0, 0.0], size=n, p=shares)
        noise = rng.choice([1.0, -1.0, 0.0], size=n, p=[0.1, 0.1, 0.8])
        return [
            Columns.of({"passed": np.maximum(sign * change, 0.0), "other": np.maximum(sign * noise, 0.0)}, name=name)
            for name, sign in (("a", -1), ("b", 1))
        ]

    return draw


def simulated(n: int) -> Draw:
    def draw(rng: Rng, effect: float) -> list[Columns]:
        base = rng.uniform(0.2, 0.6, n)
        a, b = base + rng.normal(0, 0.1, n), base + effect + rng.normal(0, 0.1, n)
        return [Columns.of({"value": np.clip(side, 0, 1)}, name=name) for name, side in (("a", a), ("b", b))]

    return draw


@pytest.mark.long
@pytest.mark.proves("R113")
@pytest.mark.parametrize(
    ("n", "metrics"),
    [
        (50, ["passed"]),
        (300, ["passed", "other"]),
    ],
    ids=lambda given: str(given),
)
def test_a_pass_fail_difference_at_the_reported_effect_is_found_four_times_in_five(
    n: int, metrics: Sequence[str]
) -> None:
    rng = np.random.default_rng([n, len(metrics)])
    assert 0.75 <= detected(pass_fail(n, 0.2), rng, "passed", metrics, RUNS // 2) <= 0.87


@pytest.mark.long
@pytest.mark.proves("R113")
@pytest.mark.parametrize(("n", "runs"), [(50, 500), (200, 300)])
def test_a_graded_difference_at_the_reported_effect_is_found_four_times_in_five(n: int, runs: int) -> None:
    rng = np.random.default_rng([n, 3])
    assert 0.75 <= detected(simulated(n), rng, "value", ["value"], runs) <= 0.87
