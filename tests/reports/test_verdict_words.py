"""Verdicts in words, and the thresholds behind them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fairtrial.reports.figures
from fairtrial import ConfigurationError, GateRules, Metric, Score, calibrate, compare, gate, leaderboard, stats
from fairtrial.base import formatting
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import FAILED, MISSING, SCORED
from fairtrial.reports.figures.rules import SliceRule
from fairtrial.reports.gate.gate import gate_columns
from tests.reports.build import stored
from tests.reports.sides import one, two

# The words of verdicts: "better" and "worse" need a direction, a number of samples needs a stated difference.


RNG = np.random.default_rng(5)
LOW, HIGH = RNG.uniform(0.1, 0.3, 60), RNG.uniform(0.4, 0.6, 60)


def sides(**changes: object) -> list[Columns]:
    return [
        Columns.of({"passed": np.ones(60), "toxicity": values}, name=name, **changes)  # type: ignore[arg-type]
        for name, values in (("old", LOW), ("new", HIGH))
    ]


def verdict(settings: ComparisonSettings | None = None, **changes: object) -> tuple[str, str]:
    found = compare_columns(*_split(sides(**changes)), metrics=["toxicity"], settings=settings)["new"]["toxicity"]
    return found.verdict, found.sentence


def _split(columns: list[Columns]) -> tuple[Columns, list[Columns]]:
    return columns[0], columns[1:]


class TestDirection:
    def test_without_a_declared_direction_nothing_is_better(self) -> None:
        word, said = verdict()
        assert word == "higher"
        assert said.startswith("toxicity: new is higher than old: ")
        assert said.endswith(
            "Declare which way is better with lower_is_better or higher_is_better (--lower-is-better, "
            "--higher-is-better)."
        )
        assert "better than" not in said

    def test_a_direction_may_come_from_the_caller_or_from_the_metric(self) -> None:
        assert verdict(ComparisonSettings(lower_is_better=frozenset({"toxicity"})))[0] == "worse"
        assert verdict(ComparisonSettings(higher_is_better=frozenset({"toxicity"})))[0] == "better"
        assert verdict(directions={"toxicity": False})[0] == "worse"
        assert verdict(directions={"toxicity": True})[0] == "better"
        # What the caller says comes first.
        assert verdict(ComparisonSettings(lower_is_better=frozenset({"toxicity"})), directions={"toxicity": True})[
            0
        ] == ("worse")

    @pytest.mark.parametrize("passed", [None, True])
    def test_a_metric_declares_its_direction_in_the_score(self, passed: bool | None) -> None:
        def trial(value: float) -> Score:
            return Score(1.0, metrics=[Metric("toxicity", value, passed=passed, higher_is_better=False)])

        report = stored({"old": [trial(value) for value in LOW], "new": [trial(value) for value in HIGH]})
        kept = next(iter(report["old"].results)).score
        assert kept is not None
        assert kept.metrics[0].higher_is_better is False
        assert compare(report["old"], report["new"], metrics="toxicity")["new"]["toxicity"].verdict == "worse"
        with pytest.raises(TypeError, match="higher_is_better of metric 'toxicity' must be True, False or None"):
            Metric("toxicity", 0.5, higher_is_better="no")  # type: ignore[arg-type]  # that is the mistake

    def test_an_error_is_never_the_best_value(self) -> None:
        outcomes = np.where(np.arange(60) < 30, FAILED, SCORED)
        values = np.where(np.arange(60) < 30, np.nan, HIGH)
        new = Columns.of({"toxicity": values}, name="new", outcomes=outcomes, ranges={"toxicity": (0.0, 1.0)})
        old = sides()[0]
        whole = compare_columns(old, [new], metrics=["toxicity"])["new"]
        assert (whole["toxicity"].n, whole["toxicity"].uncounted) == (30, 30)
        told = "toxicity declares no direction and so no worst value: 30 failed trials could not be counted"
        assert any(warning.startswith(told) for warning in whole.warnings)
        lower = ComparisonSettings(lower_is_better=frozenset({"toxicity"}))
        counted = compare_columns(old, [new], metrics=["toxicity"], settings=lower)["new"]["toxicity"]
        assert counted.n == 60
        assert counted.candidate is not None
        assert counted.candidate > 0.7

    def test_a_margin_needs_a_direction(self) -> None:
        old, new = sides()
        with pytest.raises(ConfigurationError, match="a margin on 'toxicity' needs to know which way is better"):
            gate_columns(new, GateRules(margins={"toxicity": 0.1}), old)
        assert (
            gate_columns(new, GateRules(margins={"toxicity": 0.1}, lower_is_better=("toxicity",)), old).status == "fail"
        )
        assert gate_columns(new, GateRules(margins={"toxicity": 0.1}, higher_is_better=("toxicity",)), old).passed


def pairs(n: int, wins: int, losses: int) -> tuple[Columns, list[Columns]]:
    change = np.repeat([1.0, -1.0, 0.0], [wins, losses, n - wins - losses])
    return (
        Columns.of({"passed": np.maximum(-change, 0.0)}, name="old"),
        [Columns.of({"passed": np.maximum(change, 0.0)}, name="new")],
    )


class TestTheDifferenceThatMatters:
    def test_an_interval_within_it_makes_two_sides_as_good_as_each_other(self) -> None:
        found = compare_columns(*pairs(2000, 40, 42), metrics=["passed"])["new"]["passed"]
        assert found.verdict == "as good as"
        assert found.sentence.startswith("passed: new is as good as old, within 5.0 points: ")
        strict = ComparisonSettings(smallest_difference_that_matters=0.005)
        assert compare_columns(*pairs(2000, 40, 42), metrics=["passed"], settings=strict)["new"].verdict == (
            "no detectable difference"
        )

    @pytest.mark.parametrize(
        ("missing", "verdict"), [(0, "as good as"), (10, "as good as"), (45, "no detectable difference")]
    )
    def test_as_good_as_must_hold_whatever_the_missing_pairs_would_have_been(self, missing: int, verdict: str) -> None:
        passes: list[float | str] = [1.0] * 900
        report = two([*passes, *[0.0] * 100], [*passes[missing:], *["scorer_error"] * missing, *[0.0] * 100])
        compared = one(report, metrics="passed", smallest_difference_that_matters=0.02)["terse"]
        found = compared["passed"]
        assert (found.verdict, found.missing) == (verdict, missing)
        assert found.scored_only is not None
        assert found.scored_only.verdict == verdict
        if not missing:
            assert found.worst is None
            return
        assert found.worst is not None
        low, high = found.worst
        assert low < -missing / 1000 < 0 < high
        said = f"the difference is {formatting.range_text(low, high, percent=True)} in passed."
        assert any(text.endswith(said) for text in compared.warnings)

    def test_without_a_declared_range_missing_pairs_could_be_anything(self) -> None:
        values = np.linspace(3, 4, 400)
        values[0] = np.nan
        old, new = (
            Columns.of({"passed": np.ones(400), "depth": one}, name=name)
            for name, one in (("old", values), ("new", values + np.resize([-0.01, 0.01], 400)))
        )
        wide = ComparisonSettings(smallest_difference_that_matters={"depth": 0.5})
        bounded = replace(wide, bounds={"depth": (0.0, 5.0)})
        found = compare_columns(old, [new], metrics=["depth"], settings=wide)["new"]["depth"]
        assert (found.verdict, found.missing, found.worst) == ("no detectable difference", 1, None)
        found = compare_columns(old, [new], metrics=["depth"], settings=bounded)["new"]["depth"]
        assert (found.verdict, found.missing) == ("as good as", 1)

    def test_a_difference_too_small_to_matter_is_said_to_be(self) -> None:
        found = compare_columns(*pairs(4000, 80, 20), metrics=["passed"])["new"]["passed"]
        assert found.verdict == "better"
        assert found.sentence.endswith("That is less than the 5.0 points that matter.")

    def test_the_number_of_samples_does_not_depend_on_the_observed_difference(self) -> None:
        needed = {
            compare_columns(*pairs(100, wins, 20 - wins), metrics=["passed"])["new"]["passed"].needed
            for wins in (8, 10, 13)
        }
        assert len(needed) == 1
        found = compare_columns(*pairs(100, 8, 12), metrics=["passed"])["new"]["passed"]
        assert "Detecting a difference of 5.0 points four times in five takes about 790 samples." in found.sentence

    @pytest.mark.parametrize(
        ("won", "lost", "most"),
        [(0.15, 0.10, 0.84), (0.125, 0.075, 0.91)],
        ids=["beside what cancels out", "within what was seen"],
    )
    def test_the_number_of_samples_finds_it_at_least_four_times_in_five(
        self, won: float, lost: float, most: float
    ) -> None:
        needed = compare_columns(*pairs(100, 10, 10), metrics=["passed"])["new"]["passed"].needed
        assert needed is not None
        drawn = np.random.default_rng(2).multinomial(needed, [won, lost, 1 - won - lost], size=2000)
        lows = [stats.bonett_price(wins, losses, needed).low for wins, losses, _ in drawn.tolist()]  # type: ignore[union-attr]
        assert 0.77 <= np.mean(np.array(lows) > 0) <= most

    def test_few_unequal_pairs_promise_nothing(self) -> None:
        found = compare_columns(*pairs(40, 5, 4), metrics=["passed"])["new"]["passed"]
        assert found.needed is None
        assert "takes about" not in found.sentence

    def test_clusters_are_counted_in_clusters(self) -> None:
        rng = np.random.default_rng(4)
        labels = np.repeat(np.arange(12), 10)
        old, new = (
            Columns.of({"passed": (rng.random(120) < 0.7).astype(float)}, name=name, clusters=labels)
            for name in ("old", "new")
        )
        found = compare_columns(old, [new], metrics=["passed"])["new"]["passed"]
        assert found.needed is not None
        assert "clusters like these (" in found.sentence

    @pytest.mark.parametrize("value", [0, -1, "5", {"passed": 0}])
    def test_it_must_be_above_0(self, value: object) -> None:
        report = stored({"a": [1.0, 0.0], "b": [1.0, 1.0]})
        with pytest.raises(ConfigurationError, match=r"smallest_difference_that_matters.* must be a number above 0"):
            compare(report["a"], report["b"], smallest_difference_that_matters=value)  # type: ignore[arg-type]


counts = st.integers(0, 60)


@pytest.mark.proves("R150")
class TestSentencesThatCannotOccur:
    @settings(max_examples=60, deadline=None)
    @given(wins=counts, losses=counts, ties=counts, margin=st.sampled_from([0.01, 0.05, 0.2]))
    def test_a_gate_does_not_fail_inside_the_margin(self, wins: int, losses: int, ties: int, margin: float) -> None:
        n = wins + losses + ties
        if not n:
            return
        baseline, (candidate,) = pairs(n, wins, losses)
        check = gate_columns(candidate, GateRules(margin=margin), baseline).checks[0]
        assert check.low is not None
        assert check.high is not None
        assert (check.status == "fail") == (check.high < -margin)
        assert (check.status == "pass") == (check.low > -margin)

    @settings(max_examples=60, deadline=None)
    @given(passed=counts, failed=counts, hidden=st.integers(0, 20), floor=st.sampled_from([0.3, 0.8, 0.95]))
    def test_a_gate_does_not_pass_what_hidden_failures_would_fail(
        self, passed: int, failed: int, hidden: int, floor: float
    ) -> None:
        n = passed + failed + hidden
        if not passed + failed:
            return
        values = np.repeat([1.0, 0.0, np.nan], [passed, failed, hidden])
        outcomes = np.repeat([SCORED, SCORED, MISSING], [passed, failed, hidden])
        rules = GateRules(min_pass_rate=floor, max_missing_share=1.0)
        seen = gate_columns(Columns.of({"passed": values}, outcomes=outcomes), rules)
        truth = gate_columns(Columns.of({"passed": np.repeat([1.0, 0.0], [passed, n - passed])}), rules)
        assert not seen.passed or truth.passed
        if hidden > 0.05 * n:
            assert (
                gate_columns(Columns.of({"passed": values}, outcomes=outcomes), GateRules(min_pass_rate=floor)).status
                == "inconclusive"
            )

    @settings(max_examples=40, deadline=None)
    @given(n=st.integers(1, 30), metrics=st.integers(1, 4), clusters=st.integers(0, 8))
    def test_the_largest_possible_difference_is_never_no_detectable_one(
        self, n: int, metrics: int, clusters: int
    ) -> None:
        labels = np.arange(n) % clusters if clusters else None
        rng = np.random.default_rng(n)
        others = {f"m{place}": rng.integers(0, 2, n).astype(float) for place in range(metrics - 1)}
        old, new = (
            Columns.of({"passed": np.full(n, value), **{k: rng.permutation(v) for k, v in others.items()}},
                       name=name, clusters=labels)
            for name, value in (("old", 1.0), ("new", 0.0))
        )  # fmt: skip
        names = ["passed", *others]
        found = compare_columns(old, [new], metrics=names, settings=ComparisonSettings(draws=199))["new"]["passed"]
        assert "no detectable difference" not in found.sentence

    @settings(max_examples=40, deadline=None)
    @given(shift=st.floats(-0.5, 0.5), n=st.integers(2, 40), seed=st.integers(0, 1000))
    def test_nothing_is_better_or_worse_without_a_direction(self, shift: float, n: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        old = rng.uniform(0, 1, n)
        new = np.clip(old + shift + rng.normal(0, 0.05, n), 0, 1)
        made = [Columns.of({"toxicity": values}, name=name) for name, values in (("old", old), ("new", new))]
        found = compare_columns(made[0], made[1:], metrics=["toxicity"], settings=ComparisonSettings(draws=199))["new"]
        assert found.verdict not in ("better", "worse")
        assert " is better than" not in found["toxicity"].sentence
        assert " is worse than" not in found["toxicity"].sentence

    @settings(max_examples=30, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 12), min_size=1, max_size=7),
        repeats=st.integers(1, 3),
        metrics=st.integers(1, 3),
        candidates=st.integers(1, 2),
    )
    def test_the_largest_possible_difference_of_unequal_clusters_and_repeats_is_never_no_detectable_one(
        self, sizes: list[int], repeats: int, metrics: int, candidates: int
    ) -> None:
        labels = np.repeat(np.arange(len(sizes)), sizes)
        shape = (labels.size, repeats)
        rng = np.random.default_rng(sum(sizes))
        others = {f"m{place}": rng.uniform(0, 1, shape) for place in range(metrics - 1)}
        old, *new = (
            Columns.of({"passed": np.full(shape, value), **others}, name=name, clusters=labels)
            for name, value in [("old", 1.0), *((f"new{place}", 0.0) for place in range(candidates))]
        )
        found = compare_columns(old, new, metrics=["passed", *others], settings=ComparisonSettings(draws=199))
        for candidate in found.candidates:
            assert candidate["passed"].verdict in ("worse", "unknown", "no detectable difference")
            assert "no detectable difference" not in candidate["passed"].sentence
            assert "as good as" not in candidate["passed"].sentence

    @settings(max_examples=30, deadline=None)
    @given(
        seed=st.integers(0, 1000), n=st.integers(4, 30), failed=st.integers(0, 10), scale=st.sampled_from([1.0, 50.0])
    )
    def test_no_sentence_of_a_comparison_calls_a_metric_without_a_direction_better_or_worse(
        self, seed: int, n: int, failed: int, scale: float
    ) -> None:
        rng = np.random.default_rng(seed)
        made = []
        for name, shift in (("old", 0.0), ("new", 0.4)):
            outcomes = np.where(rng.permutation(n) < failed, FAILED, SCORED)
            values = np.where(outcomes == SCORED, scale * np.clip(rng.uniform(0, 0.6, n) + shift, 0, 1), np.nan)
            groups = {"kind": ["a", "b"] * (n // 2) + ["a"] * (n % 2)}
            made.append(Columns.of({"toxicity": values}, name=name, outcomes=outcomes, groups=groups))
        found = compare_columns(
            made[0], made[1:], metrics=["toxicity"], slice_by="kind", settings=ComparisonSettings(draws=199)
        )["new"]
        said = [found["toxicity"], *(part["toxicity"] for part in found.slices)]
        assert {one.verdict for one in said}.isdisjoint({"better", "worse"})
        text = " ".join([*(one.sentence for one in said), *found.warnings])
        assert "is better than" not in text
        assert "is worse than" not in text

    @settings(max_examples=40, deadline=None)
    @given(
        seed=st.integers(0, 1000),
        part=st.floats(0.3, 2),
        margin=st.sampled_from([0.02, 0.1]),
        clusters=st.booleans(),
        repeats=st.integers(1, 2),
        lower=st.booleans(),
    )
    def test_no_gate_fails_for_a_loss_inside_the_margin_nor_passes_one_beyond_it(
        self, seed: int, part: float, margin: float, clusters: bool, repeats: int, lower: bool
    ) -> None:
        rng = np.random.default_rng(seed)
        shape = (48, repeats)
        old = rng.uniform(0.4, 0.6, shape)
        change = rng.normal(-part * margin, margin, shape)
        new = np.clip(old - change if lower else old + change, 0, 1)
        labels = np.arange(48) // 6 if clusters else None
        rules = GateRules(
            margins={"score": margin}, floors={"value": 0.0}, lower_is_better=("score",) if lower else (),
            higher_is_better=() if lower else ("score",),
        )  # fmt: skip
        sides = [
            Columns.of({"score": one, "value": old}, name=name, clusters=labels)
            for name, one in (("new", new), ("old", old))
        ]
        result = gate_columns(sides[0], rules, sides[1], settings=ComparisonSettings(draws=199))
        check = next(one for one in result.checks if one.kind == "margin")
        assert check.value is not None
        observed = -check.value if lower else check.value
        if check.status == "fail":
            assert observed < -margin
            assert f"more than the {margin:.3f} allowed" in check.reason
        if check.status == "pass":
            assert observed > -margin

    @settings(max_examples=40, deadline=None)
    @given(
        seed=st.integers(0, 1000),
        hidden=st.integers(1, 12),
        kind=st.sampled_from(["rate", "score", "quantile", "margin", "slice"]),
        clusters=st.booleans(),
    )
    def test_no_rule_passes_that_the_hidden_numbers_could_have_failed(
        self, seed: int, hidden: int, kind: str, clusters: bool
    ) -> None:
        """Whatever is hidden is then revealed at its worst: the gate must not have passed unless it passes then."""
        rng = np.random.default_rng(seed)
        n = 120
        worst = {"quantile": 1e9}.get(kind, 0.0)
        values = rng.uniform(1, 2, n) if kind == "quantile" else rng.uniform(0.7, 1, n)
        if kind in ("rate", "margin", "slice"):
            values = (rng.random(n) < 0.95).astype(float)
        metric = {"score": "value", "quantile": "words"}.get(kind, "passed")
        gone = rng.permutation(n) < hidden
        rules = {
            "rate": GateRules(min_pass_rate=0.85, max_missing_share=1.0),
            "score": GateRules(floors={"value": 0.75}, max_missing_share=1.0),
            "quantile": GateRules(ceilings={"p95:words": 2.5}, max_missing_share=1.0),
            "margin": GateRules(margin=0.1, max_missing_share=1.0),
            "slice": GateRules(slices=(SliceRule("kind", "a", min_pass_rate=0.8),), max_missing_share=1.0),
        }[kind]
        labels = np.arange(n) // 4 if clusters else None
        groups = {"kind": ["a" if place % 2 else "b" for place in range(n)]}
        baseline = Columns.of({metric: values}, name="old", clusters=labels) if kind == "margin" else None

        def decided(seen: Columns) -> str:
            return gate_columns(seen, rules, baseline, settings=ComparisonSettings(draws=199)).status

        outcomes = np.where(gone, MISSING, SCORED)
        shown = Columns.of(
            {metric: np.where(gone, np.nan, values)}, name="new", outcomes=outcomes, clusters=labels, groups=groups
        )
        revealed = Columns.of({metric: np.where(gone, worst, values)}, name="new", clusters=labels, groups=groups)
        assert decided(shown) != "pass" or decided(revealed) == "pass"


# Numbers at which the analysis says something else, and those that hold unless others are given.


USUAL = {"level": 0.95, "alpha": 0.05, "power": 0.8, "worst": 0.0, "by_verdict": False}
MORE = {"max_missing_share": 0.05, "spend_alpha": False, "seed": 0, "attempt": 1, "at_random": False, "costs": False}


def defaults() -> Iterator[tuple[str, str, Any]]:
    """Every default of a parameter or field in the package: where, its name, its value."""
    for found in pkgutil.walk_packages(fairtrial.reports.__path__, "fairtrial.reports."):
        module = importlib.import_module(found.name)
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", None) != module.__name__:
                continue
            if dataclasses.is_dataclass(thing):
                for field in dataclasses.fields(thing):
                    yield f"{found.name}.{name}", field.name, field.default
            parts = vars(thing).values() if isinstance(thing, type) else [thing]
            for part in parts:
                if inspect.isfunction(part) and part.__name__ != "__init__":
                    for parameter in inspect.signature(part).parameters.values():
                        yield f"{found.name}.{part.__qualname__}", parameter.name, parameter.default


def test_the_same_words_have_the_same_defaults_everywhere() -> None:
    seen = set()
    for where, name, value in defaults():
        expected = (USUAL | MORE).get(name)
        given = value not in (inspect.Parameter.empty, dataclasses.MISSING, None)
        if name in USUAL | MORE and given:
            assert (value, type(value)) == (expected, type(expected)), f"{where}: {name}"
            seen.add(name)
    assert seen == {*USUAL, *MORE}


@pytest.mark.parametrize(
    ("pairs", "told"), [(29, ["Only 29 pairs: only large differences can be detected."]), (30, [])]
)
def test_fewer_than_30_pairs_are_few(pairs: int, told: list[str]) -> None:
    found = one(two([1.0, *[0.0] * (pairs - 1)], [0.0, *[1.0] * (pairs - 1)]), metrics=["passed"])
    assert [warning for warning in found.candidates[0].warnings if warning.startswith("Only ")] == told
    ranked = leaderboard(two([1.0] * pairs, [0.0] * pairs)).warnings
    assert [warning for warning in ranked if warning.startswith("Only ")] == [
        warning.replace("pairs", "samples") for warning in told
    ]


def test_a_slice_of_fewer_than_30_samples_is_small() -> None:
    sizes = {"a": 29, "b": 30, **{f"c{place}": place for place in range(1, 6)}}
    topics = [{"topic": name} for name, size in sizes.items() for _ in range(size)]
    values: list[Any] = [1.0] * len(topics)
    found = one(two(values, values, metadata=topics), slice_by="topic").candidates[0]
    (told,) = (warning for warning in found.warnings if warning.startswith("Slices of fewer"))
    assert told == (
        "Slices of fewer than 30 samples show only large differences: topic = a (29), topic = c1 (1), topic = c2 (2), "
        "topic = c3 (3), topic = c4 (4) and 1 more."
    )


def test_a_key_has_at_most_100_slices() -> None:
    def sliced(values: int) -> int:
        topics = [{"topic": place} for place in range(values)]
        trials: list[Any] = [1.0] * values
        return len(one(two(trials, trials, metadata=topics), slice_by="topic").candidates[0].slices)

    assert sliced(100) == 100
    with pytest.raises(
        ConfigurationError, match="'topic' has 101 different values; slice by something with at most 100"
    ):
        sliced(101)


def test_a_comparison_names_100_samples_that_flipped() -> None:
    values: list[Any] = [1.0] * 120
    flips = one(two(values, [0.0] * 120)).candidates[0].flips
    assert (len(flips.lost), flips.lost_count) == (100, 120)


@pytest.mark.parametrize(("labels", "few"), [(1, "1 label is"), (29, "29 labels are"), (30, None)])
def test_fewer_than_30_labels_are_few(labels: int, few: str | None) -> None:
    report = stored([1.0, 0.0] * 20)
    found = calibrate(report, {f"s{place}": place % 2 == 0 for place in range(labels)})
    told = [warning for warning in found.warnings if "too few to assess" in warning]
    assert told == ([] if few is None else [f"{few} too few to assess a judge: start with 30 to 100."])


def test_a_sentence_names_four_systems_that_may_be_the_best() -> None:
    def sentence(good: int) -> str:
        systems = {f"good{place}": [1.0] * 195 + [0.0] * 5 for place in range(good)} | {"bad": [0.0] * 200}
        return leaderboard(stored(systems)).sentence

    assert sentence(4).endswith(
        "4 of 5 systems may be the best: " + ", ".join(f"good{n} (97.5%)" for n in range(4)) + "."
    )
    assert sentence(6).endswith("good3 (97.5%) and 2 more.")


@pytest.mark.parametrize(("missing", "cautious"), [(5, False), (6, True)])
def test_an_order_with_more_than_a_twentieth_missing_may_be_biased(missing: int, cautious: bool) -> None:
    trials: list[Any] = [1.0] * (100 - missing) + ["scorer_error"] * missing
    (told,) = (
        warning for warning in leaderboard(two([1.0] * 100, trials)).warnings if "without a score of every" in warning
    )
    assert told.endswith("are left out: if they differ from the others, the order is biased.") == cautious


def test_a_rare_loss_is_said_to_be_unseen_below_3_pairs_in_the_margin() -> None:
    def told(n: int) -> str:
        values: list[Any] = [0.5, 0.75] * (n // 2)
        report = two(values, values)
        return gate(report["terse"], GateRules(margins={"value": 0.1}), baseline=report["plain"]).reasons[0]

    assert "A large loss in fewer than 10.7% of the pairs may not be among these 28." in told(28)
    assert "A large loss" not in told(30)


def test_exit_codes_tell_what_a_gate_decided() -> None:
    codes = {}
    for passes in (200, 162, 140):
        found = gate(stored([1.0] * passes + [0.0] * (200 - passes)), GateRules(min_pass_rate=0.8))
        codes[found.status] = found.exit_code
    assert codes == {"pass": 0, "inconclusive": 3, "fail": 1}


def test_a_comparison_with_itself_is_mentioned() -> None:
    report = stored([1.0, 0.0] * 20)
    assert "An experiment is compared with itself." in compare(report, report).warnings
