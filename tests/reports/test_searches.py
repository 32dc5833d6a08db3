"""Searches as they are stored and read: candidates with lineage, scores on two splits, one comparison on the third."""

from __future__ import annotations

import pytest

from fairtrial.errors import UnknownRunError
from fairtrial.reports.search.search import find_searches, read_search
from fairtrial.store.memory import MemoryStore
from tests.reports.searches import NAME, TEXTS, splits, write_search


async def test_a_stored_search_is_read_with_lineage_scores_and_its_one_comparison() -> None:
    store = MemoryStore()
    assert await write_search(store) == NAME
    assert find_searches(store) == find_searches(store, "support") == [NAME]
    assert find_searches(store, "other") == []
    search = read_search(store, NAME)
    assert [one.text for one in search.candidates] == list(TEXTS)
    ids = [one.id for one in search.candidates]
    assert [one.parents for one in search.candidates] == [(), (ids[0],), (ids[1],), (ids[0],)]
    assert (search.suite, search.parameter, search.optimizer, search.status) == ("support", "prompt", "gepa", "tested")
    baseline, winner, refused = search.candidates[0], search.candidates[2], search.candidates[3]
    assert search.winner == winner
    assert baseline.validation is not None
    assert winner.validation is not None
    assert winner.validation.mean is not None
    assert baseline.validation.samples == len(splits().validation)
    assert winner.validation.low is not None
    assert winner.validation.low < winner.validation.mean
    assert refused.validation is None
    assert search.comparison is not None
    assert search.comparison.looks is not None
    assert search.comparison.looks.numbers == (1,)
    assert search.comparison.alpha == 0.025
    assert search.tested is not None
    assert search.tested.verdict == "better"
    assert search.optimism == pytest.approx(search.validation_gain - search.tested.difference)  # type: ignore[operator]
    assert search.trials == sum(run.planned for run in store.runs())
    text = search.to_markdown()
    assert "First look at this test split" in text
    assert "which chose among the candidates" in text
    assert search.to_json()["comparison"] is not None


async def test_errors_are_left_out_of_the_mean_and_named() -> None:
    store = MemoryStore()
    await write_search(store)
    refused = read_search(store, NAME).candidates[3].train
    assert refused is not None
    assert refused.errors == (splits().train.samples[10].id,)
    scores = [result.score.value for run in refused.runs for result in store.results(run) if result.score is not None]
    assert (refused.samples, refused.mean) == (2, sum(scores) / 2)
    assert "candidate 3, train: 1 sample left out after errors: s" in read_search(store, NAME).to_markdown()


@pytest.mark.parametrize(("ended", "status"), [(False, "unfinished"), (True, "untested")])
async def test_a_search_that_was_cut_off_has_no_comparison(ended: bool, status: str) -> None:
    store = MemoryStore()
    await write_search(store, ended=ended, tested=False)
    search = read_search(store, NAME)
    assert (search.status, search.comparison, search.tested, search.optimism) == (status, None, None, None)
    assert "same command" in search.to_markdown()


def test_an_unknown_search_is_named() -> None:
    with pytest.raises(UnknownRunError, match="no search 'nothing'"):
        read_search(MemoryStore(), "nothing")
