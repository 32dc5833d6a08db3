"""What a block of the specifications defines, compared with ours."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from fairtrial.models import ScriptedAdapter

ours: Any = import_module("fairtrial.specifications")  # Its records are what a specification says: of any type.


def _value(name: str, owner: str) -> Any:
    """A value for a field of a record."""
    sample = ours.Sample("1", {"p": 1}, "y")
    score = ours.Score(0.25, False, "r")
    metrics = (ours.Metric("m", 0.5, weight=1.0),)
    result = ours.EvalResult(sample_id="1", score=score, latency_ms=12)
    values: dict[str, Any] = {
        "id": "1", "input": {"p": 1}, "expected": "y", "ground_truth": "y", "metadata": {"level": 3},
        "samples": (sample,), "name": "n", "version": "2.0", "value": 0.25, "passed": False, "reason": "r",
        "criterion": "c", "rationale": "r", "sample_id": "1", "score": score, "latency_ms": 12, "error": None,
        "output": "o", "scores": (ours.Score("c", 0.25, False, "r"),), "tokens_used": 7, "success": True,
        "results": (result,), "run_id": "r1", "dataset_name": "d", "sample_count": 3, "pass_rate": 0.5,
        "mean_score": 0.5, "total_tokens": 3, "result": result, "session_snapshot": b"{}", "rating": "good",
        "adapter": ScriptedAdapter(["x"]), "session": ours.Session(), "metrics": metrics, "weight": 0.5,
        "trajectory": ours.Trajectory(()), "sample": sample, "summary": {"mean": 0.25}, "config": ours.EvalConfig(),
        "max_concurrent": 3, "timeout_per_sample_ms": 1500, "max_retries": 2, "stop_on_error": True,
        "prompt": ours.PromptTemplate(key="k", sections=[ours.MarkdownSection("", "$p", "k")]),
        "dataset": ours.Dataset((sample,)), "evaluator": ours.exact_match,
    }  # fmt: skip
    if owner == "JudgeOutput" and name == "score":
        return 0.25
    return values[name]


def compare_record(spec: Any) -> Iterator[str]:
    """Compare a dataclass of a block with ours: positions, keywords, what is read back, defaults and members."""
    name = spec.__name__
    record = getattr(ours, name, None)
    if record is None:
        yield f"{name} does not exist"
        return
    fields = [field for field in dataclasses.fields(spec) if field.init]
    fixed = [field for field in fields if field.name not in ("request_id", "created_at")]
    given = {field.name: _value(field.name, name) for field in fixed}
    lead = {"request_id": "1"} if name == "MainLoopResult" else {}
    forms: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("by position", lambda: record(**lead, **given) if lead else record(*given.values())),
        ("by keyword", lambda: record(**lead, **given)),
    )
    for form, make in forms:
        try:
            made = make()
        except (TypeError, ValueError, AttributeError) as error:
            yield f"{name} is refused {form}: {str(error).splitlines()[0][:120]}"
            continue
        for field, value in given.items():
            found: Any = getattr(made, field, "nothing")
            if field == "results":
                found = tuple((one.sample_id, one.score) for one in found)
                value = tuple((one.sample_id, one.score) for one in value)
            if field == "summary":
                found = {"mean": found["mean"]}
            if field == "metadata" and name == "EvalResult":
                found = {key: found[key] for key in value}
            if found != value and field not in ("prompt",):
                yield f"{name}.{field} {form} reads {found!r:.60} for {value!r:.60}"
    yield from compare_defaults(spec, record, fields, given, lead)
    yield from compare_members(spec, record)


def compare_defaults(
    spec: type, record: Any, fields: list[Any], given: dict[str, Any], lead: dict[str, Any]
) -> Iterator[str]:
    """Compare the defaults of a record's fields."""
    missing = dataclasses.MISSING
    needed = {f.name: given[f.name] for f in fields if f.default is missing and f.default_factory is missing}
    optional = [f.name for f in fields if f.name not in needed]
    if not optional:
        return
    theirs, made = spec(**needed), record(**lead, **needed)
    for field in optional:
        if field == "config":
            continue  # A config of ours, whose defaults are compared where it is defined.
        wanted, found = getattr(theirs, field), getattr(made, field, "nothing")
        if type(wanted).__name__ in ("UUID", "datetime"):
            if type(found) is not type(wanted):
                yield f"{spec.__name__}.{field} is a {type(found).__name__}, not a {type(wanted).__name__}"
        elif found != wanted:
            yield f"{spec.__name__}.{field} is {found!r:.40} by default, not {wanted!r:.40}"


def compare_members(spec: type, record: Any) -> Iterator[str]:
    """Compare the public methods and properties of a class."""
    for name, member in vars(spec).items():
        if name == "__init__" and not dataclasses.is_dataclass(spec):
            yield from compare_parameters(spec.__name__, member, record)
        special = name in ("__len__", "__iter__", "__getitem__", "__call__")
        function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if (name.startswith("_") and not special) or not (isinstance(member, property) or callable(function)):
            continue
        found = inspect.getattr_static(record, name, None)
        if found is None:
            yield f"{spec.__name__}.{name} does not exist"
        elif not isinstance(member, property) and not special:
            static = isinstance(member, staticmethod | classmethod)
            yield from compare_parameters(f"{spec.__name__}.{name}", function, getattr(record, name), not static)


def compare_parameters(label: str, spec: Any, function: Any, method: bool = False) -> Iterator[str]:
    """Compare the parameters of a function: each by position or keyword, and its default."""
    theirs = list(inspect.signature(spec).parameters.values())
    mine = list(inspect.signature(function).parameters.values())
    if theirs and theirs[0].name in ("self", "cls"):
        theirs = theirs[1:]
    if mine and mine[0].name in ("self", "cls"):
        mine = mine[1:]
    known = {parameter.name: parameter for parameter in mine}
    any_position = any(p.kind is p.VAR_POSITIONAL for p in mine)
    for place, parameter in enumerate(theirs):
        if parameter.kind is parameter.VAR_POSITIONAL:
            if not any_position:
                yield f"{label} takes no list of values"
            continue
        found = known.get(parameter.name)
        if found is None:
            yield f"{label} has no parameter {parameter.name}"
            continue
        if (
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and not any_position
            and mine[place].name != parameter.name
        ):
            yield f"{label} has {parameter.name} in another place"
        plain = parameter.default is None or isinstance(parameter.default, int | float | str)
        empty = parameter.default is None and not found.default
        if parameter.default is not parameter.empty and plain and found.default != parameter.default and not empty:
            yield f"{label} has {parameter.name}={found.default!r}, not {parameter.default!r}"


def compare_definitions(text: str, found: dict[str, Any]) -> Iterator[str]:
    """Compare what a block defines with ours."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            spec: Any = found[node.name]
            if dataclasses.is_dataclass(spec):
                yield from compare_record(spec)
            elif hasattr(ours, node.name) and node.name != "Evaluator":
                yield from compare_members(spec, getattr(ours, node.name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            if not hasattr(ours, node.name):
                yield f"{node.name} does not exist"
            elif node.name == "submit_dataset":
                continue  # Its second parameter may be an experiment: block 30 is called as it is written.
            else:
                yield from compare_parameters(node.name, found[node.name], getattr(ours, node.name))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id[0].isupper() and not hasattr(ours, target.id):
                yield f"{target.id} does not exist"
