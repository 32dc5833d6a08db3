"""Stored runs are opened by the names that the command line uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairtrial import ConfigurationError, Dataset, EvalReport, EvalSuite, Experiment, exact_match, open_store
from fairtrial.errors import StoreError, UnknownRunError

STUDY = EvalSuite("study", Dataset.of([(1, 1), (2, 2)]), lambda number: number, exact_match)
OTHER = EvalSuite(
    "other", Dataset.of([(1, 1)]), lambda number: number, exact_match, experiments=[Experiment("a"), Experiment("b")]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two runs of one suite and a run of another."""
    path = tmp_path / "runs.db"
    STUDY.run_sync(store=str(path))
    STUDY.run_sync(store=str(path), resume="never")
    OTHER.run_sync(store=str(path))
    return path


def test_load_finds_the_run_of_a_store_by_name(path: Path) -> None:
    assert EvalReport.load(path, "study@1").run.name == "study@1"
    assert EvalReport.load(str(path), "study").run.name == "study@2"
    assert EvalReport.load(f"sqlite:///{path}", "study@latest").total == 2
    store = open_store(path)
    run_id = store.runs(suite="other")[0].run_id
    assert EvalReport.load(store, run_id[:6]).run_id == run_id
    assert EvalReport.load(path, run_id).run.name == "other@1"
    store.close()


def test_load_of_several_runs_names_them_and_shows_the_call(path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        EvalReport.load(path)
    assert "it has other@1, study@2, study@1" in str(caught.value)
    assert str(caught.value).endswith(f"EvalReport.load({str(path)!r}, 'other@1')")
    store = open_store(path)
    with pytest.raises(StoreError, match=r"as in EvalReport\.load\(store, 'other@1'\)"):
        EvalReport.load(store)
    store.close()


def test_load_of_a_store_without_runs_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "empty.db").close()
    with pytest.raises(StoreError, match=r"empty\.db contains no runs"):
        EvalReport.load(tmp_path / "empty.db")


def test_load_of_an_unknown_name_suggests_similar_ones(path: Path) -> None:
    with pytest.raises(UnknownRunError, match="there is no run 'studdy'\ndid you mean study"):
        EvalReport.load(path, "studdy")
    with pytest.raises(UnknownRunError, match="suite 'study' has no run 7\nthere is study@1 to study@2"):
        EvalReport.load(path, "study@7")


def test_load_of_an_experiment_shows_how_to_take_it_from_its_run(path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"EvalReport\.load\(.*, 'other@1'\)\['b'\]"):
        EvalReport.load(path, "other:b")
    assert EvalReport.load(path, "other@1")["b"].pass_rate == 1.0


def test_load_of_a_file_that_does_not_exist_creates_none(tmp_path: Path) -> None:
    for name in (tmp_path / "nope.db", f"sqlite:///{tmp_path}/nope.db"):
        with pytest.raises(StoreError, match="there is no store at"):
            EvalReport.load(name, "study")
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_a_name_shows_how_to_load_it(path: Path) -> None:
    store = open_store(path)
    with pytest.raises(ConfigurationError, match=r"use EvalReport\.load\(store, '323fe'\)"):
        EvalReport(store, "323fe")  # type: ignore[call-overload]  # a user without a type checker
    with pytest.raises(ConfigurationError, match=r"use EvalReport\.load\('runs\.db', 'study@2'\)"):
        EvalReport("runs.db", store.runs(suite="study")[0])  # type: ignore[call-overload]  # as above
    store.close()
