"""Parquet files that are damaged, that lie about their content, or that hold values which Python lacks."""

from __future__ import annotations

import resource
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fairtrial import Dataset
from fairtrial.errors import DataError, DatasetError, LimitExceededError


def write(path: Path, column: Any, **options: Any) -> Path:
    count = len(column)
    table = pyarrow.table([pyarrow.array([str(n) for n in range(count)]), column], names=["id", "input"])
    pyarrow.parquet.write_table(table, path, **options)
    return path


def nested(levels: int) -> Any:
    kind: Any = pyarrow.int64()
    value: Any = 1
    for _ in range(levels):
        kind, value = pyarrow.struct([("a", kind)]), {"a": value}
    return pyarrow.array([value], kind)


NOT_UTF_8 = [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
LACKING = {
    "a time of the year 31,000,000": pyarrow.array([10**15], pyarrow.timestamp("s")),
    "a time before the year 1": pyarrow.array([-(10**17)], pyarrow.timestamp("ms")),
    "a date of the year 5,000,000": pyarrow.array([2**31 - 1], pyarrow.int32()).cast(pyarrow.date32()),
    "a duration of 10^11 years": pyarrow.array([2**62], pyarrow.duration("s")),
    "a zone that is nowhere": pyarrow.array([0], pyarrow.timestamp("us", tz="+99:99")),
    "a text that is not UTF-8": pyarrow.Array.from_buffers(pyarrow.string(), 1, NOT_UTF_8),
    "a field twice": pyarrow.StructArray.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"]),
    "250 levels": nested(250),
}
KEPT = {
    "a map with a key twice": pyarrow.array([[("a", 1), ("a", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    "nothing": pyarrow.nulls(1),
    "bytes": pyarrow.array([b"\xff"]),
    "not a number": pyarrow.array([float("nan")]),
    "20 levels": nested(20),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_value_that_python_lacks_is_refused_with_its_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatasetError, match=r"rows\.parquet: not Parquet"):
        Dataset.load(write(tmp_path / "rows.parquet", LACKING[name]))


@pytest.mark.parametrize("name", KEPT)
def test_values_of_every_other_type_are_read(tmp_path: Path, name: str) -> None:
    assert len(Dataset.load(write(tmp_path / "rows.parquet", KEPT[name]))) == 1


def test_a_column_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", pyarrow.array(["x"]))
    path.write_bytes(path.read_bytes().replace(b"input", b"inpu\x80"))
    with pytest.raises(DatasetError, match=r"rows\.parquet: not Parquet"):
        Dataset.load(path)


def test_a_damaged_footer_is_refused_or_read_without_harm(tmp_path: Path) -> None:
    """The footer states rows, places, sizes and types; its own length is in the last eight bytes."""
    path = write(tmp_path / "rows.parquet", pyarrow.array(["text"] * 100), store_schema=False)
    whole = path.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    odd = [whole[:-8] + size.to_bytes(4, "little") + b"PAR1" for size in (0, 1, length - 1, 2**31 - 1, 2**32 - 1)]
    odd += [whole[:-4] + b"PARE", whole[:-1], whole[:4], b"PAR1" * 3, whole[4:]]
    random = Random(1)
    for _ in range(150):
        at = random.randrange(len(whole) - 8 - length, len(whole) - 8)
        odd.append(whole[:at] + random.choice((b"\x00", b"\x7f", b"\xff", random.randbytes(1))) + whole[at + 1 :])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for content in odd:
        path.write_bytes(content)
        try:
            Dataset.load(path)
        except DataError as error:
            assert "rows.parquet" in str(error)  # noqa: PT017
            refused += 1
    assert refused > 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 500


@pytest.mark.parametrize("kind", ["a dictionary", "a run of equal values", "compressed pages"])
def test_few_bytes_do_not_become_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("fairtrial.data.loaders._PARQUET_BYTES", 20 << 20)
    column = pyarrow.array(["x" * 100_000] * 2_000)
    choices: dict[str, dict[str, Any]] = {
        "a dictionary": {"use_dictionary": True},
        "a run of equal values": {"compression": "none"},
        "compressed pages": {"use_dictionary": False, "compression": "zstd"},
    }
    path = write(tmp_path / "rows.parquet", column, **choices[kind])
    assert path.stat().st_size < 1 << 20
    del column
    with pytest.raises(LimitExceededError, match=r"rows\.parquet must have at most 20,971,520 bytes"):
        Dataset.load(path)
    monkeypatch.setenv("FAIRTRIAL_FILE_LIMITS", "0.5")
    with pytest.raises(LimitExceededError, match=r"rows\.parquet must have at most 10,485,760 bytes"):
        Dataset.load(path)
