"""R1 to R4 and R7: samples and datasets made in code."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.base.codec import canonical
from fairtrial.data import Attachment, BlobFolder, Dataset, Sample
from fairtrial.data.fingerprint import sample_content
from fairtrial.errors import DataError, DatasetError
from tests.records import changeable

texts = st.text(st.characters(codec=None), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
samples = st.builds(Sample, texts.filter(bool), values, values, st.dictionaries(texts, values, max_size=2))
sample_lists = st.lists(samples, max_size=8, unique_by=lambda sample: sample.id)


def numbers(count: int) -> Dataset[int, int]:
    return Dataset([Sample(f"s{n}", n, n * n, {"even": n % 2 == 0}) for n in range(count)], name="squares")


@pytest.mark.proves("R1")
def test_a_sample_is_frozen_slotted_and_has_empty_metadata_by_default() -> None:
    sample = Sample("a", {"q": 1}, 2)
    assert (sample.id, sample.input, sample.expected, dict(sample.metadata)) == ("a", {"q": 1}, 2, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.input = 3  # type: ignore[misc, assignment]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del sample.input
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.other = 3  # type: ignore[attr-defined]
    assert not hasattr(sample, "__dict__")
    assert Sample[str, int]("a", "b", 1) == Sample("a", "b", 1)
    assert repr(sample) == "Sample(id='a', input={'q': 1}, expected=2, metadata={})"


@pytest.mark.proves("R1")
def test_metadata_is_copied_and_cannot_be_changed() -> None:
    given: dict[str, Any] = {"tags": ["x"], "deep": {"a": [1]}, "pair": ([1],)}
    sample = Sample[int, None]("a", 1, metadata=given)
    given["tags"].append("y")
    given["pair"][0].append(2)
    assert sample.metadata == {"tags": ["x"], "deep": {"a": [1]}, "pair": ([1],)}
    changes: list[Callable[[Any], object]] = [
        lambda meta: meta.update(a=1),
        lambda meta: meta["tags"].append(1),
        lambda meta: meta["deep"]["a"].sort(),
        lambda meta: meta["pair"][0].append(1),
        lambda meta: meta.setdefault("b", 1),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="cannot be changed"):
            change(sample.metadata)
    assert copy.deepcopy(sample) == copy.copy(sample) == pickle.loads(pickle.dumps(sample)) == sample


@pytest.mark.proves("R2")
def test_a_sample_without_a_reference_is_legal_and_ground_truth_reads_the_same_value() -> None:
    assert Sample("a", "write a poem").expected is None
    assert Sample("a", "write a poem").ground_truth is None
    assert Sample("a", 1, 2).ground_truth == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sample("", 1), "not empty"),
        (lambda: Sample(3, 1), "must be text"),  # type: ignore[arg-type]
        (lambda: Sample("a", 1, metadata=[1]), r"metadata must be a mapping \(got list\)"),  # type: ignore[arg-type]
        (lambda: Sample("a", 1, metadata={1: 2}), r"metadata keys must be text \(got 1\)"),  # type: ignore[dict-item]
    ],
)
def test_a_sample_that_cannot_be_stored_is_refused(make: Any, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        make()


@pytest.mark.proves("R3")
def test_a_dataset_has_a_length_an_order_indexes_and_slices() -> None:
    dataset = numbers(5)
    assert len(dataset) == 5
    assert [sample.input for sample in dataset] == [0, 1, 2, 3, 4]
    assert (dataset[0].input, dataset[-1].input) == (0, 4)
    assert isinstance(dataset[1:3], Dataset)
    assert [sample.input for sample in dataset[3:0:-1]] == [3, 2, 1]
    assert dataset[1] in dataset
    with pytest.raises(IndexError):
        dataset[5]


@pytest.mark.proves("R3")
def test_a_dataset_cannot_be_changed() -> None:
    dataset = numbers(2)
    with pytest.raises(TypeError):
        dataset[0] = dataset[1]  # type: ignore[index]
    for name in ("name", "version", "samples", "fingerprint", "input_type", "expected_type", "other"):
        with pytest.raises(AttributeError):
            setattr(dataset, name, "x")
    assert isinstance(dataset.samples, tuple)


@pytest.mark.proves("R3")
def test_a_dataset_can_be_filtered_shuffled_and_cut_without_changing() -> None:
    dataset = numbers(20)
    even = dataset.filter(lambda sample: bool(sample.metadata["even"]))
    assert [sample.input for sample in even] == list(range(0, 20, 2))
    shuffled = dataset.shuffle(7)
    assert list(shuffled) != list(dataset)
    assert sorted(sample.input for sample in shuffled) == list(range(20))
    assert list(shuffled) == list(dataset.shuffle(7))
    assert list(shuffled) != list(dataset.shuffle(8))
    assert shuffled.fingerprint == dataset.fingerprint
    assert len(dataset) == 20
    assert even.name == shuffled.name == "squares"


@pytest.mark.proves("R7")
def test_head_caps_the_number_of_samples() -> None:
    assert [sample.input for sample in numbers(5).head(2)] == [0, 1]
    assert len(numbers(5).head(9)) == 5
    assert len(numbers(5).head(-1)) == 0


@pytest.mark.proves("R4")
def test_a_dataset_has_a_name_a_version_and_a_fingerprint() -> None:
    dataset: Dataset[int, None] = Dataset([Sample("a", 1)], "mine", "2.1")
    assert (dataset.name, dataset.version, Dataset([]).version) == ("mine", "2.1", "1.0")
    assert len(dataset.fingerprint) == len(dataset.order) == 32
    assert repr(dataset) == "<Dataset 'mine' version 2.1: 1 samples>"


@pytest.mark.proves("R5")
def test_pairs_and_mappings_become_a_dataset_with_ids_from_their_content() -> None:
    capitals = Dataset.of({"France": "Paris", "Japan": "Tokyo"}, name="capitals")
    assert [(sample.input, sample.expected) for sample in capitals] == [("France", "Paris"), ("Japan", "Tokyo")]
    again = Dataset.of([("Japan", "Tokyo"), ("France", "Paris")])
    assert {sample.id for sample in again} == {sample.id for sample in capitals}
    assert again.fingerprint == capitals.fingerprint
    with pytest.raises(DatasetError, match=r"pair 2 repeats pair 0 \('a', 1\)\nremove it, or make"):
        Dataset.of([("a", 1), ("b", 1), ("a", 1)])
    with pytest.raises(DataError, match="cannot be encoded"):
        Dataset.of([(object(), 1)])


def test_duplicate_ids_and_things_that_are_no_samples_are_refused() -> None:
    with pytest.raises(DatasetError, match="duplicate id 'a' at positions 0 and 2"):
        Dataset([Sample("a", 1), Sample("b", 2), Sample("a", 3)])
    with pytest.raises(DatasetError, match="must be Sample objects"):
        Dataset([1])  # type: ignore[arg-type]


def test_datasets_are_equal_when_name_version_content_and_order_are() -> None:
    assert numbers(3) == numbers(3)
    assert hash(numbers(3)) == hash(numbers(3))
    assert numbers(3) != numbers(4)
    assert numbers(3) != numbers(3)[::-1]
    assert numbers(3) != 3


@pytest.mark.parametrize("given", ["", 'a "q" \0 é', "\ud800", 5, -(1 << 70), True, None, 1.0, {"b": 1, "a": 2}])
@pytest.mark.parametrize("metadata", [{}, {"level": 1}])
def test_a_fingerprint_is_that_of_the_canonical_form(given: Any, metadata: dict[str, Any]) -> None:
    for expected in ("x", 7, given):
        sample = Sample("é\0", given, expected, metadata)
        content = canonical([sample.id, *sample_content(sample)])
        total = int.from_bytes(hashlib.sha256(content).digest())
        assert Dataset([sample]).fingerprint == hashlib.sha256(b"1:%x" % total).hexdigest()[:32]


@pytest.mark.proves("R4")
@given(sample_lists, st.randoms())
def test_equal_content_has_an_equal_fingerprint_whatever_its_order(given_samples: list[Any], order: Any) -> None:
    turned = list(given_samples)
    order.shuffle(turned)
    assert Dataset(turned).fingerprint == Dataset(given_samples, "other", "2").fingerprint


@pytest.mark.proves("R4")
@given(sample_lists, sample_lists)
def test_different_content_has_a_different_fingerprint(one: list[Any], other: list[Any]) -> None:
    same = {sample.id: sample for sample in one} == {sample.id: sample for sample in other}
    if not same:
        assert Dataset(one).fingerprint != Dataset(other).fingerprint


@pytest.mark.proves("R4")
@given(texts.filter(bool), st.data())
def test_one_changed_character_changes_the_fingerprint(text: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.characters(codec=None).filter(lambda new: new != text[place]))
    changed = text[:place] + letter + text[place + 1 :]
    base: Any = Sample("id", "in", "out", {"k": "v"})
    for field in ("id", "input", "expected"):
        one = Dataset([dataclasses.replace(base, **{field: text})])
        assert one.fingerprint != Dataset([dataclasses.replace(base, **{field: changed})]).fingerprint
    with_text, with_other = Dataset([Sample("a", 1, 2, {"k": text})]), Dataset([Sample("a", 1, 2, {"k": changed})])
    assert with_text.fingerprint != with_other.fingerprint


def test_moving_a_value_from_one_field_to_another_changes_the_fingerprint() -> None:
    moved: list[Sample[Any, Any]] = [Sample("a", "x"), Sample("a", None, "x"), Sample("a", None, None, {"x": None})]
    assert len({Dataset([sample]).fingerprint for sample in moved}) == 3


def test_a_sample_that_cannot_be_fingerprinted_is_named() -> None:
    with pytest.raises(DatasetError, match=r"sample 'a': input cannot be stored: at \$\.k: a builtins\.object"):
        Dataset([Sample("a", {"k": object()})]).fingerprint
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(DatasetError, match="sample 'a': it cannot be stored: nested too deeply"):
        Dataset([Sample("a", loop)]).fingerprint
    for sample, part in ((Sample("a", 10**9_999, "x"), "input"), (Sample("a", 1, 10**9_999), "expected")):
        with pytest.raises(DatasetError, match=f"sample 'a': {part} cannot be stored: an integer of more than"):
            _ = Dataset([sample]).fingerprint


class TestAttachments:
    def test_bytes_are_kept_under_their_hash_and_given_back_checked(self, tmp_path: Any) -> None:
        folder = BlobFolder(tmp_path / "blobs")
        picture = folder.put(b"\x89PNG", media_type="image/png", name="a.png")
        assert picture == folder.put(b"\x89PNG", media_type="image/png", name="a.png")
        assert picture == Attachment.of(b"\x89PNG", media_type="image/png", name="a.png")
        assert (picture.size, folder.get(picture)) == (4, b"\x89PNG")
        file = tmp_path / "note.txt"
        file.write_bytes(b"hi")
        assert folder.put_file(file).media_type == "text/plain"
        assert folder.put_file(file, media_type="x/y").name == "note.txt"

    def test_missing_and_damaged_bytes_are_named(self, tmp_path: Any) -> None:
        folder = BlobFolder(tmp_path)
        with pytest.raises(DataError, match=r"attachment a\.png is not under"):
            folder.get(Attachment.of(b"x", name="a.png"))
        kept = folder.put(b"x")
        (tmp_path / kept.sha256[:2] / kept.sha256).write_bytes(b"y")
        with pytest.raises(DataError, match="is damaged"):
            folder.get(kept)

    @pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 64, "a" * 63, "a" * 64 + "\n"])
    def test_nothing_but_a_hash_names_an_attachment(self, name: str) -> None:
        with pytest.raises(DataError, match="64 lower-case hex digits"):
            Attachment(name)


def test_what_a_dataset_says_about_itself_is_read_only() -> None:
    assert isinstance(Sample("a", 1).metadata, Mapping)
    assert Dataset([]).input_type is object
    assert Dataset([]).expected_type is object


@pytest.mark.parametrize("wrong", ["ab", b"ab", "question", 3, ("a", "b", "c")])
def test_pairs_that_are_none_are_refused_with_their_position(wrong: Any) -> None:
    with pytest.raises(DatasetError, match=r"pairs must be \(input, expected\) \(got .* as pair 1\)"):
        Dataset.of([("a", "b"), wrong])


def test_records_cannot_be_changed() -> None:
    assert changeable("data") == set()


def test_a_fingerprint_is_the_same_in_every_version() -> None:
    """A change would make every stored run one of another dataset. The sum of five hashes exceeds its modulus."""
    samples = [Sample(f"s{number}", f"question {number}", number) for number in range(5)]
    assert Dataset(samples).fingerprint == "5910ab8f88394632c685764f20783c66"
    assert Dataset(samples[::-1]).fingerprint == "5910ab8f88394632c685764f20783c66"
