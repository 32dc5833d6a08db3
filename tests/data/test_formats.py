"""Datasets that other tools exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, Sample
from fairtrial.data.loaders import DatasetFormat
from fairtrial.errors import ConfigurationError, DatasetError

FILES = Path(__file__).parents[1] / "integrations" / "importers"

ROWS: dict[DatasetFormat, tuple[dict[str, Any], Sample[Any, Any]]] = {
    "langsmith": (
        {"id": "e1", "inputs": {"q": "2+2"}, "outputs": {"a": "4"}, "metadata": {"split": "test"}, "dataset_id": "d"},
        Sample("e1", {"q": "2+2"}, {"a": "4"}, {"split": "test", "dataset_id": "d"}),
    ),
    "braintrust": (
        {"id": "r1", "input": "2+2", "expected": 4, "metadata": {"level": 1}, "tags": ["math"], "_xact_id": "9"},
        Sample("r1", "2+2", 4, {"level": 1, "tags": ["math"], "_xact_id": "9"}),
    ),
    "langfuse": (
        {"id": "i1", "input": {"q": "2+2"}, "expectedOutput": "4", "metadata": None, "status": "ACTIVE"},
        Sample("i1", {"q": "2+2"}, "4", {"status": "ACTIVE"}),
    ),
    "pydantic-evals": (
        {"name": "sum", "inputs": "2+2", "expected_output": "4", "metadata": "easy", "evaluators": []},
        Sample("sum", "2+2", "4", {"metadata": "easy"}),
    ),
    "openai": (
        {"item": {"q": "2+2", "a": "4"}, "sample": {"output_text": "4"}},
        Sample("-", {"q": "2+2", "a": "4"}, None, {"sample": {"output_text": "4"}}),
    ),
    "deepeval": (
        {
            "input": "2+2",
            "expected_output": "4",
            "context": ["sums"],
            "additional_metadata": {"n": 1},
            "comments": None,
        },
        Sample("-", "2+2", "4", {"n": 1, "context": ["sums"]}),
    ),
    "ragas": (
        {"user_input": "2+2", "reference": "4", "retrieved_contexts": ["sums"], "response": "four"},
        Sample("-", "2+2", "4", {"retrieved_contexts": ["sums"], "response": "four"}),
    ),
    "promptfoo": (
        {
            "vars": {"q": "2+2"},
            "assert": [{"type": "equals", "value": "4"}],
            "metadata": {"n": 1},
            "description": "sum",
        },
        Sample("-", {"q": "2+2"}, "4", {"n": 1, "description": "sum", "assert": [{"type": "equals", "value": "4"}]}),
    ),
}


def same(found: Sample[Any, Any], wanted: Sample[Any, Any]) -> bool:
    """Compare two samples; an id of - stands for one made from the content."""
    known = wanted.id in (found.id, "-")
    return known and (found.input, found.expected, found.metadata) == (wanted.input, wanted.expected, wanted.metadata)


@pytest.mark.parametrize("format", ROWS)
@pytest.mark.parametrize("kind", ["lines", "lazy", "list"])
def test_a_row_of_every_format_is_a_sample(format: DatasetFormat, kind: str, tmp_path: Path) -> None:
    row, wanted = ROWS[format]
    path = tmp_path / ("data.json" if kind == "list" else "data.jsonl")
    path.write_text(json.dumps([row] if kind == "list" else row) + "\n")
    (sample,) = Dataset.load(path, format=format, lazy=kind == "lazy")
    assert same(sample, wanted), sample


@pytest.mark.parametrize("format", ROWS)
def test_a_row_with_other_fields_is_refused_with_its_line(format: DatasetFormat, tmp_path: Path) -> None:
    row, _ = ROWS[format]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row) + '\n{"something": "else"}\n')
    with pytest.raises(DatasetError, match=r"data\.jsonl:2: a row needs"):
        Dataset.load(path, format=format)
    path.write_text(json.dumps({**row, "surprise": 1}) + "\n")
    with pytest.raises(DatasetError, match=r"data\.jsonl:1: unknown field 'surprise'"):
        Dataset.load(path, format=format)


def test_a_dataset_that_pydantic_evals_wrote_is_read() -> None:
    dataset = Dataset.load(FILES / "files" / "pydantic-evals" / "dataset.yaml", format="pydantic-evals")
    assert [(one.id, one.input, one.expected, one.metadata) for one in dataset][:2] == [
        ("france", "France", "Paris", {"letters": 6}),
        ("japan", "Japan", "Tokyo", {"letters": 5}),
    ]


def test_the_tests_of_a_promptfoo_configuration_are_read() -> None:
    dataset = Dataset.load(FILES / "peers" / "promptfoo" / "promptfooconfig.yaml", format="promptfoo")
    assert [one.input for one in dataset] == [{"country": name} for name in ("France", "Peru", "Japan", "Kenya")]
    assert [one.expected for one in dataset] == ["Paris", None, None, "Nairobi"]


def test_a_case_of_yaml_that_is_odd_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text("name: x\ncases:\n- name: a\n  inputs: 1\n\n- name: b\n  output: 2\n")
    with pytest.raises(DatasetError, match=r"cases\.yaml:6: a row needs 'inputs' \(found name, output\)"):
        Dataset.load(path, format="pydantic-evals")
    path.write_text("name: x\ncases: [\n")
    with pytest.raises(DatasetError, match=r"cases\.yaml:3: not YAML: .*expected.* node content"):
        Dataset.load(path, format="pydantic-evals")
    path.write_text("name: \a\n")
    with pytest.raises(DatasetError, match=r"cases\.yaml: not YAML: unacceptable character #x0007"):
        Dataset.load(path, format="pydantic-evals")
    path.write_text("tests: file://tests.csv\n")
    with pytest.raises(DatasetError, match="must have a list of 'tests'"):
        Dataset.load(path, format="promptfoo")


def test_only_a_number_of_yaml_has_a_limit_of_digits(tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text(f"cases:\n- inputs: {'7' * 308}\n- inputs: '{'7' * 400}'\n- inputs: {'x' * 400}\n")
    assert [one.input for one in Dataset.load(path, format="pydantic-evals")] == [int("7" * 308), "7" * 400, "x" * 400]
    path.write_text(f"cases:\n- inputs: {'7' * 309}\n")
    with pytest.raises(DatasetError, match=r"a number must have at most 308 digits \(got 309\)"):
        Dataset.load(path, format="pydantic-evals")


def test_a_document_of_yaml_has_at_most_200_levels(tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text(f"cases:\n- inputs: {'[' * 197}{']' * 197}\n")
    assert len(Dataset.load(path, format="pydantic-evals")) == 1
    path.write_text(f"cases:\n- inputs: {'[' * 198}{']' * 198}\n")
    with pytest.raises(DatasetError, match=r"cases\.yaml:2: nested too deeply: more than 200 levels"):
        Dataset.load(path, format="pydantic-evals")


def test_goldens_in_a_table_are_read_without_their_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "goldens.csv"
    path.write_text("input,actual_output,expected_output,context\n2+2,,4,\n")
    (sample,) = Dataset.load(path, format="deepeval")
    assert (sample.input, sample.expected, sample.metadata) == ("2+2", "4", {})


def test_a_golden_of_a_conversation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "goldens.json"
    path.write_text('[{"scenario": "refund", "expected_outcome": "paid"}]')
    with pytest.raises(DatasetError, match=r"goldens\.json:1: a golden of a conversation"):
        Dataset.load(path, format="deepeval")


def test_types_are_checked_after_the_fields_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": 3, "expected": 4}\n')
    assert Dataset.load(path, int, int, format="braintrust")[0].expected == 4
    with pytest.raises(DatasetError, match=r"data\.jsonl:1"):
        Dataset.load(path, str, int, format="braintrust")


def test_a_format_nobody_knows_and_a_second_mapping_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"format must be one of .* did you mean 'langsmith'"):
        Dataset.load(tmp_path / "x.jsonl", format="langsmit")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="leave out columns= and row="):
        Dataset.load(tmp_path / "x.jsonl", format="ragas", columns={"input": "q"})
