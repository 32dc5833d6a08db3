"""R5: datasets that stay in their file."""

from __future__ import annotations

import enum
import json
import os
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import platformdirs
import pytest
from platformdirs.macos import MacOS
from pydantic import BaseModel

from fairtrial.data import Dataset, Sample
from fairtrial.data import index as indexing
from fairtrial.data.loaders import signature_of
from fairtrial.errors import DatasetError


def made(path: Path, count: int) -> Path:
    rows = (
        {"id": f"s{n}", "input": {"n": n}, "expected": n % 3, "metadata": {"even": n % 2 == 0}} for n in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" + "\n" * (row["expected"] == 1) for row in rows))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FAIRTRIAL_CACHE_DIR", str(folder))
    return folder


@pytest.mark.proves("R5", "R3")
def test_a_lazy_dataset_does_all_that_one_in_memory_does(tmp_path: Path) -> None:
    path = made(tmp_path / "a.jsonl", 50)
    lazy, whole = Dataset.load(path, lazy=True), Dataset.load(path)
    assert lazy == whole
    assert lazy.fingerprint == whole.fingerprint
    assert list(lazy) == list(lazy) == list(whole)
    assert [lazy[n] for n in (0, 17, -1)] == [whole[n] for n in (0, 17, -1)]
    assert lazy[10:20] == whole[10:20]
    assert list(lazy[40:2:-7][1:3]) == list(whole[40:2:-7][1:3])
    assert lazy[30:][5] == whole[35]
    assert list(lazy.head(3)) == list(whole.head(3))
    assert list(lazy.shuffle(3)) == list(whole.shuffle(3))
    assert lazy.shuffle(3).fingerprint == whole.fingerprint
    even = lazy.filter(lambda sample: bool(sample.metadata["even"]))
    assert list(even) == list(whole.filter(lambda sample: bool(sample.metadata["even"])))
    assert list(even.shuffle(1)[2:5].filter(lambda sample: True)) == list(list(even.shuffle(1))[2:5])
    with pytest.raises(IndexError):
        lazy[50]
    assert not isinstance(lazy.samples, tuple)


@pytest.mark.proves("R5")
def test_the_index_is_kept_by_path_size_time_and_types(tmp_path: Path, cache: Path, monkeypatch: Any) -> None:
    path = made(tmp_path / "a.jsonl", 10)
    first = Dataset.load(path, lazy=True)
    with monkeypatch.context() as patch:
        patch.setattr(indexing, "build_index", None)  # A second pass would fail.
        again = Dataset.load(path, lazy=True)
        assert (again.fingerprint, list(again)) == (first.fingerprint, list(first))
        with pytest.raises(TypeError):
            Dataset.load(path, dict[str, int], lazy=True)
    (kept,) = cache.rglob("*.idx")
    assert oct(kept.stat().st_mode & 0o777) == "0o600"
    os.utime(path, ns=(1, 1))
    with pytest.raises(DatasetError, match="the file has changed since it was indexed"):
        list(first)
    with pytest.raises(DatasetError, match="the file has changed since it was indexed"):
        first[0]
    assert list(Dataset.load(path, lazy=True)) == list(Dataset.load(path))


@pytest.mark.parametrize("damage", [b"", b"{}", b"junk\n", b"[]\n" + b"\0" * 80, None])
def test_a_damaged_index_is_built_again(tmp_path: Path, cache: Path, damage: bytes | None) -> None:
    path = made(tmp_path / "a.jsonl", 10)
    fingerprint = Dataset.load(path, lazy=True).fingerprint
    (kept,) = cache.rglob("*.idx")
    content = kept.read_bytes()
    kept.write_bytes(content[:-3] if damage is None else damage)
    again = Dataset.load(path, lazy=True)
    assert (again.fingerprint, len(again), again[9].id) == (fingerprint, 10, "s9")
    assert kept.read_bytes() == content


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FAIRTRIAL_CACHE_DIR", str(blocked))
    assert len(Dataset.load(made(tmp_path / "a.jsonl", 4), lazy=True)) == 4


def test_a_full_disk_leaves_no_half_written_index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert len(Dataset.load(made(tmp_path / "a.jsonl", 4), lazy=True)) == 4
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_the_cache_is_in_the_users_cache_folder_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAIRTRIAL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert indexing.cache_folder() == Path("/somewhere/fairtrial")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert indexing.cache_folder() == Path.home() / ".cache" / "fairtrial"


def test_the_cache_folder_on_macos_is_the_one_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAIRTRIAL_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(platformdirs, "PlatformDirs", MacOS)
    assert indexing.cache_folder() == Path.home() / "Library" / "Caches" / "fairtrial"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "a.jsonl", 5)

    def meddle(row: dict[str, Any]) -> Sample[Any, Any]:
        with path.open("a") as file:
            file.write("\n")
        return Sample(row["id"], row["input"])

    with pytest.raises(DatasetError, match="changed while it was being read"):
        Dataset.load(path, row=meddle, lazy=True)


def test_a_bad_row_met_by_random_access_is_named_by_its_line(tmp_path: Path) -> None:
    path = made(tmp_path / "a.jsonl", 8)
    broken: set[str] = set()

    def row(fields: dict[str, Any]) -> Sample[Any, Any]:
        return Sample("" if fields["id"] in broken else fields["id"], fields["input"])

    lazy = Dataset.load(path, row=row, lazy=True)
    broken.add("s5")
    with pytest.raises(DatasetError, match=r"a\.jsonl:8: the id of a sample must be text"):
        lazy[5]
    with pytest.raises(DatasetError, match=r"a\.jsonl:8: the id of a sample must be text"):
        list(lazy)


def test_what_cannot_be_fingerprinted_is_named_by_its_line(tmp_path: Path) -> None:
    path = made(tmp_path / "a.jsonl", 3)
    with pytest.raises(DatasetError, match=r"a\.jsonl:1: sample 's0': input cannot be stored: a builtins\.object"):
        Dataset.load(path, row=lambda row: Sample(row["id"], object()), lazy=True)


def test_ids_whose_hashes_meet_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = indexing.DuplicateCheck
    monkeypatch.setattr(check, "add", lambda self, sample_id: self._buckets[0].append(7))
    monkeypatch.setattr(indexing, "hash", lambda _: 7, raising=False)
    assert len(Dataset.load(made(tmp_path / "a.jsonl", 5), lazy=True)) == 5


@dataclass
class Inner:
    a: int
    b: Any = field(default_factory=lambda: 3)


class Tag(enum.Enum):
    X = 1


class Row(TypedDict):
    inner: Inner


class Pair(NamedTuple):
    left: Inner
    right: int = 0


class Model(BaseModel):
    x: int


type Alias = list[Inner]
type Tree = int | list[Tree]


class TestTypeSignatures:
    def test_equal_types_have_equal_signatures_and_different_ones_differ(self) -> None:
        kinds: list[Any] = [
            int,
            str,
            list[int],
            list[str],
            int | str,
            Inner,
            list[Inner],
            Row,
            Pair,
            Tag,
            Model,
            Tree,
            Literal["a"],
        ]
        seen = {json.dumps(signature_of(kind)) for kind in kinds}
        assert len(seen) == len(kinds)
        assert " at 0x" not in "".join(seen)
        assert signature_of(Alias) == signature_of(list[Inner])

    def test_a_change_deep_inside_a_type_changes_its_signature(self) -> None:
        def outer(default: int) -> Any:
            inner = make_dataclass("Leaf", [("n", int, default)])
            return make_dataclass("Stem", [("leaf", list[inner])])  # type: ignore[valid-type]

        assert signature_of(outer(1)) == signature_of(outer(1))
        assert signature_of(outer(1)) != signature_of(outer(2))
