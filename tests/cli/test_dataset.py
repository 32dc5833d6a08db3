"""`fairtrial dataset`: failures as samples with their origin, and versions of datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, Label, TrialKey, open_store
from fairtrial.data.splits import TEST, SplitOrigin
from fairtrial.reports.datasets.versions import dataset_versions
from fairtrial.store.memory import MemoryStore
from fairtrial.store.notes import write_notes
from tests.cli.conftest import Cli
from tests.reports.build import stored

SUITE = """
from fairtrial import Dataset, EvalSuite, Sample, exact_match, task

samples = [
    Sample("capital", "What is the capital of the northern province, and since when?", "Alm", {"level": "easy"}),
    Sample("again", "What is the capital of the northern province, and since when??", "Alm"),
    Sample("river", "Which river flows through it?", None),
    Sample("right", "What is 2 + 2?", "4"),
    Sample("broken", "raise", "x"),
]


@task(inline=True)
def answer(question: str) -> str:
    if question == "raise":
        raise ValueError("no")
    return "4"


suite = EvalSuite("places", Dataset(samples, name="places"), answer, exact_match)
"""

AGAIN = """
from fairtrial import Dataset, EvalSuite, exact_match, task


@task(inline=True)
def answer(question: str) -> str:
    return "Alm"


suite = EvalSuite("again", Dataset.load("failures.jsonl"), answer, exact_match)
"""


@pytest.fixture
def ran(cli: Cli, place: Path) -> Cli:
    (place / "evals.py").write_text(SUITE.replace("None)", '"Ulde")'))
    assert cli("run", "evals.py", "--quiet", "--max-error-share", "1").code == 0
    return cli


def rows(file: Path) -> dict[str, Any]:
    return {row["id"]: row for row in map(json.loads, file.read_text().splitlines())}


def label(sample: str, value: object, who: str, name: str = "correct") -> None:
    store = open_store(".fairtrial/runs.db")
    key = TrialKey(store.runs()[0].run_id, "baseline", sample)
    store.label(Label(key, name, value, who))  # type: ignore[arg-type]
    store.close()


def test_failures_become_samples_with_origin_and_people_and_none_twice(ran: Cli, place: Path) -> None:
    label("capital", False, "ada")
    label("capital", True, "bo", "~picked:correct")
    label("capital", "looked at it", "cy", "~comment:correct")
    done = ran("dataset", "curate", "places", "--failed", "--to", "failures.jsonl")
    assert (done.code, done.err) == (0, "")
    assert "2 new samples, 2 in all" in done.out
    assert "left out: again, nearly the same as capital" in done.out
    found = rows(place / "failures.jsonl")
    assert list(found) == ["capital", "river"]
    assert found["capital"]["expected"] == "Alm"
    facts = found["capital"]["metadata"]
    origin = facts.pop("origin")
    assert facts == {"level": "easy", "split": "failures", "confirmed_by": ["ada"], "disputed_by": ["bo"]}
    assert (origin["run"], origin["experiment"], origin["why"]) == ("places@1", "baseline", "disputed")
    assert found["river"]["metadata"]["origin"]["why"] == "failed"
    before = (place / "failures.jsonl").read_bytes()
    again = ran("dataset", "curate", "places", "--failed", "--to", "failures.jsonl", "--json").json
    assert (again["added"], again["known"], again["samples"]) == ([], 2, 2)
    assert again["similar"] == [{"id": "again", "like": "capital"}]
    assert again["fingerprint"] == again["parent"] == Dataset.load("failures.jsonl").fingerprint
    assert (place / "failures.jsonl").read_bytes() == before


def test_another_sample_with_the_id_of_a_known_one_is_added(ran: Cli, place: Path) -> None:
    ran("dataset", "curate", "places", "--failed", "--to", "failures.jsonl")
    changed = SUITE.replace("None)", '"Ulde")').replace(
        "Which river flows through it?", "How high is the highest hill?"
    )
    (place / "evals.py").write_text(changed)
    assert ran("run", "evals.py", "--quiet", "--max-error-share", "1").code == 0
    for added in (1, 0):
        found = ran("dataset", "curate", "places", "--failed", "--to", "failures.jsonl", "--json").json
        assert len(found["added"]) == added
    inputs = {name: row["input"] for name, row in rows(place / "failures.jsonl").items()}
    assert inputs["river"] == "Which river flows through it?"
    (other,) = (name for name in inputs if name.startswith("river-"))
    assert inputs[other] == "How high is the highest hill?"


def test_disputed_trials_are_those_on_which_people_and_the_evaluator_differ(ran: Cli, place: Path) -> None:
    label("right", False, "ada")
    label("river", False, "ada")
    label("capital", True, "ada")
    label("capital", None, "ada")
    done = ran("dataset", "curate", "places", "--disputed", "--to", "failures.jsonl", "--json")
    assert done.json["added"] == ["right"]
    assert rows(place / "failures.jsonl")["right"]["metadata"]["disputed_by"] == ["ada"]


def test_a_run_of_failures_says_that_it_has_no_pass_rate_of_its_own(ran: Cli, place: Path) -> None:
    ran("dataset", "curate", "places", "--failed", "--to", "failures.jsonl")
    (place / "later.py").write_text(AGAIN)
    assert ran("run", "later.py", "--quiet").code == 0
    out = " ".join(ran("show", "again").out.split())
    assert "of split failures" in out
    assert "their pass rate says nothing about the system" in out
    compared = " ".join(ran("compare", "places", "again").out.split())
    assert "against that run, any other one looks better by chance" in compared
    ran("dataset", "curate", "again", "--failed", "--to", "other.jsonl")
    assert rows(place / "other.jsonl")["river"]["metadata"]["origin"]["run"] == "places@1"
    assert "of split" not in ran("show", "places").out


def test_a_test_split_and_a_file_of_other_samples_are_refused(ran: Cli, place: Path) -> None:
    (place / "own.jsonl").write_text('{"id": "a", "input": 1}\n')
    done = ran("dataset", "curate", "places", "--failed", "--to", "own.jsonl")
    assert done.code == 2
    assert "own.jsonl has samples that are not failures, such as 'a'" in done.err
    assert (place / "own.jsonl").read_text() == '{"id": "a", "input": 1}\n'
    store = open_store(".fairtrial/runs.db")
    store.update_run(store.runs()[0].run_id, notes=write_notes(split=SplitOrigin(TEST, "f", 5, "f", 5)))
    store.close()
    done = ran("dataset", "curate", "places", "--failed", "--to", "new.jsonl")
    assert done.code == 2
    assert "is on a test split" in done.err
    assert not (place / "new.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["curate", "places", "--to", "f.jsonl"], "nothing is chosen"),
        (["curate", "places", "--failed", "--to", "f.csv"], "--to must be a .jsonl file"),
        (["curate", "nowhere", "--failed", "--to", "f.jsonl"], "there is no run 'nowhere'"),
        (["diff", "places", "nowhere"], "there is no run 'nowhere'"),
    ],
)
def test_a_mistake_is_named(ran: Cli, words: list[str], said: str) -> None:
    done = ran("dataset", *words)
    assert done.code == 2
    assert said in done.err


def test_versions_are_listed_with_their_parents_and_differences(ran: Cli, place: Path) -> None:
    edited = SUITE.replace("None)", '"Odra")').replace('{"level": "easy"}', '{"level": "hard"}')
    edited = edited.replace('Sample("right", "What is 2 + 2?", "4"),', 'Sample("new", "What is 3 + 1?", "4"),')
    (place / "evals.py").write_text(edited.replace("since when??", "why?"))
    for _ in range(2):
        ran("run", "evals.py", "--quiet", "--max-error-share", "1")
    (facts,) = ran("dataset", "log", "--json").json["datasets"]
    newest, first = facts["versions"]
    assert facts["name"] == "places"
    assert (first["parent"], newest["parent"]) == (None, first["fingerprint"])
    assert (first["runs"], newest["runs"], newest["first_run"], newest["last_run"]) == (1, 2, "places@2", "places@3")
    out = ran("dataset", "log", "places").out
    assert first["fingerprint"][:8] in out
    assert len(out.splitlines()) == 3
    changes = ran("dataset", "diff", "places@1", "places@3", "--json").json
    assert changes.pop("format") == "fairtrial.dataset_diff/1"
    assert changes == {
        "same": 2, "added": ["new"], "removed": ["right"], "input": ["again"], "expected": ["river"],
        "metadata": ["capital"],
    }  # fmt: skip
    text = ran("dataset", "diff", "places@1", "places@3").out
    assert "2 samples the same: comparisons pair them" in text
    assert "1 sample with another expected value: river" in text


def test_splits_of_a_dataset_have_contents_of_their_own() -> None:
    store = MemoryStore()
    for number, (split, content) in enumerate((("train", "a"), ("test", "b"), ("train", "a"))):
        note = write_notes(split=SplitOrigin(split, content * 32, 1, "b" * 32, 1))
        stored([1.0], run_id=str(number), store=store, fingerprint=content * 32, created_at=number + 1.0, notes=note)
    found = [(one.split, one.parent, one.runs) for one in dataset_versions(store.runs())]
    assert found == [("train", None, 2), ("test", None, 1)]


def test_a_run_that_did_not_reach_its_samples_is_named_in_a_diff(ran: Cli, place: Path) -> None:
    store = open_store(".fairtrial/runs.db")
    stored([1.0], store=store, planned=3)
    store.close()
    assert "suite@1 did not reach all samples: 2 of 3 unknown" in ran("dataset", "diff", "suite", "places").err
    assert ran("dataset", "diff", "places", "places").err == ""


def test_a_file_is_compared_with_a_run(ran: Cli, place: Path) -> None:
    ran("dataset", "curate", "places", "--failed", "--to", "failures.jsonl")
    changes = ran("dataset", "diff", "places", "failures.jsonl", "--json").json
    assert (changes["same"], changes["metadata"]) == (2, ["capital", "river"])
    assert changes["removed"] == ["again", "right", "broken"]
    assert "no run used a dataset named 'none'" in ran("dataset", "log", "none").err


def test_only_a_file_of_nothing_but_failures_is_that_split(place: Path) -> None:
    marked = '{"id": "a", "input": 1, "metadata": {"split": "failures"}}\n'
    (place / "f.jsonl").write_text(marked)
    for lazy in (False, True):
        found = Dataset.load("f.jsonl", lazy=lazy).split_origin
        assert found is not None
        assert (found.name, found.size) == ("failures", 1)
    (place / "f.jsonl").write_text(marked + '{"id": "b", "input": 1}\n')
    assert Dataset.load("f.jsonl").split_origin is None
