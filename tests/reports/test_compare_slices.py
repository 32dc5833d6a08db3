"""Comparisons of slices, and of slices with each other."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from fairtrial import ConfigurationError, compare, stats
from fairtrial.reports import by_input, by_metric
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.figures.columns import Columns
from tests.reports.build import Trial, graded
from tests.reports.sides import one, two

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
