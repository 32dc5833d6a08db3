"""Translate graders of OpenAI Evals to the source code of a suite file, which people read and edit."""

from __future__ import annotations

import keyword
import pprint
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairtrial.importing.records import TranslatedGrader

_FIELD = re.compile(r"\{\{\s*(.*?)\s*\}\}")
_ITEM = re.compile(r"item((?:\.\w+|\[\d+\])+)")
_OUTPUT = "sample.output_text"


class _Untranslatable(Exception):
    """A grader has no equivalent; the message says why."""


@dataclass(frozen=True, slots=True)
class Grader:
    """A grader with its translation: source code, the variable with the evaluator, and the required imports."""

    record: TranslatedGrader
    definition: str = ""
    variable: str = ""
    imports: tuple[str, ...] = ()
    judge: str = ""  # The model of a judge.

    @property
    def evaluator(self) -> str | None:
        """The evaluator that replaces the grader; None if there is none."""
        return self.record.evaluator


def reference_key(criteria: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the field of an item with the reference answer; None unless all graders compare with the same field."""
    references = (re.fullmatch(r"\{\{\s*item\.(\w+)\s*\}\}", str(one.get("reference"))) for one in criteria)
    keys = {found[1] for found in references if found is not None}
    return keys.pop() if len(keys) == 1 else None


def translate(criteria: Mapping[str, Mapping[str, Any]], expected: str | None) -> list[Grader]:
    """Translate graders, by name. A grader that cannot be translated has a remark with the reason."""
    variables: set[str] = set(_TAKEN)
    graders: list[Grader] = []
    for name, criterion in criteria.items():
        kind = str(criterion.get("type") or "unknown")
        try:
            rule = _RULES.get(kind)
            if rule is None:
                raise _Untranslatable(_NO_EQUIVALENT.get(kind, f"graders of type {kind!r} are not supported"))
            graders.append(rule(criterion, name, _identifier(name, variables), expected))
        except _Untranslatable as reason:
            graders.append(Grader(TranslatedGrader(name, kind, None, str(reason))))
    return graders


_NO_EQUIVALENT = {
    "python": "write it as a function of (output, expected); its source is in evals.jsonl",
    "multi": "combine its graders with weighted() or all_of(); its formula is in evals.jsonl",
}


def _string_check(grader: Mapping[str, Any], name: str, variable: str, expected: str | None) -> Grader:
    operation = grader.get("operation")
    calls = {
        "eq": ("exact_match({0}, {1})", "exact_match"),
        "ne": ("not exact_match({0}, {1}).passed", "exact_match, negated"),
        "like": ("contains({0}, {1})", "contains"),
        "ilike": ("contains({0}.casefold(), {1}.casefold())", "contains, any case"),
    }
    if operation not in calls:
        raise _Untranslatable(f"operation {operation!r} is not supported")
    call, label = calls[str(operation)]
    needed = "exact_match" if "exact" in call else "contains"
    return _comparison(grader, name, variable, expected, f"    return {call}\n", label, needed)


def _text_similarity(grader: Mapping[str, Any], name: str, variable: str, expected: str | None) -> Grader:
    metric = grader.get("evaluation_metric")
    if metric != "fuzzy_match":
        raise _Untranslatable(f"the metric {metric} is not supported; use fuzzy_match or a judge")
    minimum = grader.get("pass_threshold", 0.8)
    body = f"    return fuzzy_match({minimum!r})({{0}}, {{1}})\n"
    made = _comparison(grader, name, variable, expected, body, "fuzzy_match", "fuzzy_match")
    remark = "uses normalised edit distance: values may differ from those of the source"
    return Grader(
        TranslatedGrader(name, "text_similarity", "fuzzy_match", remark), made.definition, made.variable, made.imports
    )


def _comparison(
    grader: Mapping[str, Any], name: str, variable: str, expected: str | None, body: str, label: str, needed: str
) -> Grader:
    output, reference = (_expression(str(grader.get(side) or ""), expected) for side in ("input", "reference"))
    plain = "item[" not in output + reference
    if plain:
        head = f"def {variable}(output, expected):\n"
    else:
        head = f"def {variable}(sample, output, *, context):\n    item = item_of(sample)\n"
        output, reference = (text.replace("text(expected)", "text(sample.expected)") for text in (output, reference))
    definition = f"@evaluator(name={name!r}, inline=True)\n{head}{body.format(output, reference)}"
    record = TranslatedGrader(name, str(grader["type"]), label)
    return Grader(record, definition, variable, ("evaluator", needed))


def _label_model(grader: Mapping[str, Any], name: str, variable: str, expected: str | None) -> Grader:
    labels, passing = grader.get("labels"), grader.get("passing_labels")
    if not isinstance(labels, list) or not isinstance(passing, list) or not passing:
        raise _Untranslatable("it has no labels, or no passing labels")
    arguments = f"labels={labels!r}, passing={passing!r}, "
    return _judge(grader, name, variable, expected, "label_judge", arguments, "the prompt became the judge's criterion")


def _score_model(grader: Mapping[str, Any], name: str, variable: str, expected: str | None) -> Grader:
    bounds = grader.get("range") or [0, 1]
    if list(bounds) != [0, 1]:
        shown = " to ".join(str(bound) for bound in bounds)
        raise _Untranslatable(f"it scores from {shown}, and numeric_judge from 0 to 1")
    threshold = grader.get("pass_threshold")
    arguments = "" if threshold is None else f"pass_at={threshold!r}, "
    return _judge(
        grader, name, variable, expected, "numeric_judge", arguments, "the prompt became the judge's criterion"
    )


def _judge(
    grader: Mapping[str, Any],
    name: str,
    variable: str,
    expected: str | None,
    function: str,
    arguments: str,
    remark: str,
) -> Grader:
    model = str(grader.get("model") or "")
    criterion = _criterion(grader.get("input"), expected)
    definition = (
        f"{variable} = {function}(\n    judge,  # The source used {_in_comment(model)}.\n    {criterion!r},\n"
        f"    {arguments}name={name!r},\n)\n"
    )
    record = TranslatedGrader(name, str(grader["type"]), function, remark)
    return Grader(record, definition, variable, (), model)


def _criterion(messages: Any, expected: str | None) -> str:
    """Return the prompt of a grader as a criterion. Judges get input, reference and output in separate sections."""
    texts: list[str] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                raise _Untranslatable("its prompt contains images or audio")
            texts.append(text)
    if not "".join(texts).strip():
        raise _Untranslatable("its prompt is empty")

    def named(found: re.Match[str]) -> str:
        if found[1] == _OUTPUT:
            return "[the output to assess]"
        if found[1] == f"item.{expected}":
            return "[the reference answer]"
        return f"[{found[1].removeprefix('item.')} of the input]" if found[1].startswith("item.") else found[0]

    return _FIELD.sub(named, "\n\n".join(texts))


def _expression(template: str, expected: str | None) -> str:
    """Return a template as a Python expression."""
    parts: list[str] = []
    at = 0
    for found in _FIELD.finditer(template):
        if found.start() > at:
            parts.append(repr(template[at : found.start()]))
        parts.append(_field(found[1], expected))
        at = found.end()
    if at < len(template) or not parts:
        parts.append(repr(template[at:]))
    return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"


def _field(path: str, expected: str | None) -> str:
    if path == _OUTPUT:
        return "output"
    if path == f"item.{expected}":
        return "text(expected)"
    found = _ITEM.fullmatch(path)
    if found is None:
        raise _Untranslatable(f"it reads {{{{{path}}}}}, which has no equivalent")
    keys = re.findall(r"\.(\w+)|\[(\d+)\]", found[1])
    return "text(item" + "".join(f"[{name!r}]" if name else f"[{place}]" for name, place in keys) + ")"


def _identifier(name: str, used: set[str]) -> str:
    made = re.sub(r"\W+", "_", name).strip("_").lower() or "grader"
    if not made.isidentifier() or keyword.iskeyword(made):
        made = f"grader_{made}"
    return unused(made, used, "_")


def unused(name: str, used: set[str], separator: str = "-") -> str:
    """Return a name that is not in `used`, with a number appended if needed, and add it to `used`."""
    candidate, count = name, 1
    while candidate in used:
        count += 1
        candidate = f"{name}{separator}{count}"
    used.add(candidate)
    return candidate


_TAKEN = frozenset({
    "all_of", "answer", "contains", "evaluator", "exact_match", "fuzzy_match", "item_of", "judge", "label_judge",
    "json", "numeric_judge", "suite", "text",
})  # fmt: skip
_RULES = {
    "string_check": _string_check,
    "text_similarity": _text_similarity,
    "label_model": _label_model,
    "score_model": _score_model,
}


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
    used = {one for grader in made for one in grader.imports}
    needed = sorted({"Dataset", "EvalSuite", "Experiment", "TrialContext", "all_of", *used}, key=_import_order)
    judges = sorted({str(grader.evaluator) for grader in made if grader.judge})
    definitions = "\n\n".join(grader.definition for grader in made)
    lines = [f'"""{_in_docstring(title)}, imported from OpenAI Evals by `fairtrial import`. Edit as needed."""\n']
    helpers = [one for one in ("text", "item_of") if f"{one}(" in definitions]
    lines += ["import json"] if "text" in helpers else []
    lines += ["from pathlib import Path\n", f"from fairtrial import {', '.join(needed)}"]
    if judges:
        lines += [f"from fairtrial.judging import {', '.join(judges)}", "from fairtrial.models import OpenAIAdapter"]
        model = next(grader.judge for grader in made if grader.judge)
        lines.append(f"\njudge = OpenAIAdapter({model!r})")
    if prompt:
        lines.append("\n# The messages that the source sent to its model; {{item.x}} is a field of the item.")
        lines.append(f"PROMPT = {pprint.pformat(list(prompt), width=100, sort_dicts=False)}")
    lines.append(
        "\n\ndef answer(item, ctx: TrialContext):\n"
        "    raise NotImplementedError(\"call your model, ctx.experiment.params['model'], or your agent here\")\n\n"
    )
    if "text" in helpers:
        lines.append(
            'def text(value):\n    """Return a value as text, as templates insert it."""\n'
            '    return value if isinstance(value, str) else "" if value is None else json.dumps(value)\n\n'
        )
    if "item_of" in helpers:
        whole = "sample.input" if expected is None else f"{{**sample.input, {expected!r}: sample.expected}}"
        lines.append(f'def item_of(sample):\n    """Return the row of the data source."""\n    return {whole}\n\n')
    for grader in graders:
        left = f"# Not translated: {grader.record.name!r} ({grader.record.kind}): {_in_comment(grader.record.remark)}"
        lines.append(f"{grader.definition or left}\n")
    experiments = "".join(
        f"        Experiment({experiment!r}, params={{'model': {model!r}}}),\n" for experiment, model in models.items()
    )
    members = ", ".join(grader.variable for grader in made)
    lines.append(
        f"suite = EvalSuite(\n    name={name!r},\n    dataset=Dataset.load(Path(__file__).with_name({data!r})),\n"
        f"    task=answer,\n    evaluator=all_of({members}),\n    experiments=[\n{experiments}    ],\n)\n"
    )
    return "\n".join(lines)


def _import_order(name: str) -> tuple[bool, str]:
    return name.islower(), name


def _in_docstring(text: str) -> str:
    return _in_comment(text).replace("\\", "/").replace('"', "'")


def _in_comment(text: str) -> str:
    return " ".join(text.split())
