"""Groups of rollouts from every kind of run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ChatMessage, ConfigurationError, EvalReport, EvalSuite, Metric, Score, exact_match, open_store
from fairtrial.fleet.queues import MemoryBroker
from fairtrial.rl import Group, advantages, best_at_k, groups
from fairtrial.stats import pass_at_k
from fairtrial.suites.worker import run_worker
from fairtrial.trials import EvalResult, Experiment, TrialKey
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
    async def interrupted() -> int:
        taken = 0
        async with suite_of(max_concurrent=1).stream(store=store) as results:
            async for _ in results:
                taken += 1
                if taken == 7:
                    break
        return taken

    with stored(str(tmp_path / "runs.db")) as store:
        assert asyncio.run(interrupted()) == 7
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
