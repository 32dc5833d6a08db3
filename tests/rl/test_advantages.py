"""Advantages as trainers compute them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ConfigurationError
from fairtrial.rl import advantages
from fairtrial.rl.advantages import AdvantageKind, Convention

REWARDS = [1.0, 0.0, 1.0, 1.0, 0.5, 0.5]
LABELS = ["a", "a", "a", "a", "b", "b"]
KINDS: list[AdvantageKind] = ["grpo", "dr_grpo", "rloo", "mean"]
CONVENTIONS: list[Convention] = ["trl", "verl"]


@pytest.mark.proves("R101")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # verl 0.9.1's own functions printed .5 -1.5, .25 -.75 and .333 -1; more digits are from its formulas.
        ("grpo", [0.499999, -1.499997, 0.499999, 0.499999, 0.0, 0.0]),
        ("dr_grpo", [0.25, -0.75, 0.25, 0.25, 0.0, 0.0]),
        ("rloo", [1 / 3, -1.0, 1 / 3, 1 / 3, 0.0, 0.0]),
    ],
)
def test_the_numbers_are_those_of_verl(kind: AdvantageKind, expected: list[float]) -> None:
    assert advantages(REWARDS, LABELS, kind=kind, convention="verl") == pytest.approx(expected, abs=1e-6)


@pytest.mark.proves("R101")
def test_the_numbers_are_those_of_trls_formulas() -> None:
    deviation = 0.5  # Of 1, 0, 1, 1, with one degree of freedom less.
    found = advantages(REWARDS, LABELS)
    assert found[:2] == pytest.approx([0.25 / (deviation + 1e-4), -0.75 / (deviation + 1e-4)], abs=1e-12)
    assert found != advantages(REWARDS, LABELS, convention="verl")
    assert advantages(REWARDS, LABELS, kind="rloo")[1] == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("kind", "convention", "expected"),
    [
        ("grpo", "trl", 0.0),
        ("dr_grpo", "trl", 0.0),
        ("rloo", "trl", 0.0),
        ("grpo", "verl", 0.8 / (1 + 1e-6)),
        ("dr_grpo", "verl", 0.8),
        ("rloo", "verl", 0.8),
        ("mean", "trl", 0.0),
        ("mean", "verl", 0.0),
    ],
)
def test_a_group_with_one_scored_member(kind: AdvantageKind, convention: Convention, expected: float) -> None:
    assert advantages([0.8, None], ["a", "a"], kind=kind, convention=convention) == [pytest.approx(expected), None]


@pytest.mark.proves("R101")
def test_unscored_members_are_left_out_and_stay_unscored() -> None:
    found = advantages([1.0, None, 0.0], kind="dr_grpo")
    assert found == [0.5, None, -0.5]
    assert advantages([None, None]) == [None, None]


def test_equal_rewards_have_exactly_no_advantage() -> None:
    assert advantages([0.1] * 3) == [0.0] * 3
    assert advantages([0.1] * 7, kind="rloo", convention="verl") == [0.0] * 7


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="kind of advantage must be one of grpo, dr_grpo, rloo, mean"):
        advantages([1.0], kind="ppo")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="convention must be one of trl, verl"):
        advantages([1.0], convention="art")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="each of 2 rewards"):
        advantages([1.0, 2.0], ["a"])
    with pytest.raises(ConfigurationError, match="finite number, or None"):
        advantages([1.0, math.nan])


values = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=12)


@given(values, st.sampled_from(KINDS), st.sampled_from(CONVENTIONS))
def test_advantages_of_two_or_more_scored_members_sum_to_zero(
    rewards: list[float | None], kind: AdvantageKind, convention: Convention
) -> None:
    found = [value for value in advantages(rewards, kind=kind, convention=convention) if value is not None]
    if len(found) > 1:
        assert math.fsum(found) == pytest.approx(0.0, abs=1e-6 * max(1.0, *map(abs, found)))


@given(values, st.sampled_from(KINDS), st.randoms())
def test_the_order_of_members_does_not_matter(rewards: list[float | None], kind: AdvantageKind, rng: object) -> None:
    order = list(range(len(rewards)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    found = advantages(rewards, kind=kind)
    assert advantages([rewards[at] for at in order], kind=kind) == [found[at] for at in order]


@given(values, values, st.sampled_from(KINDS))
def test_one_group_never_affects_another(
    first: list[float | None], second: list[float | None], kind: AdvantageKind
) -> None:
    labels = ["a"] * len(first) + ["b"] * len(second)
    together = advantages([*first, *second], labels, kind=kind)
    assert together == advantages(first, kind=kind) + advantages(second, kind=kind)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_leaving_one_out_is_centring_with_a_factor(rewards: list[float]) -> None:
    count = len(rewards)
    centred = advantages(rewards, kind="mean")
    left_out = advantages(rewards, kind="rloo")
    for one, other in zip(centred, left_out, strict=True):
        assert one is not None
        assert other == pytest.approx(one * count / (count - 1), abs=1e-9)
