"""Looks at a test split: every new pair is one, showing it again is none, and alpha is spent over all of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fairtrial import (
    AnalysisPlan,
    ConfigurationError,
    Dataset,
    EvalReport,
    EvalSuite,
    Experiment,
    GateRules,
    Sample,
    TrialContext,
    compare,
    gate,
    leaderboard,
    plan,
)
from fairtrial.base.formatting import samples_text, size_text
from fairtrial.data.splits import Splits
from fairtrial.reports.bundle import open_bundle, write_bundle
from fairtrial.reports.compare.looks import TestLooks, ordinal
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import RunStore
from fairtrial.store.sql import SqlStore

SPLITS: Splits[int, Any] = Dataset([Sample(f"s{n}", n) for n in range(120)], name="support").split(seed=2)
SIZE = len(SPLITS.test)


class Prompts:
    """Runs of one suite on a split, with prompts that pass at random."""

    def __init__(self, store: RunStore, dataset: Dataset[int, Any] = SPLITS.test, **settings: Any) -> None:
        self.store, self.dataset, self.settings = store, dataset, settings

    async def run(self, seed: int, rate: float = 0.7) -> EvalReport[Any]:
        def answer(number: int) -> bool:
            return random.Random(f"{seed} {number}").random() < rate

        suite = EvalSuite("support", self.dataset, answer, lambda output, expected: float(output))
        report: EvalReport[Any] = await suite.run(store=self.store, resume="never", **self.settings)
        return report


async def test_each_new_pair_is_a_look_and_showing_it_again_is_none() -> None:
    prompts = Prompts(MemoryStore())
    baseline, first, second = [await prompts.run(seed) for seed in range(3)]
    made = compare(baseline, first)
    assert made.looks == TestLooks(SPLITS.test.fingerprint, SIZE, (1,), 0.05, False)
    assert f"First look at this test split ({SIZE} samples)." in made.to_markdown()
    assert made.alpha == 0.05
    assert "Second look at this test split" in compare(baseline, second).to_markdown()
    for again in (compare(baseline, first), compare(first, baseline)):
        assert again.looks is not None
        assert again.looks.numbers == (1,)
    third = compare(first, second).to_markdown()
    assert f"Third look at this test split ({SIZE} samples). Each further look makes it more likely" in third
    decided = gate(second, GateRules(margin=0.3), baseline)
    assert decided.looks is not None
    assert decided.looks.numbers == (2,)
    assert "Second look at this test split" in decided.to_markdown()
    assert decided.to_json()["looks"] == compare(baseline, second).to_json()["looks"]


async def test_only_the_test_split_counts_looks() -> None:
    store = MemoryStore()
    for dataset in (SPLITS.train, SPLITS.validation, Dataset(SPLITS.test.samples)):
        prompts = Prompts(store, dataset)
        made = compare(await prompts.run(1), await prompts.run(2))
        assert made.looks is None
        assert "look" not in made.to_markdown()
    test, other = Prompts(store), Prompts(store, SPLITS.test.head(9))
    baseline = await test.run(1)
    assert compare(baseline, await Prompts(store, SPLITS.train).run(1), metrics="passed").looks is None
    assert compare(baseline, baseline).looks is None
    part = compare(baseline, await other.run(2)).looks
    assert part is not None
    assert (part.numbers, part.samples) == ((1,), SIZE)  # A part of the split is a look at it.
    assert len(store.looks(SPLITS.test.fingerprint)) == 1


async def test_candidates_that_are_compared_together_are_looks_each() -> None:
    store = MemoryStore()
    prompts = Prompts(store, plan=AnalysisPlan(tests=3, looks=True))
    baseline, *candidates = [await prompts.run(seed) for seed in range(4)]
    made = compare(baseline, *candidates)
    assert made.looks is not None
    assert made.looks.numbers == (1, 2, 3)
    assert made.alpha == pytest.approx(3 * 0.05 / 12)
    assert "Looks 1 to 3 at this test split" in made.to_markdown()
    assert compare(baseline, candidates[0]).alpha == pytest.approx(0.05 / 2)


async def test_each_new_pair_of_a_leaderboard_is_a_look_and_showing_it_again_is_none() -> None:
    prompts = Prompts(MemoryStore())
    first, second, third, fourth = [await prompts.run(seed) for seed in range(4)]
    compare(first, second)
    made = leaderboard(first, second, third)
    assert made.warnings[0].startswith(f"Looks 1 to 3 at this test split ({SIZE} samples). Each further look makes it")
    assert made.alpha == 0.05
    assert made.warnings[0] in made.to_markdown()
    assert leaderboard(third, second, first).warnings[0] == made.warnings[0]
    assert len(prompts.store.looks(SPLITS.test.fingerprint)) == 3
    fourth_look = compare(first, fourth).looks
    assert fourth_look is not None
    assert fourth_look.numbers == (4,)
    again = compare(third, second).looks
    assert again is not None
    assert again.numbers[0] in (2, 3)


async def test_the_level_of_a_leaderboard_is_spent_over_looks_if_the_plan_says_so() -> None:
    prompts = Prompts(MemoryStore(), plan=AnalysisPlan(looks=True, alpha=0.04))
    systems = [await prompts.run(seed) for seed in range(3)]
    made = leaderboard(*systems)
    assert made.alpha == pytest.approx(3 * 0.04 / 12)
    assert "Looks 1 to 3" in made.warnings[0]
    assert "its level is 1%, so that all looks together stay within 4%." in made.warnings[0]
    pair = compare(systems[0], systems[1], systems[2])
    assert pair.alpha == pytest.approx(2 * 0.04 / 6)
    smaller = leaderboard(*systems, alpha=0.012)
    assert smaller.alpha == pytest.approx(0.003)


async def test_a_leaderboard_off_the_test_split_is_no_look() -> None:
    store = MemoryStore()
    validation = Prompts(store, SPLITS.validation, plan=AnalysisPlan(looks=True))
    made = leaderboard(await validation.run(1), await validation.run(2))
    assert made.alpha == 0.05
    assert "look" not in made.to_markdown()
    assert not store.looks(SPLITS.test.fingerprint)


async def test_a_plan_with_looks_spends_alpha_over_all_of_them() -> None:
    prompts = Prompts(MemoryStore(), plan=AnalysisPlan(looks=True, margin=0.3))
    baseline = await prompts.run(0)
    spent, candidates = 0.0, [await prompts.run(seed) for seed in range(1, 4)]
    for number, candidate in enumerate(candidates, 1):
        made = compare(baseline, candidate)
        assert made.alpha == pytest.approx(0.05 / (number * (number + 1)))
        assert made.plan is not None
        assert not [line for line in made.plan.deviations if "alpha" in line or "look" in line]
        spent += made.alpha
    assert spent < 0.05
    text = compare(baseline, candidates[2]).to_markdown()
    assert "Third look at this test split" in text
    assert "its level is 0.417%, so that all looks together stay within 5%." in text
    assert "99.583% interval" in text
    own = compare(baseline, candidates[2], alpha=0.2)
    assert own.alpha == pytest.approx(0.2 / 12)
    assert own.plan is not None
    assert "alpha is 0.2, planned was 0.05" in own.plan.deviations


async def test_a_gate_spends_from_the_same_ledger() -> None:
    prompts = Prompts(MemoryStore(), plan=AnalysisPlan(looks=True, margin=0.3))
    baseline, *candidates = [await prompts.run(seed) for seed in range(4)]
    compare(baseline, *candidates)
    decided = gate(candidates[2], None, baseline)
    assert decided.looks is not None
    assert decided.looks.numbers == (3,)
    assert decided.comparison is not None
    assert decided.comparison.alpha == pytest.approx(0.05 / 12)
    both = gate(candidates[2], GateRules(margin=0.3, spend_alpha=True), baseline).comparison
    assert both is not None
    assert both.alpha == pytest.approx(0.05 / 12)


async def test_a_plan_with_looks_on_other_data_is_a_deviation() -> None:
    prompts = Prompts(MemoryStore(), SPLITS.validation, plan=AnalysisPlan(looks=True))
    made = compare(await prompts.run(1), await prompts.run(2))
    assert made.plan is not None
    assert "the runs are not on a test split, so that looks at it are not allowed for" in made.plan.deviations
    assert made.alpha == 0.05


async def test_after_ten_looks_fresh_samples_are_recommended_with_their_number() -> None:
    store = MemoryStore()
    prompts = Prompts(store, plan=AnalysisPlan(looks=True))
    baseline, candidate = await prompts.run(0), await prompts.run(1, 0.2)
    store.record_looks(SPLITS.test.fingerprint, [f"other{number}" for number in range(8)])
    assert "fresh samples" not in compare(baseline, await prompts.run(2)).to_markdown()
    made = compare(baseline, candidate)
    assert made.looks is not None
    assert made.looks.numbers == (10,)
    other = MemoryStore()
    first = compare(*(stored_elsewhere(one, other) for one in (baseline, candidate)))
    assert first.looks is not None
    assert first.looks.numbers == (1,)
    assert made.looks.fresh == first.candidates[0]["passed"].needed
    assert made.looks.fresh is not None
    expected = f"about {samples_text(made.looks.fresh)} detect the smallest difference that matters at the first look."
    assert f"After 10 looks, test on fresh samples: {expected}" in made.to_markdown()
    decided = gate(candidate, GateRules(margin=0.3), baseline)
    assert decided.looks is not None
    assert decided.looks.fresh == made.looks.fresh


def stored_elsewhere(report: EvalReport[Any], store: MemoryStore) -> EvalReport[Any]:
    """The same results in a store that has seen no look."""
    store.create_run(report.run)
    store.commit(report.run_id, list(report.store.results(report.run_id)))
    return EvalReport(store, store.get_run(report.run_id))


async def test_a_look_that_cannot_be_recorded_is_shown_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    prompts = Prompts(SqlStore.sqlite(path))
    baseline, first, second = [await prompts.run(seed) for seed in range(3)]
    compare(baseline, first)
    store = SqlStore.sqlite(path, read_only=True)
    sides = [EvalReport(store, store.get_run(one.run_id)) for one in (baseline, first, second)]
    known, new = compare(sides[0], sides[1]).looks, compare(sides[0], sides[2]).looks
    assert known is not None
    assert (known.numbers, known.unrecorded) == ((1,), "")
    assert new is not None
    assert new.numbers == (2,)
    assert "is read-only here" in new.unrecorded
    assert new.sentences[-1].startswith("The look could not be recorded and may be counted again: ")


async def test_a_verified_bundle_shows_the_look_that_was_published(tmp_path: Path) -> None:
    store = SqlStore.sqlite(tmp_path / "runs.db")
    store.record_looks(SPLITS.test.fingerprint, ["earlier"])

    def answer(number: int, context: TrialContext) -> bool:
        return number >= (60 if context.experiment.name == "old" else 30)

    experiments = [Experiment("old"), Experiment("new")]
    suite = EvalSuite("support", SPLITS.test, answer, lambda output, expected: float(output), experiments=experiments)
    report = await suite.run(store=store, plan=AnalysisPlan(looks=True))
    assert "Second look at this test split" in report.to_markdown()
    write_bundle(store, report.run, tmp_path / "run.zip")
    with open_bundle(tmp_path / "run.zip") as bundle:
        assert bundle.check.matches
        made = compare(*bundle.report.parts)
    assert made.looks is not None
    assert made.looks.numbers == (2,)
    assert made.alpha == pytest.approx(0.05 / 6)


async def test_a_plan_says_which_gain_the_next_look_can_show_from_runs_on_any_split() -> None:
    store = MemoryStore()
    planned = AnalysisPlan(looks=True)
    runs = [await Prompts(store, SPLITS.train, plan=planned).run(seed) for seed in range(2)]
    first = plan(*runs, difference=0.05).test_split
    assert first is not None
    assert (first.samples, first.look, first.alpha) == (SIZE, 1, 0.025)
    assert first.detectable is not None
    size = size_text(first.detectable, percent=True)
    assert first.sentence == (
        f"The test split has {SIZE} samples. Its first look, at a level of 2.5%, shows a gain of {size} or more four "
        "times in five, with 1 repeat."
    )
    assert first.sentence in plan(*runs, difference=0.05).to_markdown()
    tested = [await Prompts(store, plan=planned).run(seed) for seed in range(2)]
    compare(*tested)
    second = plan(*runs, difference=0.05).test_split
    assert second is not None
    assert second.look == 2
    assert second.alpha == pytest.approx(0.05 / 6)
    assert second.detectable is not None
    assert second.detectable > first.detectable
    # What it promises is what a plan at that level promises for as many samples.
    alone = plan(*tested, difference=0.05, alpha=0.05 / 6, tests=1)
    own = plan(*tested, difference=0.05, tests=1).test_split
    assert own is not None
    assert own.detectable == pytest.approx(alone.options[0].detectable)
    unplanned = plan(*[await Prompts(store, SPLITS.train).run(seed) for seed in range(2)]).test_split
    assert unplanned is not None
    assert (unplanned.look, unplanned.alpha) == (2, 0.05)
    assert "Its second look shows a gain of " in unplanned.sentence
    whole = Prompts(store, Dataset(SPLITS.train.samples))
    assert plan(await whole.run(1)).test_split is None


async def test_a_test_split_that_is_too_small_is_said_to_be() -> None:
    rows: list[Sample[int, Any]] = [Sample(f"s{n}", n) for n in range(60)]
    few = Dataset(rows, name="few").split(train=0.85, validation=0.05, test=0.1)
    assert 0 < len(few.test) < 6
    run = await Prompts(MemoryStore(), few.train).run(1)
    found = plan(run).test_split
    assert found is not None
    assert found.sentence.endswith("might miss even the largest gain.")


def test_looks_in_a_plan_must_be_true_or_false_and_leave_other_plans_as_they_were() -> None:
    with pytest.raises(ConfigurationError, match="looks must be true or false"):
        AnalysisPlan.from_mapping({"looks": 1})
    assert "looks" not in AnalysisPlan().content
    assert "looks = true " in AnalysisPlan(looks=True).to_toml()
    assert AnalysisPlan.from_mapping({"looks": True}).looks


def test_ordinal_numbers() -> None:
    assert [ordinal(number) for number in (1, 3, 10, 11, 12, 13, 21, 22, 103, 111)] == [
        "first", "third", "tenth", "11th", "12th", "13th", "21st", "22nd", "103rd", "111th",
    ]  # fmt: skip
