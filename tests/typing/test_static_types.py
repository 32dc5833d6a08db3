"""What a type checker knows. At run time these calls only have to work; mypy checks what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type
from uuid import UUID

import pytest

from fairtrial import (
    Dataset,
    Metric,
    Sample,
    Score,
    Session,
    SessionView,
    SliceView,
    ToolInvoked,
    Trajectory,
    evaluator,
    exact_match,
    load_jsonl,
    restore_session,
)
from fairtrial.codec import decode, from_json


@dataclass(frozen=True)
class Question:
    text: str


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"id": "a", "input": {"text": "2+2?"}, "expected": 4}\n')
    return file


@pytest.mark.proves("R5")
def test_a_loaded_dataset_has_the_types_it_was_asked_for(path: Path) -> None:
    assert_type(Dataset.load(path, Question, int), Dataset[Question, int])
    assert_type(Dataset.load(path, Question, int, lazy=True), Dataset[Question, int])
    assert_type(Dataset.load(path, Question), Dataset[Question, Any])
    assert_type(Dataset.load(path), Dataset[Any, Any])

    def row(fields: dict[str, Any]) -> Sample[str, int]:
        return Sample(fields["id"], fields["input"]["text"], fields["expected"])

    assert_type(Dataset.load(path, row=row), Dataset[str, int])
    assert len(Dataset.load(path, row=row, lazy=True)) == 1


@pytest.mark.proves("R5")
def test_load_jsonl_is_raw_or_typed(path: Path) -> None:
    assert_type(load_jsonl(path), Sequence[dict[str, Any]])
    assert_type(load_jsonl(path, Question), Dataset[Question, Any])
    assert_type(load_jsonl(path, Question, int), Dataset[Question, int])
    assert load_jsonl(path)[0]["expected"] == 4


@pytest.mark.proves("R1", "R2", "R3")
def test_samples_and_datasets_keep_their_types(path: Path) -> None:
    dataset = Dataset.load(path, Question, int)
    assert_type(dataset[0], Sample[Question, int])
    assert_type(dataset[:1], Dataset[Question, int])
    assert_type(dataset.filter(lambda sample: sample.expected == 4), Dataset[Question, int])
    assert_type(dataset.shuffle(1).head(1), Dataset[Question, int])
    assert_type(dataset[0].input, Question)
    assert_type(dataset[0].expected, int | None)
    assert_type(dataset[0].ground_truth, int | None)
    assert_type(Dataset.of({"France": "Paris"}), Dataset[str, str])
    assert_type(Dataset.of([(1, 2.5)]), Dataset[int, float])
    assert_type(Dataset([Sample("a", 1, "b")]), Dataset[int, str])
    assert [sample.input.text for sample in dataset] == ["2+2?"]


@pytest.mark.proves("R26", "R27")
def test_a_slice_has_the_type_of_its_events() -> None:
    session = Session()
    session.record(ToolInvoked("t"))
    view: SessionView = session.view()
    assert_type(session[ToolInvoked].all(), tuple[ToolInvoked, ...])
    assert_type(view[ToolInvoked], SliceView[ToolInvoked])
    assert_type(view[ToolInvoked].latest(), ToolInvoked | None)
    assert_type(view[ToolInvoked].where(lambda call: call.name == "t"), tuple[ToolInvoked, ...])
    assert_type(view.session_id, UUID)
    assert_type(restore_session(session.snapshot()).trajectory, Trajectory)
    assert len(view[ToolInvoked].all()) == 1


def test_evaluators_stay_what_they_are() -> None:
    @evaluator(name="strict", inline=True)
    def strict(output: str, expected: str) -> Score:
        return exact_match(output, expected)

    @evaluator
    def bare(output: str, expected: str) -> bool:
        return output == expected

    assert_type(strict("a", "a"), Score)
    assert_type(bare("a", "a"), bool)
    assert_type(Score(1.0).metric("x"), float | None)
    assert_type(Score(metrics=[Metric("m", 1.0, 1.0)]).reward, float)
    assert strict("a", "a").passed


def test_decoding_gives_the_type_asked_for() -> None:
    assert_type(decode(Question, '{"text": "x"}'), Question)
    assert_type(from_json(list[int], [1]), list[int])
    assert decode(Question, '{"text": "x"}').text == "x"
