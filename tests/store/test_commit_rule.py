"""The rule which results a commit accepts, compared with a model that uses a dict."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fairtrial import EvalResult, Outcome, Score
from fairtrial.store import RunStore
from tests.store.build import result, run_record, samples

_numbers = count()
_OUTCOMES: tuple[Outcome, ...] = ("scored", "task_error", "scorer_error", "timeout", "dead_letter", "not_run")

attempts = st.tuples(
    st.integers(0, 11),  # ordinal
    st.sampled_from(_OUTCOMES),
    st.integers(1, 3),  # attempt
    st.integers(1, 4),  # execution: few, so that they collide
    st.integers(0, 99),  # what tells two results apart
)


def machine(store: RunStore) -> type[RuleBasedStateMachine]:
    class Commits(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.run = store.create_run(run_record(f"run-{next(_numbers)}", size=3))
            self.model: dict[int, EvalResult] = {}

        @rule(batch=st.lists(attempts, max_size=12), with_samples=st.booleans())
        def commit(self, batch: list[Any], with_samples: bool) -> None:
            results = [
                result(
                    self.run,
                    ordinal,
                    outcome,
                    attempt=attempt,
                    execution=execution,
                    output=f"output {mark}",
                    score=Score(mark / 99, reason=f"reason {mark}") if outcome == "scored" else None,
                )
                for ordinal, outcome, attempt, execution, mark in batch
            ]
            new = 0
            for found in results:
                known = self.model.get(found.ordinal)
                if known is None or (
                    known.outcome != "scored" and (found.outcome == "scored" or found.attempt > known.attempt)
                ):
                    self.model[found.ordinal] = found
                    new += 1
            places = {self.run.split(found.ordinal)[0] for found in results}
            given = samples(places) if with_samples else {}
            assert store.commit(self.run.run_id, results, given) == (new, len(results) - new, (), ())

        @invariant()
        def the_store_agrees_with_the_model(self) -> None:
            run_id = self.run.run_id
            assert list(store.results(run_id)) == [self.model[ordinal] for ordinal in sorted(self.model)]

        @rule()
        def the_bitmap_agrees_with_the_model(self) -> None:
            bits = store.done(self.run.run_id)
            done = {n for n in range(self.run.planned) if bits[n // 8] >> (n % 8) & 1}
            assert done == {n for n, found in self.model.items() if found.outcome != "not_run"}

        @rule()
        def the_totals_agree_with_the_model(self) -> None:
            for found in store.totals(self.run.run_id):
                ours = [each for each in self.model.values() if each.experiment == found.experiment]
                assert sum(found.outcomes.values()) == len(ours)
                assert found.passed == sum(each.passed for each in ours)
                assert found.value_sum == pytest.approx(sum(each.score.value for each in ours if each.score))

    return Commits


@pytest.mark.proves("R108")
def test_commits_follow_the_rule(store: RunStore, url: str) -> None:
    examples = 60 if url == "memory:" else 20
    run_state_machine_as_test(
        machine(store),
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
