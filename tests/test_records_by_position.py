"""A public record refuses fields in a wrong order: what is given by position must not mean something else."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import pytest

import fairtrial

PER_CALL = "the library makes it for every call, message or event, where a check would cost"
ANYTHING = "its first field may be anything"
STATISTIC = "the library makes it of arrays, thousands of times in a simulation"
EXEMPT = {
    **dict.fromkeys([
        "AgentEnded", "ChoicesShown", "Completion", "EnvironmentSaved", "EvalReply", "EvalRunCompleted",
        "EvalRunStarted", "ExecResult", "ExperimentFigures", "JudgeOutput", "MailboxDepth", "MainLoopResult",
        "ModelCall", "ModelCallFailed", "ModelReply", "OutputRepaired", "Rollout", "SampleEvaluated",
        "SpanClosed", "TokenRow", "Totals", "TrialStarted",
    ], PER_CALL),
    **dict.fromkeys(["EvalContext", "MainLoopRequest", "PromptResponse", "WrongShape"], ANYTHING),
    **dict.fromkeys([
        "BradleyTerry", "ClusteredError", "Confusion", "CorrectedMean", "Diagnosis", "Heterogeneity", "HistoryMean",
        "Interval", "JudgedTrials", "MarginTest", "MeanEstimate", "PairedDifference", "PairsDecision",
        "QuantileEstimate", "RankCorrelation", "Ranking", "RateDecision", "RawAgreement", "Repeats", "SignFlip",
        "SimultaneousDifferences", "Strength", "SystemScores", "Undefined", "VarianceSplit", "WeightedMean",
    ], STATISTIC),
}  # fmt: skip


class Wrong:
    """A value of no type that any field has."""


def public_records() -> dict[str, type]:
    """Every public dataclass that takes something by position, by name."""
    packages = [one.name for one in pkgutil.walk_packages(fairtrial.__path__, "fairtrial.") if one.ispkg]
    found = {}
    for package in ("fairtrial", *packages):
        module = import_module(package)
        for name in getattr(module, "__all__", ()):
            record = getattr(module, name)
            if isinstance(record, type) and is_dataclass(record) and first_of(record) is not None:
                found[name] = record
    return found


def first_of(record: type) -> str | None:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((one.name for one in inspect.signature(record).parameters.values() if one.kind in by_position), None)


def made_with(record: Any, value: object) -> object:
    """Make a record with this first field; the others that it needs are None."""
    _first, *others = inspect.signature(record).parameters.values()
    return record(
        value, **{one.name: None for one in others if one.default is one.empty and one.kind != one.VAR_KEYWORD}
    )


def refusal(record: type) -> str:
    try:
        made_with(record, Wrong())
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


RECORDS = public_records()


def test_every_public_record_refuses_a_first_field_of_another_type() -> None:
    first = {name: first_of(record) or "" for name, record in RECORDS.items()}
    accepting = [name for name in sorted(RECORDS.keys() - EXEMPT.keys()) if first[name] not in refusal(RECORDS[name])]
    assert len(RECORDS) > 100
    assert accepting == []


def test_only_records_that_need_it_are_exempt() -> None:
    assert sorted(EXEMPT.keys() - RECORDS.keys()) == []


@pytest.mark.parametrize(("name", "value"), [("Experiment", 5), ("Label", "r1"), ("RunRecord", None)])
def test_the_refusal_names_record_field_and_value(name: str, value: object) -> None:
    record = RECORDS[name]
    with pytest.raises(TypeError, match=rf"^{first_of(record)} of {name} must be \w+ \(got {value!r}\)$"):
        made_with(record, value)
