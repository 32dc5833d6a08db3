"""The collector of cyclic garbage runs less often while trials run, and not while modules load."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fairtrial import Dataset, EvalSuite, Sample
from fairtrial.base.garbage import fewer_collections, loading


@pytest.fixture(autouse=True)
def default_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_garbage_is_collected_less_often_during_a_run_and_as_before_after_it() -> None:
    during: list[tuple[int, int, int]] = []

    def task(question: str) -> str:
        during.append(gc.get_threshold())
        return question

    report = EvalSuite("s", Dataset([Sample("a", "x", "x")]), task, lambda output, expected: True).run_sync(
        store="memory:"
    )
    assert report.successful == 1
    assert during == [(10_000, 10, 10)]
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_of_several_blocks_restores_the_threshold() -> None:
    first, second = fewer_collections(), fewer_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 10_000
    second.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 700


@pytest.mark.parametrize("chosen", [0, 50_000])
def test_a_collector_that_is_off_or_rarer_stays_so(chosen: int) -> None:
    gc.set_threshold(chosen, 10, 10)
    with fewer_collections():
        assert gc.get_threshold()[0] == chosen
    assert gc.get_threshold()[0] == chosen


def test_a_threshold_that_is_set_during_the_block_stays() -> None:
    with fewer_collections():
        gc.set_threshold(1_234, 10, 10)
    assert gc.get_threshold()[0] == 1_234


def test_no_garbage_is_looked_for_while_modules_load_nor_later_among_what_they_made() -> None:
    before = gc.get_freeze_count()
    try:
        with loading():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_garbage_is_collected_again_after_a_module_that_cannot_be_loaded() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError("missing")
    assert gc.isenabled()
    gc.unfreeze()


def test_a_collector_that_is_off_stays_off_after_modules_were_loaded() -> None:
    gc.disable()
    try:
        before = gc.get_freeze_count()
        with loading():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == before
    finally:
        gc.enable()
