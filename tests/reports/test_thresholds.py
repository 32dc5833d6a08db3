"""Numbers at which the analysis says something else, and those that hold unless others are given."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import fairtrial.reports.figures
from fairtrial import ConfigurationError, GateRules, calibrate, compare, gate, leaderboard
from tests.reports.build import stored
from tests.reports.sides import one, two

USUAL = {"level": 0.95, "alpha": 0.05, "power": 0.8, "worst": 0.0, "by_verdict": False}
MORE = {"max_missing_share": 0.05, "spend_alpha": False, "seed": 0, "attempt": 1, "at_random": False, "costs": False}


def defaults() -> Iterator[tuple[str, str, Any]]:
    """Every default of a parameter or field in the package: where, its name, its value."""
    for found in pkgutil.iter_modules(fairtrial.reports.figures.__path__):
        module = importlib.import_module(f"fairtrial.reports.figures.{found.name}")
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
