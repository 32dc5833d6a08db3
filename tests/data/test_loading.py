"""R5 and R6: datasets in files, and the error messages about invalid ones."""

from __future__ import annotations

import csv
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from fairtrial import Attachment, ConfigurationError, Dataset, Sample
from fairtrial.data import load_jsonl
from fairtrial.errors import DatasetError


@dataclass(frozen=True)
class Question:
    text: str
    options: list[str] | None = None
    weight: float = 1.0


class Ticket(BaseModel):
    subject: str
    opened: date


class Colour(enum.Enum):
    RED = "red"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    return path


def jsonl(path: Path, *rows: Any) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def complaint(path: Path, *types: Any, **options: Any) -> str:
    """What is said about a bad file; loading it whole and lazily must say the same."""
    said = set()
    for lazy in (False, True) if path.suffix == ".jsonl" else (False,):
        with pytest.raises(DatasetError) as caught:
            Dataset.load(path, *types, lazy=lazy, **options)
        said.add(str(caught.value).removeprefix(f"{path}:").strip())
    (only,) = said
    return only


@pytest.fixture(params=[False, True], ids=["whole", "lazy"])
def lazy(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class TestJsonl:
    @pytest.mark.proves("R5", "R6")
    def test_rows_are_read_into_the_types_asked_for(self, tmp_path: Path, lazy: bool) -> None:
        path = jsonl(
            tmp_path / "questions.jsonl",
            {"id": "a", "input": {"text": "2+2?", "weight": 2}, "expected": 4},
            {"id": 7, "input": {"text": "hm", "options": ["x"]}, "metadata": {"level": 3}},
            {"id": "c", "input": {"text": "?"}, "ground_truth": 5},
        )
        dataset = Dataset.load(path, Question, int, lazy=lazy)
        assert list(dataset) == [
            Sample("a", Question("2+2?", weight=2.0), 4),
            Sample("7", Question("hm", ["x"]), metadata={"level": 3}),
            Sample("c", Question("?"), 5),
        ]
        assert (dataset.name, dataset.input_type, dataset.expected_type) == ("questions", Question, int)
        assert dataset.fingerprint == Dataset(list(dataset)).fingerprint
        named = Dataset.load(path, name="n", version="3", lazy=lazy)
        assert (named.name, named.version) == ("n", "3")

    @pytest.mark.proves("R5", "R6")
    def test_models_unions_lists_and_attachments_are_read(self, tmp_path: Path, lazy: bool) -> None:
        picture = Attachment.of(b"x", media_type="image/png", name="x.png")
        path = jsonl(
            tmp_path / "a.jsonl",
            {"id": "1", "input": {"subject": "s", "opened": "2024-05-06"}, "expected": ["a", 1, None]},
            {
                "id": "2",
                "input": {"sha256": picture.sha256, "media_type": "image/png", "size": 1, "name": "x.png"},
                "expected": [],
            },
        )
        kinds: Any = (Ticket | Attachment, list[str | int | None])
        first, second = Dataset.load(path, *kinds, lazy=lazy)
        assert first.input == Ticket(subject="s", opened=date(2024, 5, 6))
        assert first.expected == ["a", 1, None]
        assert second.input == picture

    @pytest.mark.proves("R5")
    def test_rows_without_types_are_taken_as_they_are(self, tmp_path: Path, lazy: bool) -> None:
        odd = {"a": "\ufdd0nan", "b": "\0", "c": "\ud800", "\ufdd0": 1}
        path = jsonl(tmp_path / "a.jsonl", {"id": "1", "input": odd, "expected": "\ufdd0"})
        assert "\\ufdd0" in path.read_text()
        (sample,) = Dataset.load(path, lazy=lazy)
        assert (sample.input, sample.expected) == (odd, "\ufdd0")
        raw = write(tmp_path / "b.jsonl", '{"id": "1", "input": {"a": "\ufdd0nan"}}\n')
        (sample,) = Dataset.load(raw, lazy=lazy)
        assert sample.input == {"a": "\ufdd0nan"}

    @pytest.mark.proves("R6")
    def test_our_escape_character_in_a_file_means_itself_for_every_type(self, tmp_path: Path, lazy: bool) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"id": "1", "input": {"text": "\ufdd0nan"}, "expected": "\ufdd00000"})
        (sample,) = Dataset.load(path, Question, str, lazy=lazy)
        assert sample == Sample("1", Question("\ufdd0nan"), "\ufdd00000")
        assert "expected float, got str" in complaint(
            jsonl(tmp_path / "b.jsonl", {"id": "1", "input": "\ufdd0nan"}), float
        )

    @pytest.mark.proves("R6")
    def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_harmless(self, tmp_path: Path, lazy: bool) -> None:
        text = b'\xef\xbb\xbf\r\n{"id":"a","input":1}\r\n\r\n   \n{"id":"b","input":2}'
        dataset = Dataset.load(write(tmp_path / "a.jsonl", text), object, object, lazy=lazy)
        assert [sample.id for sample in dataset] == ["a", "b"]
        assert [dataset[0].id, dataset[-1].id] == ["a", "b"]
        with_mark = Dataset.load(write(tmp_path / "b.jsonl", b'\xef\xbb\xbf{"id":"a","input":1}'), lazy=lazy)
        assert with_mark[0].id == "a"
        for empty in (b"", b"\xef\xbb\xbf", b"\n\n"):
            assert len(Dataset.load(write(tmp_path / "c.jsonl", empty), lazy=lazy)) == 0

    @pytest.mark.proves("R6")
    def test_the_bad_line_of_many_is_named_with_its_field(self, tmp_path: Path) -> None:
        rows: list[dict[str, Any]] = [{"id": f"s{n}", "input": {"text": "t"}, "expected": n} for n in range(1_000)]
        rows[733]["expected"] = "seven"
        path = jsonl(tmp_path / "a.jsonl", *rows)
        assert complaint(path, Question, int) == '734: at $.expected: expected int, got str ("seven")'

    @pytest.mark.proves("R6")
    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('{"id": "a" "input": 1}', "2: not JSON: Expecting ',' delimiter at column 12"),
            ("[1]", "2: a row must be a JSON object"),
            ('{"id": "a", "input": 1, "input": 2}', "2: 'input' occurs twice in one object"),
            ('{"id": "a", "inputs": 1}', "2: unknown field 'inputs'; did you mean 'input'?"),
            (
                '{"id": "a", "input": 1, "zzz": 2}',
                "2: unknown field 'zzz'; put facts about a sample under 'metadata', "
                "or map foreign fields with columns=...",
            ),
            ('{"id": "a"}', "2: a row needs 'input' (found id)"),
            ('{"id": true, "input": 1}', "2: the id of a sample must be text that is not empty (got True)"),
            ('{"id": "", "input": 1}', "2: the id of a sample must be text that is not empty (got '')"),
            ('{"id": "a", "input": NaN}', "2: NaN is not JSON; write null, or leave the field out"),
            ('{"id": "a", "input": true}', "2: at $.input: expected int, got bool (true)"),
            ('{"id": "a", "input": 1, "metadata": 3}', "2: sample 'a': metadata must be a mapping (got int)"),
            (
                '{"id": "a", "input": 1, "expected": 1, "ground_truth": 2}',
                "2: a row must have either 'expected' or 'ground_truth' (got both)",
            ),
            ('{"id": "ok", "input": 2}', "2: duplicate id 'ok'; it was used before on line 1"),
        ],
    )
    def test_bad_rows_are_named(self, tmp_path: Path, line: str, said: str) -> None:
        path = write(tmp_path / "a.jsonl", f'{{"id": "ok", "input": 1}}\n{line}\n{{"id": "b", "input": 1}}\n')
        assert complaint(path, int).partition("\n")[0] == said

    @pytest.mark.proves("R6")
    @pytest.mark.parametrize(
        ("header", "remedy"),
        [
            (
                "question,answer",
                'say which column it is, as in columns={"input": "question", "expected": "answer"}, or rename it',
            ),
            (
                "id;input",
                "its values seem to be separated by ';': save the file with ',' between them, or as .tsv",
            ),
        ],
    )
    def test_columns_without_an_input_are_listed_with_a_remedy(self, tmp_path: Path, header: str, remedy: str) -> None:
        said = complaint(write(tmp_path / "a.csv", f"{header}\n{header}\n"))
        assert remedy in said
        assert header.replace(",", ", ") in said

    @pytest.mark.proves("R6")
    def test_bytes_that_are_no_utf8_are_named(self, tmp_path: Path) -> None:
        assert (
            complaint(write(tmp_path / "a.jsonl", b'\n{"id": "\xff"}')) == "2: not UTF-8: invalid start byte at byte 8"
        )

    @pytest.mark.proves("R6")
    def test_duplicates_far_apart_are_named_with_both_lines(self, tmp_path: Path) -> None:
        rows = [{"id": f"s{n % 900}", "input": n} for n in range(1_000)]
        assert complaint(jsonl(tmp_path / "a.jsonl", *rows)) == ("901: duplicate id 's0'; it was used before on line 1")

    def test_the_same_reference_under_both_names_is_one_reference(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"id": "a", "input": 1, "expected": 2, "ground_truth": 2})
        assert Dataset.load(path)[0].expected == 2


class TestColumns:
    @pytest.mark.proves("R5")
    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
    def test_columns_are_mapped_in_every_format(self, tmp_path: Path, name: str) -> None:
        rows = [
            {"question": "2+2?", "answer": "4", "kind": "sum"},
            {"question": "3*3?", "answer": "9", "kind": "product"},
        ]
        path = tmp_path / name
        match path.suffix:
            case ".jsonl":
                jsonl(path, *rows)
            case ".json":
                write(path, json.dumps(rows))
            case ".csv":
                write(path, "question,answer,kind\n2+2?,4,sum\n3*3?,9,product\n")
            case _:
                pq.write_table(pa.Table.from_pylist(rows), path)
        dataset = Dataset.load(path, str, str, columns={"input": "question", "expected": "answer"})
        assert [(sample.input, sample.expected) for sample in dataset] == [("2+2?", "4"), ("3*3?", "9")]
        assert [sample.metadata for sample in dataset] == [{"kind": "sum"}, {"kind": "product"}]
        assert [sample.id for sample in dataset] == [sample.id for sample in Dataset.of([("2+2?", "4"), ("3*3?", "9")])]

    def test_several_columns_make_one_input_and_named_columns_are_all_the_metadata(
        self, tmp_path: Path, lazy: bool
    ) -> None:
        row = {"number": 7, "question": "who?", "context": "a play", "input": "old", "level": "hard", "note": "-"}
        path = jsonl(tmp_path / "a.jsonl", row)
        columns = {"id": "number", "input": ["question", "context"]}
        sample = Dataset.load(path, columns=columns, lazy=lazy)[0]
        assert (sample.id, sample.input) == ("7", {"question": "who?", "context": "a play"})
        assert sample.metadata == {"input": "old", "level": "hard", "note": "-"}
        several = Dataset.load(path, columns={**columns, "metadata": ["level", "note"]}, lazy=lazy)[0]
        assert several.metadata == {"level": "hard", "note": "-"}
        assert Dataset.load(path, columns={**columns, "metadata": "level"}, lazy=lazy)[0].metadata == {"level": "hard"}

    def test_another_mapping_of_the_same_file_is_another_index(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"id": "x", "a": 1, "b": 2})
        found = [Dataset.load(path, columns={"input": name}, lazy=True) for name in ("a", "b", "a")]
        assert [dataset[0].input for dataset in found] == [1, 2, 1]
        assert found[0].fingerprint == found[2].fingerprint != found[1].fingerprint

    def test_fields_that_keep_their_names_need_no_mapping(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"id": "x", "q": 1, "expected": 2, "metadata": {"k": 3}, "other": 4})
        assert Dataset.load(path, columns={"input": "q"})[0] == Sample("x", 1, 2, {"k": 3, "other": 4})

    def test_a_reference_that_is_not_mapped_is_metadata(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"id": "x", "input": 1, "answer": 2, "ground_truth": 3, "expected": 4})
        assert Dataset.load(path, columns={"expected": "answer"})[0] == Sample(
            "x", 1, 2, {"ground_truth": 3, "expected": 4}
        )

    @pytest.mark.proves("R6")
    def test_a_mapping_that_cannot_be_meant_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.csv", "question,answer\na,b\n")
        assert complaint(path, columns={"input": "prompt"}) == (
            "2: there is no column 'prompt' for 'input' (found question, answer)"
        )
        with pytest.raises(ConfigurationError, match=r"must map fields of a sample .* \(got 'question'\)"):
            Dataset.load(path, columns={"question": "input"})
        with pytest.raises(ConfigurationError, match="give one of them"):
            Dataset.load(path, columns={"input": "question"}, row=lambda row: Sample("a", 1))  # type: ignore[call-overload]


class TestAutomaticIds:
    @pytest.mark.proves("R5")
    def test_a_row_without_an_id_is_named_by_its_content(self, tmp_path: Path, lazy: bool) -> None:
        first = Dataset.load(jsonl(tmp_path / "a.jsonl", {"input": "a", "expected": 1}, {"input": "b"}), lazy=lazy)
        moved = Dataset.load(jsonl(tmp_path / "b.jsonl", {"input": "b"}, {"input": "a", "expected": 1}), lazy=lazy)
        assert len({sample.id for sample in first}) == 2
        assert [sample.id for sample in first] == [moved[1].id, moved[0].id]

    @pytest.mark.proves("R6")
    def test_a_row_that_repeats_another_is_refused_with_both_lines(self, tmp_path: Path, lazy: bool) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"input": "a"}, {"input": "b"}, {"input": "a"})
        with pytest.raises(DatasetError) as caught:
            Dataset.load(path, lazy=lazy)
        assert str(caught.value).endswith(
            "a.jsonl:3: the same input and reference as on line 1; remove it, or give each row an id"
        )


class TestForeignRows:
    @pytest.mark.proves("R5")
    def test_a_row_function_maps_foreign_rows(self, tmp_path: Path, lazy: bool) -> None:
        path = jsonl(tmp_path / "gsm.jsonl", {"question": "2+2?", "answer": "#### 4"}, {"question": "?", "answer": "5"})

        def row(fields: dict[str, Any]) -> Sample[str, int]:
            return Sample(fields["question"], fields["question"], int(fields["answer"].removeprefix("#### ")))

        assert [sample.expected for sample in Dataset.load(path, row=row, lazy=lazy)] == [4, 5]

    @pytest.mark.proves("R6")
    def test_what_goes_wrong_in_a_row_function_is_placed(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"q": 1}, {"x": 1})
        assert complaint(path, row=lambda row: Sample(str(row["q"]), 1)) == "2: the row function failed: KeyError: 'q'"
        assert complaint(path, row=lambda row: row) == "1: the row function must return a Sample (got dict)"
        assert complaint(path, row=lambda row: Sample("", 1)).startswith("1: the id of a sample must be text")
        assert complaint(path, row=lambda row: Sample("a", row)) == (
            "2: duplicate id 'a'; it was used before on line 1"
        )


class TestRawRows:
    @pytest.mark.proves("R5")
    def test_load_jsonl_gives_raw_rows_that_stay_in_the_file(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"q": 1}, {"q": 2}, {"q": 3})
        rows = load_jsonl(path)
        assert list(rows) == list(rows) == [{"q": 1}, {"q": 2}, {"q": 3}]
        assert (len(rows), rows[0], rows[-1]) == (3, {"q": 1}, {"q": 3})
        assert list(rows[1:]) == [{"q": 2}, {"q": 3}]
        assert isinstance(rows, Sequence)
        with pytest.raises(IndexError):
            rows[3]

    @pytest.mark.proves("R5")
    def test_load_jsonl_with_types_gives_a_dataset(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"id": "a", "input": {"text": "t"}, "expected": 1})
        assert load_jsonl(path, Question, int)[0] == Sample("a", Question("t"), 1)
        assert load_jsonl(path, Question)[0].input == Question("t")

    @pytest.mark.proves("R6")
    def test_a_bad_raw_row_is_named_by_every_way_of_reading_it(self, tmp_path: Path) -> None:
        rows = load_jsonl(write(tmp_path / "a.jsonl", '{"q": 1}\n\n{"q": }\n'))
        with pytest.raises(DatasetError, match=r"a\.jsonl:3: not JSON: Expecting value at column 7"):
            list(rows)
        with pytest.raises(DatasetError, match=r"a\.jsonl:3: not JSON"):
            rows[1]
        with pytest.raises(DatasetError, match=r"no such file"):
            load_jsonl(tmp_path / "b.jsonl")


class TestJsonArrays:
    @pytest.mark.proves("R5")
    def test_a_json_array_is_a_dataset(self, tmp_path: Path) -> None:
        rows = [{"id": "a", "input": "\ufdd0nan", "expected": 1}, {"id": "b", "input": "y"}]
        for number, text in enumerate(
            [json.dumps(rows), json.dumps(rows, indent=2), "\ufeff " + json.dumps(rows) + "\n"]
        ):
            dataset = Dataset.load(write(tmp_path / f"{number}.json", text), str, int)
            assert list(dataset) == [Sample("a", "\ufdd0nan", 1), Sample("b", "y")]
        assert len(Dataset.load(write(tmp_path / "e.json", "[ ]"))) == 0

    @pytest.mark.proves("R6")
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (
                '[\n {"id": "a", "input": 1},\n {"id": "b", "input": "x"}\n]',
                '3: at $.input: expected int, got str ("x")',
            ),
            ('[\n {"id": "a", "input": 1},\n\n 5\n]', "4: a row must be a JSON object"),
            (
                '[\n {"id": "a", "input": 1},\n {"id": "a", "input": 1}]',
                "3: duplicate id 'a'; it was used before on line 2",
            ),
            ('[\n {"id": "a", "input": 1}\n {"id"', "not JSON: Expecting ',' delimiter at line 3 column 2"),
            ('[\n {"id": "a",\n "input": }]', "not JSON: Expecting value at line 3 column 11"),
            ('[{"id": "a", "input": 1},]', "not JSON: Expecting value at column 26"),
            ("[", "not JSON: Expecting value at column 2"),
            ("[] x", "not JSON: Extra data at column 4"),
            (
                '{"samples": []}',
                "an array of rows was expected; the file has an object: keep only the array under 'samples'",
            ),
            ("[NaN]", "NaN is not JSON; write null, or leave the field out"),
        ],
    )
    def test_bad_arrays_are_named_by_line(self, tmp_path: Path, text: str, said: str) -> None:
        assert complaint(write(tmp_path / "a.json", text), int) == said

    @pytest.mark.proves("R6")
    def test_an_array_that_is_no_utf8_is_named(self, tmp_path: Path) -> None:
        assert complaint(write(tmp_path / "a.json", b"[\xff]")) == "not UTF-8: invalid start byte at byte 1"


class TestTables:
    @pytest.mark.proves("R5")
    def test_a_csv_file_is_a_dataset_and_other_columns_are_metadata(self, tmp_path: Path) -> None:
        text = '\ufeffid,input,expected,topic\r\n1,"a, ""b""\nc",x,geo\r\n\r\n2,"",,\r\n'
        dataset = Dataset.load(write(tmp_path / "a.csv", text), str, str)
        assert list(dataset) == [
            Sample("1", 'a, "b"\nc', "x", {"topic": "geo"}),
            Sample("2", "", metadata={"topic": ""}),
        ]
        tabs = Dataset.load(write(tmp_path / "a.tsv", "id\tinput\n1\ta,b\n"))
        assert tabs[0].input == "a,b"
        assert len(Dataset.load(write(tmp_path / "e.csv", ""))) == 0

    @pytest.mark.proves("R5", "R6")
    @pytest.mark.parametrize(
        ("kind", "cell", "value"),
        [
            (int, "5", 5),
            (float, "5", 5.0),
            (str, "5", "5"),
            (str | None, "5", "5"),
            (str | None, '"q"', '"q"'),
            (str | int, "5", 5),
            (str | int, "five", "five"),
            (list[int], "[1, 2]", [1, 2]),
            (Question, '{"text": "t"}', Question("t")),
            (date, "2024-05-06", date(2024, 5, 6)),
            (date, '"2024-05-06"', date(2024, 5, 6)),
            (Decimal, "1.50", Decimal("1.50")),
            (Literal["1", "2"], "1", "1"),
            (Colour, "red", Colour.RED),
            (bool, "true", True),
            (bytes, "1234", b"\xd7m\xf8"),
            (object, "5", "5"),
        ],
    )
    def test_cells_are_read_as_the_type_asked_for(self, tmp_path: Path, kind: Any, cell: str, value: Any) -> None:
        path = tmp_path / "a.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["id", "input", "expected"], ["a", cell, cell]])
        (sample,) = Dataset.load(path, kind, kind)
        assert sample == Sample("a", value, value)
        assert type(sample.input) is type(value)

    @pytest.mark.proves("R6")
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("id,input\na,1\nb,x\n", '3: at $.input: expected int, got str ("x")'),
            ("id,input\na,1\nb,1.5\n", "3: at $.input: expected int, got float (1.5)"),
            ("id,input\na,1\na,2\n", "3: duplicate id 'a'; it was used before on line 2"),
            ("id,input\na,1\nb\n", "3: expected 2 cells, found 1"),
            ("id,input\na,1,2\n", "2: expected 2 cells, found 3"),
            (",id,input\n0,a,1\n", "1: column 1 has no name; name it or remove it"),
            ("id,input,id\na,1,b\n", "1: two columns are both named 'id'"),
            ("question,answer\n1,2\n", "2: a row needs 'input' (found question, answer)"),
            ("id;input\n1;2\n", "2: a row needs 'input' (found one column, 'id;input')"),
            (
                'id,input\na,1\nb,2\nc,"4\n',
                "4: not CSV: the row that begins on this line has a quote that is never closed",
            ),
            (
                'id,input\na,"1\nb,2\n',
                "2: not CSV: the row that begins on this line has a quote that is never closed",
            ),
            (
                'id,input\na,"1\nb,"2"\n',
                "2: not CSV: ',' expected after '\"' on line 3, in the row that begins on this line",
            ),
            ("id;input\na;1,5\n", "2: expected 1 cells, found 2"),
        ],
    )
    def test_bad_tables_are_named_by_line(self, tmp_path: Path, text: str, said: str) -> None:
        assert complaint(write(tmp_path / "a.csv", text), int).partition("\n")[0] == said

    @pytest.mark.proves("R6")
    def test_the_line_of_a_byte_that_is_no_utf8_is_found(self, tmp_path: Path) -> None:
        text = b"id,input\n" + b"".join(b"%d,x\n" % n for n in range(50)) + b"a,\xff\n"
        said, _, remedy = complaint(write(tmp_path / "a.csv", text)).partition("\n")
        assert said == "52: not UTF-8: invalid start byte"
        assert "iconv -f WINDOWS-1252 -t UTF-8 a.csv > utf8-a.csv" in remedy

    @pytest.mark.proves("R6")
    def test_another_separator_is_suspected_wherever_it_shows(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.csv", "question;answer\na;b\n")
        assert "separated by ';'" in complaint(path, columns={"input": "question"})
        assert "separated by ';'" in complaint(write(tmp_path / "b.csv", "id;input\na;1,5\n"))

    def test_a_cell_may_be_longer_than_the_csv_module_likes(self, tmp_path: Path) -> None:
        before = csv.field_size_limit(131_000)
        try:
            dataset = Dataset.load(write(tmp_path / "a.csv", f"id,input\n1,{'x' * 300_000}\n"))
            assert len(dataset[0].input) == 300_000
            assert csv.field_size_limit() == 131_000
        finally:
            csv.field_size_limit(before)

    @pytest.mark.proves("R5")
    def test_a_row_function_gets_the_cells_of_a_table(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.csv", "q,a\nx,1\n")
        assert Dataset.load(path, row=lambda row: Sample(row["q"], row["a"]))[0].input == "1"

    @pytest.mark.proves("R5")
    def test_a_parquet_file_is_a_dataset(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        table = pa.table(
            {
                "id": [1, 2],
                "input": [{"text": "t", "weight": 2.0}, {"text": "u", "weight": 1.0}],
                "expected": ["x", None],
                "when": [datetime(2024, 5, 6), None],
                "raw": [b"\xff", b""],
                "metadata": [{"level": 1}, {"level": 2}],
            }
        )
        pq.write_table(table, path)
        dataset = Dataset.load(path, Question, str)
        assert list(dataset) == [
            Sample("1", Question("t", weight=2.0), "x", {"when": "2024-05-06T00:00:00", "raw": b"\xff", "level": 1}),
            Sample("2", Question("u"), metadata={"when": None, "raw": b"", "level": 2}),
        ]
        assert len(dataset.fingerprint) == 32
        assert Dataset.load(path)[0].input == {"text": "t", "weight": 2.0}
        assert Dataset.load(path, row=lambda row: Sample(str(row["id"]), row["raw"]))[0].input == b"\xff"

    @pytest.mark.proves("R5", "R6")
    def test_bytes_and_bad_rows_in_parquet(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"id": ["a", "b"], "input": [b"\xff", b"\xfe"], "expected": ["1", "x"]}), path)
        assert [sample.input for sample in Dataset.load(path, bytes)] == [b"\xff", b"\xfe"]
        assert [sample.input for sample in Dataset.load(path)] == [b"\xff", b"\xfe"]
        assert complaint(path, object, int) == 'row 2: at $.expected: expected int, got str ("x")'
        pq.write_table(pa.table({"id": ["a", "a"], "input": [1, 2]}), path)
        assert complaint(path) == "row 2: duplicate id 'a'; it was used before on row 1"
        assert complaint(write(path, b"PAR1 not really")).startswith("not Parquet: ")


class TestFiles:
    @pytest.mark.proves("R6")
    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
    def test_a_missing_file_is_named_with_where_we_looked(self, tmp_path: Path, name: str) -> None:
        assert complaint(tmp_path / name) == f"no such file (looked from {Path.cwd()})"

    def test_a_folder_is_no_dataset(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").mkdir()
        assert complaint(tmp_path / "a.jsonl") == "cannot be read: Is a directory"

    def test_an_unknown_suffix_says_which_are_known(self, tmp_path: Path) -> None:
        for name in ("a.xlsx", "a"):
            with pytest.raises(ConfigurationError, match=r"must be one of \.jsonl, \.ndjson, \.json, \.csv"):
                Dataset.load(tmp_path / name)
        with pytest.raises(ConfigurationError, match=r"lazy=True reads \.jsonl files only"):
            Dataset.load(tmp_path / "a.csv", lazy=True)

    def test_parquet_without_its_extra_says_what_to_install(self, child: Any, tmp_path: Path) -> None:
        said = child(
            "import sys; sys.modules['pyarrow'] = None\n"
            "from fairtrial import Dataset\nfrom fairtrial.errors import MissingExtraError\n"
            "try: Dataset.load('a.parquet')\n"
            "except MissingExtraError as error: print(error, isinstance(error, ImportError))"
        )
        assert said == 'reading Parquet needs an optional dependency: pip install "fairtrial[data]" True'


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("deep.jsonl", f'{{"id": "1", "input": {NESTED}}}\n'.encode(), ".jsonl:1: "),
        ("deep.json", f'[{{"id": "1", "input": {NESTED}}}]'.encode(), "deep.json:"),
        ("bad.jsonl", b'{"id": "1", "input": "\xff\xfe"}\n', ".jsonl:1: "),
        ("bad.csv", b"id,input\n1,\xff\xfe\n", ".csv:2: "),
        ("digits.jsonl", b'{"id": "1", "input": ' + b"9" * 100_000 + b"}\n", ".jsonl:1: "),
        ("again.jsonl", b'{"id": "1", "input": 1}\n' * 20_000, ".jsonl:2: "),
    ],
    ids=["deep lines", "deep array", "bytes in lines", "bytes in a table", "digits", "ids"],
)
def test_a_hostile_file_is_refused_with_its_name_and_line(
    tmp_path: Path, name: str, content: bytes, place: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        Dataset.load(path)
    assert place in str(caught.value)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(
    ("name", "content", "id", "input"),
    [
        ("nul.csv", b"id,input\n1,a\x00b\n", "1", "a\0b"),
        ("surrogates.jsonl", b'{"id": "\\ud800", "input": "\\udfff\\u0000"}\n', "\ud800", "\udfff\0"),
    ],
    ids=["nul", "surrogates"],
)
def test_odd_characters_in_a_file_are_kept(tmp_path: Path, name: str, content: bytes, id: str, input: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (sample,) = Dataset.load(path)
    assert (sample.id, sample.input) == (id, input)
