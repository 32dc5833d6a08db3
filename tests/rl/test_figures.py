"""Knowing whether training works: diagnosis, curves, and hacked rewards."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fairtrial import ConfigurationError, Dataset, EvalReport, EvalSuite, Metric, Sample, Score, Trajectory, open_store
from fairtrial.data.session import ChatMessage
from fairtrial.rl import curve, diagnose, groups, hacking
from fairtrial.rl.diagnose import HackingCheck, change
from fairtrial.trials import EvalConfig, EvalResult, TrialKey
from tests.rl.build import suite_of


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
            truth = change(before, after, seed=seed)
            if truth.interval is not None and truth.interval.high < 0:
                rise = change([[0.1 * value] for value in ability], [[0.1 * value + 0.5] for value in ability])
                alarms += HackingCheck("reward", "judge", rise, truth).alarm
        print(f"{alarms} false alarms in 1000")
        assert alarms <= 50
