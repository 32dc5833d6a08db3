"""Splits stay: what is added to a dataset moves no sample, and what belongs together is never in two splits."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from fairtrial import EvalSuite
from fairtrial.data import Dataset, Sample
from fairtrial.data.similar import TextIndex
from fairtrial.data.splits import NAMES, Splits
from fairtrial.errors import ConfigurationError, DatasetError
from fairtrial.store.memory import MemoryStore

_LETTERS = random.Random(0)
WORDS = ["".join(_LETTERS.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(2000)]


def question(seed: str, words: int = 30) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def near(text: str) -> str:
    """The same question after another word, which adds 7 runs of characters to some 205."""
    return "please " + text


def samples(count: int, start: int = 0) -> list[Sample[str, Any]]:
    return [Sample(f"s{n}", question(f"q{n}")) for n in range(start, start + count)]


def places(splits: Splits[Any, Any]) -> dict[str, str]:
    return {sample.id: name for name in NAMES for sample in getattr(splits, name)}


def in_split(splits: Splits[Any, Any], name: str) -> Sample[Any, Any]:
    found: Sample[Any, Any] = getattr(splits, name)[0]
    return found


def test_every_sample_is_in_one_split_by_the_hash_of_its_id_whatever_the_order() -> None:
    data = Dataset(samples(400), name="support")
    splits = data.split(train=0.5, validation=0.2, test=0.3, seed=3)
    assert len(places(splits)) == 400
    assert [abs(len(getattr(splits, name)) - size) < 40 for name, size in zip(NAMES, (200, 80, 120), strict=True)]
    assert places(data.shuffle(9).split(train=0.5, validation=0.2, test=0.3, seed=3)) == places(splits)
    assert places(data.split(seed=4)) != places(splits)
    assert [sample.id for sample in splits.test] == [one.id for one in data if places(splits)[one.id] == "test"]
    assert splits.notes == ()


def test_a_split_has_a_name_that_its_parts_keep() -> None:
    splits = Dataset(samples(60), name="support").split()
    origin = splits.test.split_origin
    assert origin is not None
    assert (origin.name, origin.fingerprint, origin.size) == ("test", splits.test.fingerprint, len(splits.test))
    trained = splits.train.split_origin
    assert trained is not None
    assert (trained.name, trained.test, trained.test_size) == ("train", origin.fingerprint, origin.size)
    assert splits.test.head(3).split_origin == splits.test.shuffle(1).split_origin == origin
    assert splits.test.filter(lambda sample: sample.id > "s3").split_origin == origin
    assert repr(splits.train) == f"<Dataset 'support' version 1.0, split train: {len(splits.train)} samples>"
    assert Dataset(samples(3)).split_origin is None


def test_clusters_and_nearly_equal_inputs_stay_together() -> None:
    rows: list[Sample[str, Any]] = [Sample(f"s{n}", question(f"q{n}"), None, {"customer": n % 40}) for n in range(200)]
    rows += [Sample(f"near{n}", near(question(f"q{n}")), None, {"customer": 100 + n}) for n in range(20)]
    rows += [Sample(f"same{n}", question(f"q{n}").upper() + "  ", None, {"customer": 200 + n}) for n in range(20)]
    splits = Dataset(rows).split(by="customer")
    where = places(splits)
    assert len(where) == 240
    for n in range(200):
        assert where[f"s{n}"] == where[f"s{n % 40}"]
    for n in range(20):
        assert where[f"near{n}"] == where[f"same{n}"] == where[f"s{n}"]
    assert set(where.values()) == set(NAMES)
    alone = places(Dataset(rows).split(similar=None))
    assert any(alone[f"near{n}"] != alone[f"s{n}"] for n in range(20))
    assert all(alone[f"same{n}"] == alone[f"s{n}"] for n in range(20))


def test_samples_that_are_added_move_none_and_follow_their_neighbour(tmp_path: Path) -> None:
    file = tmp_path / "support.splits.jsonl"
    rng, rows = random.Random(5), samples(30)
    before: dict[str, str] = {}
    for step in range(8):
        splits = Dataset(rows).split(file=file, by="customer")
        where = places(splits)
        assert {name: where[name] for name in before} == before
        for sample in rows:
            if sample.id.startswith("near") and sample.id not in splits.left_out:
                assert where[sample.id] == where[str(sample.metadata["of"])]
        before = where
        old = rng.sample([one for one in rows if one.id.startswith("s")], 5)
        # An id that sorts before all others would change which one decides over its group.
        rows = [
            *[Sample(f"near-{step}-{one.id}", near(one.input), None, {"of": one.id}) for one in old],
            *rows,
            *samples(10, start=100 * (step + 1)),
        ]
        rng.shuffle(rows)
    assert len(before) > 130


def test_a_new_sample_that_links_two_splits_is_left_out_and_named(tmp_path: Path) -> None:
    file = tmp_path / "splits.jsonl"
    rows: list[Sample[str, Any]] = [Sample(one.id, one.input, None, {"customer": one.id}) for one in samples(40)]
    splits = Dataset(rows).split(file=file, by="customer")
    tested, trained = in_split(splits, "test"), in_split(splits, "train")
    link: Sample[str, Any] = Sample("link", near(tested.input), None, {"customer": trained.id})
    follower: Sample[str, Any] = Sample("follower", near(near(trained.input)))
    after = Dataset([link, follower, *rows]).split(file=file, by="customer")
    assert after.left_out == {"link": f"belongs to {tested.id} of test and {trained.id} of train"}
    assert after.notes == (
        f"1 sample left out, linked to two splits: link belongs to {tested.id} of test and {trained.id} of train.",
    )
    assert places(after) == {**places(splits), "follower": "train"}
    assert repr(after).endswith(", 1 left out>")
    assert places(Dataset([link, *rows]).split(file=file, by="customer")) == places(splits)


def test_an_edited_sample_never_moves(tmp_path: Path) -> None:
    file = tmp_path / "splits.jsonl"
    rows = samples(40)
    splits = Dataset(rows).split(file=file)
    tested, trained = in_split(splits, "test"), in_split(splits, "train")
    others = [one for one in rows if one.id != trained.id]
    harmless = Dataset([*others, Sample(trained.id, question("new"))]).split(file=file)
    assert places(harmless) == places(splits)
    leaking = Dataset([*others, Sample(trained.id, near(tested.input))]).split(file=file)
    assert leaking.left_out == {trained.id: f"was in train, belongs to {tested.id} of test"}
    assert places(Dataset([*others, trained]).split(file=file)) == places(splits)


def test_the_input_of_a_removed_sample_stays_in_its_split(tmp_path: Path) -> None:
    file = tmp_path / "splits.jsonl"
    rows = samples(40)
    before = places(Dataset(rows).split(file=file))
    renamed: Splits[str, Any] = Dataset([Sample(f"again-{one.id}", one.input) for one in rows]).split(file=file)
    assert places(renamed) == {f"again-{name}": split for name, split in before.items()}
    assert places(Dataset(rows).split(file=file)) == before


def test_a_file_has_no_inputs_and_is_not_written_again_without_a_change(tmp_path: Path) -> None:
    file = tmp_path / "splits.jsonl"
    data = Dataset(samples(20))
    splits = data.split(file=file)
    text = file.read_text(encoding="utf-8")
    assert json.loads(text.splitlines()[0])["format"] == "fairtrial.splits/1"
    assert len(text.splitlines()) == 21
    assert not any(word in text for word in WORDS if len(word) > 4)
    written = file.stat().st_mtime_ns, file.stat().st_ino
    assert places(data.split(file=file)) == places(splits)
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["splits.jsonl"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seed": 1}, "seed=0"), ({"train": 0.6, "test": 0.2}, "shares="), ({"by": "kind"}, "by=None"),
     ({"similar": 0.9}, "similar=0.8")],
)  # fmt: skip
def test_a_file_of_other_splits_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "splits.jsonl"
    data = Dataset(samples(10))
    data.split(file=file)
    with pytest.raises(DatasetError, match=f"splits.jsonl:1: the splits were made with {message}"):
        data.split(file=file, **changes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a file of splits|expected|JSON"),
        ('{"id": "s1"}', "not a file of splits"),
        ('{"id": "s1", "split": "dev", "input": "0f"}', "must name a new sample and its split"),
        ('{"id": 3, "split": "test", "input": "0f"}', "must name a new sample and its split"),
        ('{"id": "s1", "split": "test", "input": ["0f"]}', "must name a new sample and its split"),
        ('{"id": "s1", "split": "test", "input": "0f", "cluster": 2}', "must name a new sample and its split"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "splits.jsonl"
    data = Dataset(samples(1))
    data.split(file=file)
    with file.open("a", encoding="utf-8") as page:
        page.write(line + "\n")
    with pytest.raises(DatasetError, match=message) as raised:
        data.split(file=file)
    assert (raised.value.path, raised.value.line) == (file, 3)


@pytest.mark.parametrize("content", ["", '{"format": "other"}\n'])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    file = tmp_path / "splits.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DatasetError, match=r"empty|format must be"):
        Dataset(samples(3)).split(file=file)
    assert file.read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": 0.5, "validation": 0.5, "test": 0.5}, "must add up to 1"),
        ({"train": 1.5, "validation": 0.0, "test": -0.5}, "must be a share from 0 to 1"),
        ({"similar": 0.2}, "similar must be"),
    ],
)
def test_shares_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Dataset(samples(3)).split(**arguments)


def test_a_group_that_is_too_large_is_named() -> None:
    rows = [Sample(f"s{n}", question("template", 60) + f" {n}") for n in range(50)] + samples(20, start=100)
    splits = Dataset(rows).split()
    (holder,) = {name for n in range(50) for name in [places(splits)[f"s{n}"]]}
    assert any(
        note.startswith(f"{holder} has ") and note.endswith("The largest group that stays together has 50.")
        for note in splits.notes
    )


def test_shares_of_few_samples_are_not_blamed_on_groups() -> None:
    notes = Dataset(samples(2)).split().notes
    assert notes
    assert all(note.endswith("With so few samples, shares differ by chance.") for note in notes)


def test_a_lazy_dataset_is_split_as_one_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": one.id, "input": one.input}) + "\n" for one in samples(50)))
    lazy = Dataset.load(path, str, lazy=True).split()
    assert places(lazy) == places(Dataset(samples(50)).split())
    assert not isinstance(lazy.test.samples, tuple)


def test_similar_texts_are_found_and_others_are_not() -> None:
    texts = [question("a", 80), near(question("a", 80)), question("b", 80), "2+2", "2-2", "", " "]
    index = TextIndex(0.8)
    for text in texts:
        index.add(text)
    joined: list[tuple[int, int]] = []
    index.join_similar(lambda place: place, lambda first, second: joined.append((first, second)))
    assert {pair for pair in joined if pair[0] != pair[1]} == {(0, 1), (5, 6)}


async def test_reports_name_the_split_of_a_run_and_of_its_outputs_scored_again() -> None:
    splits = Dataset(samples(20), name="support").split(seed=1)
    suite = EvalSuite(
        "support", splits.test.head(4), lambda question: question, lambda output, expected: float("a" in output)
    )
    store = MemoryStore()
    report = await suite.run(store=store)
    again = await suite.rescore(report.run_id, lambda output, expected: float("b" in output), store=store)
    for one in (report, again):
        assert one.run.noted.split == splits.test.split_origin
        assert "4 samples of split test" in one.to_markdown()


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_others_can_read_a_file_of_splits_and_its_mode_stays(tmp_path: Path) -> None:
    file, plain = tmp_path / "splits.jsonl", tmp_path / "plain"
    plain.write_text("")
    Dataset(samples(3)).split(file=file)
    assert file.stat().st_mode == plain.stat().st_mode
    file.chmod(0o640)
    Dataset(samples(4)).split(file=file)
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(one.name for one in tmp_path.iterdir()) == ["plain", "splits.jsonl"]
