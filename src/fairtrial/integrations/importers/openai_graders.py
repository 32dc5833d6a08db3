"""Translate graders of OpenAI Evals to the source code of a suite file, which people read and edit."""

from __future__ import annotations

import ast
import keyword
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairtrial.errors import DataError
from fairtrial.integrations.importers.records import (
    as_number,
    as_text,
    fill,
    fill_expression,
    literal,
    names_in,
    replace_names,
    source_of,
)
from fairtrial.runs.imported import TranslatedGrader

_FIELD = re.compile(r"\{\{\s*(.*?)\s*\}\}")
_ITEM = re.compile(r"item((?:\.\w+|\[[0-9]{1,9}\]){1,20})")
_OUTPUT = "sample.output_text"
_MOST_PARTS = 50  # Of a template: an expression is nested as deeply as it has parts.


class _UntranslatableError(Exception):
    """A grader has no equivalent; the message says why."""


@dataclass(frozen=True, slots=True)
class Grader:
    """A grader with its translation: the definition of an evaluator, the variable with it, and what it imports."""

    record: TranslatedGrader
    definition: ast.stmt | None = None
    variable: str = ""
    imports: tuple[str, ...] = ()
    judge: str = ""  # The model of a judge, which is `JUDGE` in the definition.

    @property
    def evaluator(self) -> str | None:
        """The evaluator that replaces the grader; None if there is none."""
        return self.record.evaluator


def reference_key(criteria: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the field of an item with the reference answer; None unless all graders compare with the same field."""
    references = (re.fullmatch(r"\{\{\s*item\.(\w+)\s*\}\}", as_text(one.get("reference"))) for one in criteria)
    keys = {found[1] for found in references if found is not None}
    return keys.pop() if len(keys) == 1 else None


def translate(criteria: Mapping[str, Mapping[str, Any]], expected: str | None) -> list[Grader]:
    """Translate graders, by name. A grader that cannot be translated has a remark with the reason."""
    variables: set[str] = set(_TAKEN)
    graders: list[Grader] = []
    for name, criterion in criteria.items():
        kind = as_text(criterion.get("type")) or "unknown"
        try:
            rule = _RULES.get(kind)
            if rule is None:
                raise _UntranslatableError(_NO_EQUIVALENT.get(kind, f"graders of type {kind!r} are not supported"))
            graders.append(rule(criterion, name, _identifier(name, variables), expected))
        except _UntranslatableError as reason:
            graders.append(Grader(TranslatedGrader(name, kind, None, str(reason))))
    return graders


_NO_EQUIVALENT = {
    "python": "write it as a function of (output, expected); its source is in evals.jsonl",
    "multi": "combine its graders with weighted() or all_of(); its formula is in evals.jsonl",
}
_OPERATIONS = {
    "eq": ("exact_match(OUTPUT, REFERENCE)", "exact_match", "exact_match"),
    "ne": ("not exact_match(OUTPUT, REFERENCE).passed", "exact_match, negated", "exact_match"),
    "like": ("contains(OUTPUT, REFERENCE)", "contains", "contains"),
    "ilike": ("contains(OUTPUT.casefold(), REFERENCE.casefold())", "contains, any case", "contains"),
}


def _string_check(grader: Mapping[str, Any], name: str, variable: str, expected: str | None) -> Grader:
    operation = grader.get("operation")
    if not isinstance(operation, str) or operation not in _OPERATIONS:
        raise _UntranslatableError(f"operation {operation!r} is not supported")
    call, label, needed = _OPERATIONS[operation]
    record = TranslatedGrader(name, "string_check", label)
    return _comparison(grader, record, variable, expected, fill_expression(call), needed)


def _text_similarity(grader: Mapping[str, Any], name: str, variable: str, expected: str | None) -> Grader:
    metric = grader.get("evaluation_metric")
    if metric != "fuzzy_match":
        raise _UntranslatableError(f"the metric {metric} is not supported; use fuzzy_match or a judge")
    minimum = ast.Constant(_threshold(grader, 0.8))
    call = fill_expression("fuzzy_match(MINIMUM)(OUTPUT, REFERENCE)", MINIMUM=minimum)
    remark = "uses normalised edit distance: values may differ from those of the source"
    record = TranslatedGrader(name, "text_similarity", "fuzzy_match", remark)
    return _comparison(grader, record, variable, expected, call, "fuzzy_match")


def _threshold(grader: Mapping[str, Any], default: float) -> float:
    value = grader.get("pass_threshold")
    number = default if value is None else as_number(value)
    if number is None or not 0.0 <= number <= 1.0:
        raise _UntranslatableError(f"its pass_threshold must be a number from 0 to 1 (got {value!r})")
    return number


_OF_TEXT = """
@evaluator(name=NAME, inline=True)
def VARIABLE(output, expected):
    return RESULT
"""
_OF_ITEM = """
@evaluator(name=NAME, inline=True)
def VARIABLE(sample, output, *, context):
    item = item_of(sample)
    return RESULT
"""


def _comparison(
    grader: Mapping[str, Any],
    record: TranslatedGrader,
    variable: str,
    expected: str | None,
    result: ast.expr,
    needed: str,
) -> Grader:
    output, reference = (_expression(as_text(grader.get(side)), expected) for side in ("input", "reference"))
    reads_item = "item" in names_in((output, reference))
    template, answer = (_OF_ITEM, "sample.expected") if reads_item else (_OF_TEXT, "expected")
    result = replace_names(result, OUTPUT=output, REFERENCE=reference)
    result = replace_names(result, EXPECTED=fill_expression(answer))
    (definition,) = fill(template, NAME=ast.Constant(record.name), VARIABLE=ast.Name(variable), RESULT=result)
    return Grader(record, definition, variable, ("evaluator", needed))


def _label_model(grader: Mapping[str, Any], name: str, variable: str, expected: str | None) -> Grader:
    labels, passing = grader.get("labels"), grader.get("passing_labels")
    if not isinstance(labels, list) or not isinstance(passing, list) or not passing:
        raise _UntranslatableError("it has no labels, or no passing labels")
    if not all(isinstance(label, str) for label in (*labels, *passing)) or not set(passing) <= set(labels):
        raise _UntranslatableError("its labels must be texts, and its passing labels some of them")
    call = "label_judge(JUDGE, CRITERION, labels=LABELS, passing=PASSING, name=NAME)"
    return _judge(grader, name, variable, expected, call, LABELS=literal(labels), PASSING=literal(passing))


def _score_model(grader: Mapping[str, Any], name: str, variable: str, expected: str | None) -> Grader:
    bounds = grader.get("range")
    bounds = bounds if isinstance(bounds, list) and bounds else [0, 1]
    if bounds != [0, 1]:
        shown = " to ".join(str(bound) for bound in bounds)
        raise _UntranslatableError(f"it scores from {shown}, and numeric_judge from 0 to 1")
    if grader.get("pass_threshold") is None:
        return _judge(grader, name, variable, expected, "numeric_judge(JUDGE, CRITERION, name=NAME)")
    threshold = ast.Constant(_threshold(grader, 0.5))
    call = "numeric_judge(JUDGE, CRITERION, pass_at=THRESHOLD, name=NAME)"
    return _judge(grader, name, variable, expected, call, THRESHOLD=threshold)


def _judge(
    grader: Mapping[str, Any], name: str, variable: str, expected: str | None, call: str, **parts: ast.expr
) -> Grader:
    criterion = _criterion(grader.get("input"), expected)
    model = as_text(grader.get("model"))
    if not model:
        raise _UntranslatableError("it names no model")
    made = fill_expression(call, CRITERION=ast.Constant(criterion), NAME=ast.Constant(name), **parts)
    (definition,) = fill("VARIABLE = CALL", VARIABLE=ast.Name(variable, ast.Store()), CALL=made)
    function = call.partition("(")[0]
    record = TranslatedGrader(name, as_text(grader["type"]), function, "the prompt became the judge's criterion")
    return Grader(record, definition, variable, (), model)


def _criterion(messages: Any, expected: str | None) -> str:
    """Return the prompt of a grader as a criterion. Judges get input, reference and output in separate sections."""
    texts: list[str] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                raise _UntranslatableError("its prompt contains images or audio")
            texts.append(text)
    if not "".join(texts).strip():
        raise _UntranslatableError("its prompt is empty")

    def named(found: re.Match[str]) -> str:
        if found[1] == _OUTPUT:
            return "[the output to assess]"
        if found[1] == f"item.{expected}":
            return "[the reference answer]"
        return f"[{found[1].removeprefix('item.')} of the input]" if found[1].startswith("item.") else found[0]

    return _FIELD.sub(named, "\n\n".join(texts))


def _expression(template: str, expected: str | None) -> ast.expr:
    """Return a template as an expression."""
    parts: list[ast.expr] = []
    at = 0
    for found in _FIELD.finditer(template):
        if found.start() > at:
            parts.append(ast.Constant(template[at : found.start()]))
        parts.append(_field(found[1], expected))
        at = found.end()
    if at < len(template) or not parts:
        parts.append(ast.Constant(template[at:]))
    if len(parts) > _MOST_PARTS:
        raise _UntranslatableError(f"its template has more than {_MOST_PARTS} parts")
    joined = parts[0]
    for part in parts[1:]:
        joined = ast.BinOp(joined, ast.Add(), part)
    return joined


def _field(path: str, expected: str | None) -> ast.expr:
    if path == _OUTPUT:
        return ast.Name("output", ast.Load())
    if path == f"item.{expected}":
        return fill_expression("text(EXPECTED)")
    found = _ITEM.fullmatch(path)
    if found is None:
        raise _UntranslatableError(f"it reads {{{{{path}}}}}, which has no equivalent")
    value: ast.expr = ast.Name("item", ast.Load())
    for name, place in re.findall(r"\.(\w+)|\[([0-9]+)\]", found[1]):
        value = ast.Subscript(value, ast.Constant(name or int(place)), ast.Load())
    return fill_expression("text(VALUE)", VALUE=value)


def _identifier(name: str, used: set[str]) -> str:
    # Python reads identifiers in this form: others would be another variable than the one that was checked.
    made = re.sub(r"\W+", "_", unicodedata.normalize("NFKC", name.lower())).strip("_") or "grader"
    if not made.isidentifier() or keyword.iskeyword(made):
        made = f"grader_{made}"
    return unused(made if made.isidentifier() else "grader", used, "_")


def unused(name: str, used: set[str], separator: str = "-") -> str:
    """Return a name that is not in `used`, with a number appended if needed, and add it to `used`."""
    candidate, count = name, 1
    while candidate in used:
        count += 1
        candidate = f"{name}{separator}{count}"
    used.add(candidate)
    return candidate


_TAKEN = frozenset({
    "all_of", "answer", "contains", "evaluator", "exact_match", "fuzzy_match", "isinstance", "item_of", "judge",
    "json", "label_judge", "numeric_judge", "str", "suite", "text",
})  # fmt: skip
_RULES = {
    "string_check": _string_check,
    "text_similarity": _text_similarity,
    "label_model": _label_model,
    "score_model": _score_model,
}
_ANSWER = """
def answer(item, ctx: TrialContext):
    raise NotImplementedError("call your model, ctx.experiment.params['model'], or your agent here")
"""
_TEXT = '''
def text(value):
    """Return a value as text, as templates insert it."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
'''
_WHOLE_ITEM = '''
def item_of(sample):
    """Return the row of the data source."""
    return sample.input
'''
_ITEM_WITH_ANSWER = '''
def item_of(sample):
    """Return the row of the data source."""
    return {**sample.input, KEY: sample.expected}
'''
_SUITE = """
suite = EvalSuite(
    name=NAME, dataset=Dataset.load(Path(__file__).with_name(DATA)), task=answer,
    evaluator=EVALUATOR, experiments=EXPERIMENTS,
)
"""
_EXPERIMENT = "Experiment(NAME, params={'model': MODEL})"


def suite_code(
    name: str,
    title: str,
    data: str,
    graders: Sequence[Grader],
    expected: str | None,
    prompt: Sequence[Mapping[str, Any]] | None,
    models: Mapping[str, str],
) -> str:
    """Return the source code of a suite with the translated graders and an experiment for every model that was run."""
    made = [grader for grader in graders if grader.evaluator]
    judges = _judges(made)
    definitions = [
        replace_names(grader.definition, JUDGE=ast.Name(judges.get(grader.judge, ""), ast.Load()))
        for grader in made
        if grader.definition is not None
    ]
    used = names_in(definitions)
    described = f"{' '.join(title.split())}, imported from OpenAI Evals by `fairtrial import`. Edit as needed."
    body: list[ast.stmt] = [ast.Expr(ast.Constant(described)), *_imports(made, used)]
    for model, variable in judges.items():
        target = ast.Name(variable, ast.Store())
        body += fill("JUDGE = OpenAIAdapter(MODEL)", JUDGE=target, MODEL=ast.Constant(model))
    left = {one.record.name: f"{one.record.kind}: {one.record.remark}" for one in graders if not one.evaluator}
    if prompt:
        try:
            body += fill("PROMPT = MESSAGES", MESSAGES=literal(list(prompt)))
        except DataError as error:
            left["the prompt"] = str(error)
    body += fill("NOT_TRANSLATED = GRADERS", GRADERS=literal(left)) if left else []
    body += fill(_ANSWER)
    body += fill(_TEXT) if "text" in used else []
    if "item_of" in used:
        body += fill(_WHOLE_ITEM if expected is None else _ITEM_WITH_ANSWER, KEY=ast.Constant(expected))
    experiments: list[ast.expr] = [
        fill_expression(_EXPERIMENT, NAME=ast.Constant(experiment), MODEL=ast.Constant(model))
        for experiment, model in models.items()
    ]
    members: list[ast.expr] = [ast.Name(grader.variable, ast.Load()) for grader in made]
    body += definitions
    body += fill(
        _SUITE,
        NAME=ast.Constant(name),
        DATA=ast.Constant(data),
        EVALUATOR=ast.Call(ast.Name("all_of", ast.Load()), members, []),
        EXPERIMENTS=ast.List(experiments, ast.Load()),
    )
    return source_of(body)


def _judges(graders: Sequence[Grader]) -> dict[str, str]:
    """Return the variable of each model that judges."""
    taken = {grader.variable for grader in graders}
    return {model: unused("judge", taken, "_") for model in dict.fromkeys(one.judge for one in graders if one.judge)}


def _imports(graders: Sequence[Grader], used: set[str]) -> list[ast.stmt]:
    needed = {"Dataset", "EvalSuite", "Experiment", "TrialContext", "all_of"}
    needed |= {name for grader in graders for name in grader.imports}
    judges = {str(grader.evaluator) for grader in graders if grader.judge}
    made: list[ast.stmt] = fill("import json") if "text" in used else []
    made += fill("from pathlib import Path")
    top = needed - {"fuzzy_match"}
    made.append(_import("fairtrial", sorted(top, key=lambda name: (name.islower(), name))))
    if top != needed:
        made += fill("from fairtrial.scoring import fuzzy_match")
    if judges:
        made += [
            _import("fairtrial.models.judges", sorted(judges)),
            *fill("from fairtrial.models import OpenAIAdapter"),
        ]
    return made


def _import(module: str, names: Sequence[str]) -> ast.ImportFrom:
    return ast.ImportFrom(module, [ast.alias(name) for name in names], 0)
