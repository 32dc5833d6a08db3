"""Groups of rollouts from every kind of run."""

from __future__ import annotations

import asyncio
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ChatMessage, ConfigurationError, Dataset, EvalReport, EvalSuite, Sample, Trajectory, open_store
from fairtrial.fleet.queues import MemoryBroker
from fairtrial.rl import Group, advantages, best_at_k, curve, diagnose, groups, hacking
from fairtrial.rl.advantages import AdvantageKind, Convention
from fairtrial.rl.diagnose import HackingCheck
from fairtrial.scoring import Metric, Score, exact_match
from fairtrial.stats import pass_at_k
from fairtrial.stats.paired import paired_difference
from fairtrial.suites.worker import run_worker
from fairtrial.trials import EvalConfig, EvalResult, Experiment, TrialKey
from tests.rl.build import guess, questions, suite_of


def content(report: EvalReport) -> list[Any]:
    """All that a trainer reads of the groups, without the id of the run."""
    return [
        (
            group.sample_id,
            group.experiment,
            group.planned,
            group.signal,
            group.sample,
            [
                (r.repeat, r.reward, r.advantage, dict(r.metrics), r.outcome, r.status, r.messages, r.error)
                for r in group.rollouts
            ],
        )
        for group in groups(report)
    ]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return content(suite_of().run_sync(store="memory:"))


@contextmanager
def stored(url: str) -> Iterator[Any]:
    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


@pytest.mark.proves("R101", "R104")
def test_a_group_is_the_repeats_of_a_sample(expected: list[Any]) -> None:
    assert [entry[0] for entry in expected] == [f"q{i}" for i in range(6)]
    assert all(len(entry[5]) == entry[2] == 4 for entry in expected)
    statuses = {rollout[5] for entry in expected for rollout in entry[5]}
    assert statuses == {"terminated", "truncated", "failed"}
    signals = {entry[3] for entry in expected}
    assert "mixed" in signals
    outcomes = {rollout[4]: rollout for entry in expected for rollout in entry[5]}
    assert outcomes["task_error"][1:4] == (None, None, {})
    assert "the tool broke" in outcomes["task_error"][7]
    assert outcomes["scorer_error"][1] is None
    assert outcomes["scorer_error"][5] != "failed"
    assert outcomes["scored"][3].keys() == {"right", "length"}
    for entry in expected:
        rewards = [rollout[1] for rollout in entry[5]]
        assert [rollout[2] for rollout in entry[5]] == advantages(rewards)


@pytest.mark.proves("R101")
def test_groups_are_the_same_from_sqlite_and_postgresql(database: str, expected: list[Any]) -> None:
    with stored(database) as store:
        report = suite_of().run_sync(store=store)
        assert content(report) == expected
        assert content(EvalReport.load(store, report.run_id)) == expected


@pytest.mark.proves("R101")
def test_groups_of_a_resumed_run_are_the_same(tmp_path: Path, expected: list[Any]) -> None:
    async def interrupted(store: Any) -> int:
        taken = 0
        async with suite_of(max_concurrent=1).stream(store=store) as results:
            async for _ in results:
                taken += 1
                if taken == 7:
                    break
        return taken

    with stored(str(tmp_path / "runs.db")) as store:
        assert asyncio.run(interrupted(store)) == 7
        partial = EvalReport.load(store, "guesses")
        assert 0 < partial.total < partial.planned
        assert sum(len(group.rollouts) for group in groups(partial)) == partial.total
        report = suite_of(max_concurrent=1).run_sync(store=store)
        assert report.run_id == partial.run_id
        assert content(report) == expected


@pytest.mark.proves("R101", "R104")
def test_groups_of_a_run_by_a_fleet_are_the_same(tmp_path: Path, expected: list[Any]) -> None:
    async def dispatched(store: Any) -> EvalReport:
        broker = MemoryBroker()
        loops: list[Any] = []
        worker = asyncio.create_task(run_worker(suite_of(), broker, started=loops.append))
        report = await suite_of().run(store=store, mailbox=broker)
        loops[0].stop()
        await worker
        return report

    with stored(str(tmp_path / "runs.db")) as store:
        assert content(asyncio.run(dispatched(store))) == expected


def test_several_experiments_have_groups_of_their_own() -> None:
    suite = EvalSuite(
        "two", questions(2), guess, exact_match, experiments=[Experiment("a"), Experiment("b")], version="1"
    )
    report = suite.run_sync(store="memory:")
    assert [(group.experiment, group.sample_id) for group in groups(report)] == [
        ("a", "q0"), ("a", "q1"), ("b", "q0"), ("b", "q1"),
    ]  # fmt: skip
    assert [group.experiment for group in groups(report["b"])] == ["b", "b"]


def test_a_retried_trial_shows_its_last_attempt_only() -> None:
    tries: list[int] = []

    def flaky(question: str, ctx: Any) -> str:
        tries.append(1)
        ctx.session.record(ChatMessage("user", question))
        ctx.session.record(ChatMessage("assistant", f"try {len(tries)}"))
        return "yes" if len(tries) > 1 else str(1 // 0)

    suite = EvalSuite(
        "flaky", questions(1), flaky, exact_match, config=suite_of(max_retries=1, repeats=1).config, version="1"
    )
    (group,) = groups(suite.run_sync(store="memory:"))
    assert len(tries) == 2
    assert [message.text for message in group.rollouts[0].messages] == ["is 0 even?", "try 2"]


def test_other_objects_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"groups\(\) takes a report or one of its experiments \(got str\)"):
        groups("runs.db")  # type: ignore[arg-type]
    report = suite_of(1).run_sync(store="memory:")
    with pytest.raises(ConfigurationError, match="kind of advantage"):
        groups(report, advantage="best")  # type: ignore[arg-type]


class TestBestAtK:
    def _groups(self, *rewards: list[float]) -> list[Group]:
        results = [
            EvalResult(
                key=TrialKey("", "baseline", f"s{place}", repeat), score=Score(metrics=[Metric("m", value, 1.0)])
            )
            for place, group in enumerate(rewards)
            for repeat, value in enumerate(group)
        ]
        return list(groups(EvalReport.of(results)))

    def test_the_best_of_k_is_the_expected_maximum_of_draws_without_replacement(self) -> None:
        # Draws of two of 1, 2, 4: the maxima are 2, 4 and 4.
        assert best_at_k(self._groups([1.0, 4.0, 2.0]), 2).mean == pytest.approx(10 / 3)
        assert best_at_k(self._groups([1.0, 4.0, 2.0]), 1).mean == pytest.approx(7 / 3)
        assert best_at_k(self._groups([1.0, 4.0, 2.0]), 3).mean == 4.0

    def test_of_passes_it_is_pass_at_k(self) -> None:
        found = best_at_k(self._groups([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]), 2)
        assert found.mean == pytest.approx((pass_at_k(4, 1, 2) + pass_at_k(4, 2, 2)) / 2)  # type: ignore[operator]
        assert found.interval is not None

    def test_groups_with_too_few_members_are_counted(self) -> None:
        found = best_at_k(self._groups([1.0, 0.0], [1.0]), 2)
        assert (found.n, found.unscored, found.mean) == (1, 1, 1.0)
        with pytest.raises(ConfigurationError, match="k must be at least 1"):
            best_at_k([], 0)


# Advantages as trainers compute them.


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


# Knowing whether training works: diagnosis, curves, and hacked rewards.


def report_of(*samples: Sequence[Sequence[Metric]], said: str = "word") -> EvalReport:
    """A report with these metrics for each repeat of each sample; answers differ in length with the repeat."""
    return EvalReport.of(
        [
            EvalResult(
                key=TrialKey("", "baseline", f"s{place}", repeat),
                score=Score(metrics=metrics),
                sample=Sample(f"s{place}", "q"),
                trajectory=Trajectory((ChatMessage("user", "q"), ChatMessage("assistant", said * (repeat + 1)))),
            )
            for place, sample in enumerate(samples)
            for repeat, metrics in enumerate(sample)
        ]
    )


def right(value: float, **tracked: float) -> list[Metric]:
    own = Metric("right", value, 1.0, bounds=(min(0.0, value), 1.0))
    return [own, *(Metric(name, number) for name, number in tracked.items())]


class TestDiagnose:
    def test_groups_without_a_difference_are_too_easy_or_too_hard(self) -> None:
        found = diagnose(
            report_of([right(1), right(1)], [right(0), right(0)], [right(0), right(1)], [right(1), right(1)])
        )
        assert (found.groups, found.mixed, found.too_easy, found.too_hard) == (4, 1, 2, 1)
        assert (found.rollouts, found.scored, found.group_size) == (8, 8, 2)
        assert found.mean_reward.mean == pytest.approx(5 / 8)
        assert found.best.mean == pytest.approx(3 / 4)
        assert (found.spread.low, found.spread.median, found.spread.high) == (0.0, 1.0, 1.0)
        assert found.advantages is not None
        assert found.advantages[1] == pytest.approx(0.5 / (0.5**0.5 + 1e-4))
        assert "25.0% mixed, 50.0% too easy, 25.0% too hard" in str(found)

    @pytest.mark.parametrize(("value", "remark"), [(1.0, "too easy to learn from"), (0.0, "too hard, or the reward")])
    def test_a_run_without_signal_says_so(self, value: float, remark: str) -> None:
        assert remark in str(diagnose(report_of(*[[right(value), right(value)]] * 3)))

    def test_a_reward_that_follows_length_is_noticed(self) -> None:
        rng = np.random.default_rng(1)
        long = [[right(float(min(1, repeat / 5 + rng.normal() / 50))) for repeat in range(6)] for _ in range(8)]
        found = diagnose(report_of(*long))
        assert found.correlations["length"].value == pytest.approx(1, abs=0.1)
        assert any("The reward follows length" in remark for remark in found.remarks)
        flat = [[right(float(rng.random()), style=float(rng.random())) for _ in range(6)] for _ in range(8)]
        assert not any("follows" in remark for remark in diagnose(report_of(*flat)).remarks)
        assert diagnose(report_of(*flat)).correlations.keys() == {"length", "turns", "style"}

    def test_the_variance_of_the_reward_is_split_over_its_metrics(self) -> None:
        rows = [[[Metric("a", float(i % 2), 3.0), Metric("b", 1.0, 1.0)] for i in range(4)] for _ in range(2)]
        found = diagnose(report_of(*rows))
        assert found.shares == {"a": pytest.approx(1.0), "b": pytest.approx(0.0)}
        assert "Metric b never varies, so it teaches nothing." in found.remarks

    def test_truncated_failed_and_identical_rollouts_are_counted(self) -> None:
        report = suite_of(9).run_sync(store="memory:")
        found = diagnose(report)
        rollouts = [one for group in groups(report) for one in group.rollouts]
        assert found.truncated == sum(one.status == "truncated" for one in rollouts) > 0
        assert found.failed == sum(one.status == "failed" for one in rollouts) > 0
        assert found.scored == sum(one.reward is not None for one in rollouts) < 36
        repeated = sum(len(g.rollouts) - len({one.last_reply for one in g.rollouts}) for g in groups(report))
        assert found.identical == repeated > 0
        assert found.truncated_reward is not None
        assert found.token_rows is None
        assert "tokens     not recorded" in str(found)
        assert f"{36 - found.scored} rollouts have no reward" in str(found)

    def test_runs_without_repeats_say_what_is_missing(self) -> None:
        found = diagnose(report_of([right(1)], [right(0)]))
        assert found.remarks == (
            "No group has two scored rollouts, so there are no advantages: run with EvalConfig(repeats=8).",
        )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = open_store(str(tmp_path_factory.mktemp("curve") / "runs.db"))
    data: Dataset[int, Any] = Dataset([Sample(str(i), i) for i in range(10)])
    for step, share in ((0, 2), (50, 5), (100, 9), (100, 8)):

        def score(output: int, sample: Sample[Any, Any], limit: int = share) -> Score:
            return Score(metrics=right(float(output < limit), size=float(output)))

        suite = EvalSuite("held-out", data, int, score, config=EvalConfig(repeats=2), version="1")
        suite.run_sync(store=store, tags={"train": "run-7", "step": str(step)}, resume="never")
    other = EvalSuite("held-out", data, int, lambda output, expected: 1.0, version="1")
    other.run_sync(store=store, tags={"train": "run-8", "step": "9"}, resume="never")
    yield store
    store.close()


class TestCurve:
    def test_runs_are_ordered_by_step_with_intervals(self, store: Any) -> None:
        found = curve(store, tags={"train": "run-7"})
        assert [(point.step, point.estimate.mean) for point in found.points] == [(0, 0.2), (50, 0.5), (100, 0.8)]
        for point in found.points:
            assert point.estimate.interval is not None
            assert point.estimate.interval.low < (point.estimate.mean or 0) < point.estimate.interval.high
            assert point.estimate.n == 10
        table = str(found).splitlines()
        assert table[0].split() == ["step", "run", "reward", "interval", "n"]
        assert table[2].split()[:2] == ["50", "held-out@2"]

    def test_it_is_drawn(self, store: Any) -> None:
        drawn = ET.fromstring(curve(store, tags={"train": "run-7"}, metric="size").to_svg())
        space = "{http://www.w3.org/2000/svg}"
        assert len(drawn.findall(f"{space}circle")) == 3
        (line,) = drawn.findall(f"{space}polyline")
        xs = [float(pair.partition(",")[0]) for pair in line.attrib["points"].split()]
        assert xs == [64.0, 402.0, 740.0]
        assert drawn.findtext(f"{space}title") == "size by training step"

    def test_mistakes_are_sentences(self, store: Any) -> None:
        with pytest.raises(ConfigurationError, match="no run is tagged with train=run-9 and a step"):
            curve(store, tags={"train": "run-9"})
        with pytest.raises(ConfigurationError, match="has the metric 'colour'; there are reward, value, passed, right"):
            curve(store, tags={"train": "run-7"}, metric="colour")


class TestHacking:
    def _report(self, rewards: Sequence[float], truths: Sequence[float]) -> EvalReport:
        return report_of(*[[right(one, judge=other)] for one, other in zip(rewards, truths, strict=True)])

    def test_a_reward_that_rises_while_the_truth_falls_is_an_alarm(self) -> None:
        before = self._report([0.2] * 20 + [0.3] * 20, [0.8, 0.7] * 20)
        after = self._report([0.9] * 20 + [0.8] * 20, [0.3, 0.4] * 20)
        found = hacking(before, after, truth="judge")
        assert (found.verdict, found.alarm) == ("hacked", True)
        assert str(found).startswith("reward rose while judge fell: the reward is being hacked.")
        assert found.truth_change.difference == pytest.approx(-0.4)
        assert hacking(after, before, truth="judge").verdict == "no sign"
        assert not hacking(before, before, truth="judge").alarm

    def test_honest_progress_is_no_alarm_and_an_open_question_is_called_so(self) -> None:
        before = self._report([0.2] * 40, [0.4, 0.5] * 20)
        assert hacking(before, self._report([0.8] * 40, [0.8, 0.7] * 20), truth="judge").verdict == "no sign"
        wavering = [0.0, 1.0, 0.3, 0.4] * 10
        assert hacking(before, self._report([0.8] * 40, wavering), truth="judge").verdict == "suspicious"

    def test_the_truth_may_be_in_other_runs(self) -> None:
        before, after = report_of([right(0.1)] * 1, [right(0.2)] * 1), report_of([right(0.9)] * 1, [right(0.8)] * 1)
        held_out = self._report([0] * 12, [1.0, 0.9] * 6), self._report([0] * 12, [0.1, 0.2] * 6)
        found = hacking(before, after, truth="judge", held_out=held_out)
        assert (found.proxy_change.n, found.truth_change.n) == (2, 12)

    def test_runs_without_common_samples_are_refused(self) -> None:
        other = EvalReport.of([EvalResult(sample_id="z", score=Score(metrics=right(1, judge=1)))])
        with pytest.raises(ConfigurationError, match="must have the same samples"):
            hacking(other, self._report([1], [1]), truth="judge")

    @pytest.mark.long
    @pytest.mark.parametrize("repeats", [1, 4])
    def test_false_alarms_are_at_most_5_percent_of_1000_pairs(self, repeats: int) -> None:
        """The reward rises for sure, and the truth, correlated with it, stays as it is."""
        alarms = 0
        for seed in range(1000):
            rng = np.random.default_rng(seed)
            ability = rng.random(30)
            before, after = ((rng.random((repeats, 30)) < ability).astype(float).T.tolist() for _ in range(2))
            truth = paired_difference(after, before, bounds=None, seed=seed)
            if truth.interval is not None and truth.interval.high < 0:
                low, high = [[0.1 * value] for value in ability], [[0.1 * value + 0.5] for value in ability]
                rise = paired_difference(high, low, bounds=None)
                alarms += HackingCheck("reward", "judge", rise, truth).alarm
        print(f"{alarms} false alarms in 1000")
        assert alarms <= 50
