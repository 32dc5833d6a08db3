"""The table of trials against a plain loop over the stored results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairtrial import EvalResult, Metric, Sample, Score, TokenUsage, TrialKey, open_store
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.viewer import trial_table
from fairtrial.viewer.question import STATES, Question, Span
from fairtrial.viewer.trial_table import chosen_ordinals, count_trials, find_page, neighbours
from tests.viewer.conftest import record

OUTCOMES: tuple[Any, ...] = ("task_error", "scorer_error", "timeout")


class Table:
    """Columns of a run, and the same trials as plain facts."""

    def __init__(self, path: Path) -> None:
        store = open_store(path)
        run = store.create_run(record("r1", size=17, repeats=2))
        self.facts: dict[int, dict[str, Any]] = {}
        samples: dict[int, Sample[Any, Any]] = {
            at: Sample(f"q{at}", at, None, {"kind": "ab"[at % 2], "level": at % 3} if at % 5 else {"level": "0"})
            for at in range(17)
        }
        results = []
        for ordinal in range(run.planned):
            if ordinal % 11 == 3:
                continue  # Not stored.
            place, experiment, repeat = run.split(ordinal)
            name = run.experiments[experiment]
            key = TrialKey("r1", name, f"q{place}", repeat)
            value = None if ordinal % 7 == 2 else (ordinal * 5 % 4) / 3
            score = None if value is None else Score(value, value > 0.5, metrics=[Metric("m", -value)] if value else [])
            outcome: Any = OUTCOMES[ordinal % 3] if score is None else "scored"
            results.append(
                EvalResult(
                    key=key,
                    ordinal=ordinal,
                    outcome=outcome,
                    score=score,
                    latency_ms=ordinal % 6,
                    usage=TokenUsage(ordinal % 4, 1),
                    execution=ordinal + 1,
                )
            )
            state = outcome if score is None else "passed" if score.passed else "failed"
            self.facts[ordinal] = {
                "experiment": name, "outcome": state, "score": value, "latency_ms": ordinal % 6,
                "tokens": ordinal % 4 + 1, "cost_usd": None, "ordinal": ordinal, "metric:m": -value if value else None,
                "metadata": {key: str(found) for key, found in samples[place].metadata.items()},
            }  # fmt: skip
        store.commit("r1", results, samples)
        store.update_run("r1", status="finished", finished_at=5.0)
        self.columns = TrialColumns.open(store, store.get_run("r1"))

    def matches(self, facts: dict[str, Any], question: Question, without: str = "") -> bool:
        if question.experiments and without != "experiment" and facts["experiment"] not in question.experiments:
            return False
        if question.states and without != "outcome" and facts["outcome"] not in question.states:
            return False
        for key, texts in question.metadata:
            if without != f"m.{key}" and facts["metadata"].get(key, "") not in texts:
                return False
        for name, span in question.spans:
            number = facts[name]
            if number is None or not (
                (-math.inf if span.low is None else span.low)
                <= number
                <= (math.inf if span.high is None else span.high)
            ):
                return False
        return True

    def order(self, question: Question) -> list[int]:
        def key(ordinal: int) -> tuple[Any, ...]:
            number = self.facts[ordinal][question.sort]
            sign = -1 if question.descending else 1
            if question.sort == "ordinal":
                return (sign * ordinal,)
            return (number is None, 0 if number is None else sign * number, ordinal)

        return sorted((at for at, facts in self.facts.items() if self.matches(facts, question)), key=key)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    made = Table(tmp_path_factory.mktemp("table") / "runs.db")
    yield made
    made.columns.store.close()


questions = st.builds(
    Question,
    experiments=st.sampled_from([(), (), ("baseline",), ("careful", "unknown"), ("unknown",)]),
    states=st.sampled_from([(), (), *((state,) for state in STATES), ("passed", "task_error")]),
    metadata=st.sampled_from(
        [
            (),
            (),
            (("kind", ("a",)),),
            (("kind", ("a", "")),),
            (("level", ("0",)),),
            (("level", ("1", "2")), ("kind", ("b",))),
        ]
    ),
    spans=st.sampled_from(
        [
            (),
            (),
            (("score", Span(1 / 3, 1.0)),),
            (("latency_ms", Span(2.0)),),
            (("tokens", Span(None, 2.0)),),
            (("cost_usd", Span(0.0)),),
        ]
    ),
    sort=st.sampled_from(["ordinal", "score", "latency_ms", "tokens", "cost_usd", "metric:m"]),
    descending=st.booleans(),
)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(questions, st.integers(3, 20), st.sampled_from([16, 1 << 18]))
@pytest.mark.proves("R118")
def test_pages_visit_every_selected_trial_once_in_order_and_back(
    table: Table, question: Question, limit: int, block: int
) -> None:
    expected = table.order(question)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_table, "_BLOCK", block)
        patch.setattr(trial_table, "_NEAR", block)
        seen: list[int] = []
        page = find_page(table.columns, question, limit=limit)
        pages = [page]
        seen += page.ordinals
        while page.next is not None:
            page = find_page(table.columns, replace(question, after=page.next), limit=limit)
            pages.append(page)
            seen += page.ordinals
        assert seen == expected
        assert count_trials(table.columns, question).total == len(expected)
        for earlier, later in pairwise(pages):
            assert later.previous is not None
            back = find_page(table.columns, replace(question, before=later.previous), limit=limit)
            assert back.ordinals == earlier.ordinals
        assert sorted(chosen_ordinals(table.columns, question)) == sorted(expected)


@quick
@given(questions)
def test_facets_are_counted_under_all_other_filters(table: Table, question: Question) -> None:
    page = count_trials(table.columns, question)
    for facet in page.facets:
        counted: dict[str, int] = {}
        for facts in table.facts.values():
            if table.matches(facts, question, without=facet.name):
                key = facet.name.removeprefix("m.")
                value = facts["metadata"].get(key, "") if facet.name.startswith("m.") else facts[facet.name]
                counted[value] = counted.get(value, 0) + 1
        shown: dict[str, int] = {}
        for value in facet.values:
            shown[value.text] = shown.get(value.text, 0) + value.trials
        assert {text: count for text, count in shown.items() if count} == counted
        assert {value.text for value in facet.values if value.chosen} <= set(question.chosen(facet.name))


@quick
@given(questions, st.integers(0, 67))
def test_neighbours_are_those_of_the_order(table: Table, question: Question, ordinal: int) -> None:
    expected = table.order(question)
    if ordinal in expected:
        place = expected.index(ordinal)
        before = expected[place - 1] if place else None
        after = expected[place + 1] if place + 1 < len(expected) else None
        assert neighbours(table.columns, question, ordinal) == (before, after)


def test_counts_are_of_everything_that_is_selected(table: Table) -> None:
    page = count_trials(table.columns, Question(experiments=("baseline",)))
    chosen = [facts for facts in table.facts.values() if facts["experiment"] == "baseline"]
    assert page.total == len(chosen)
    assert page.scored == sum(facts["score"] is not None for facts in chosen)
    assert page.passed == sum(facts["outcome"] == "passed" for facts in chosen)


def test_an_unknown_metadata_key_selects_nothing(table: Table) -> None:
    question = Question(metadata=(("nothing", ("x",)),))
    assert count_trials(table.columns, question).total == 0
    assert find_page(table.columns, question).ordinals == ()
