"""The results of a report as a sequence: their types, and what reading one of them costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Sample, compare, evaluate_sync, exact_match, open_store
from fairtrial.reports.report.results import Results
from fairtrial.trials import EvalResult, Experiment
from tests.reports.build import stored


@dataclass(frozen=True)
class Answer:
    number: int


def answer(text: str) -> Answer:
    return Answer(len(text))


def test_outputs_of_results_have_the_type_that_the_task_returns() -> None:
    suite = EvalSuite("typed", Dataset.of({"one": 3, "four": 4}), answer, exact_match)
    report = suite.run_sync(store="memory:")
    assert [result.output for result in report.results] == [Answer(3), Answer(4)]
    assert [result.output for result in report.failed_samples()] == [Answer(3), Answer(4)]
    assert report.refresh().results[1].output == Answer(4)


def test_an_output_that_does_not_fit_its_type_stays_as_it_is_stored() -> None:
    report = EvalSuite("typed", Dataset.of({"one": 3}), answer, exact_match).run_sync(store="memory:")
    (result,) = Results(report.store, report.run_id, 1, {"baseline": list[int]})
    assert result.output == {"number": 3}


class CountingStore:
    """A store that counts the results that are read from it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.read = 0

    def results(self, run_id: str, **filters: Any) -> Any:
        for result in self.store.results(run_id, **filters):
            self.read += 1
            yield result


def test_a_result_is_read_by_its_position_without_those_before_it() -> None:
    report = stored([1.0, 0.0] * 100, store=open_store("memory:"))
    counting: Any = CountingStore(report.store)
    results = Results(counting, report.run_id, 100, passed=False)
    everything: list[EvalResult] = list(results)
    counting.read = 0
    assert [results[place] for place in (0, 50, 99, -1)] == [everything[place] for place in (0, 50, 99, 99)]
    assert counting.read == 1 + 100 + 3  # The first one, then where all of them are, then one each.
    with pytest.raises(IndexError):
        results[100]


def test_figures_of_several_experiments_are_refused_with_one_error_type() -> None:
    suite = EvalSuite(
        "two", Dataset.of({"one": 3}), answer, exact_match, experiments=[Experiment("a"), Experiment("b")]
    )
    report = suite.run_sync(store="memory:")
    with pytest.raises(ConfigurationError, match=r'no common pass_rate; ask for one, as in report\["b"\]'):
        report.pass_rate
    with pytest.raises(ConfigurationError, match="this report covers 2 experiments"):
        report.only("name one")


def test_grouping_by_metadata_that_no_sample_has_is_refused_with_the_keys() -> None:
    dataset = Dataset([Sample("a", 1, 1, metadata={"topic": "sums"}), Sample("b", 2, 2)])
    report = evaluate_sync(dataset, lambda x: x, exact_match)
    assert set(report.group_by("topic")) == {"sums", None}
    with pytest.raises(ConfigurationError, match=r"no sample of run .* has metadata 'tpic'; it has topic"):
        report.group_by("tpic")
    bare = evaluate_sync(Dataset.of({"a": "a"}), lambda x: x, exact_match)
    with pytest.raises(ConfigurationError, match="its samples have no metadata"):
        bare.group_by("topic")


def test_a_comparison_of_anything_but_reports_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"must be a report or one of its experiments \(got 'a'\)"):
        compare("a", "b")  # type: ignore[arg-type]


def test_samples_that_are_a_function_are_refused_with_the_order() -> None:
    with pytest.raises(ConfigurationError, match="the samples come first, as in evaluate"):
        evaluate_sync(lambda x: x, Dataset.of({"a": "a"}), exact_match)  # type: ignore[call-overload]
