"""Write the suite for what a folder has.

Names from the folder are either identifiers that were parsed as such, or literals made by `quoted`.
"""

from __future__ import annotations

import re

from fairtrial.base.formatting import count
from fairtrial.cli.detect import SDKS, Found, FunctionCall, SampleFile

_SHOWN = 3  # Files that cannot be used, at most.
_PROVIDERS = {"openai": "OpenAI", "anthropic": "Anthropic"}
_EVALUATORS = {
    "exact_match": "Passes if the output equals the expected label.",
    "contains": "Passes if the output contains the expected text. Others: exact_match, squad(), llm_judge(...).",
    "not_empty": "There is no expected text for every output: say here what a good output is.",
}
_NOT_EMPTY = '''
def not_empty(output: str) -> bool:
    """Passes any text. Replace this with what a good output must have."""
    return bool(output.strip())

'''
_PLACE = '''
def answer(value: {kind}) -> str:
    """TODO: call your application here and return its answer. Until then, every output is empty."""
    return ""

'''
_SAMPLES = """Dataset(
        [Sample("hello", "Hello!"), Sample("help", "What can you do?")],  # TODO: your own inputs.
        name="samples",
    )"""

TEST = '''"""The suite as a test: EVALS=1 pytest test_evals.py"""

from __future__ import annotations

import os

import pytest

if not os.environ.get("EVALS"):
    pytest.skip("it calls your model: set EVALS=1", allow_module_level=True)

from evals import suite

from fairtrial.testing import eval_test

# The whole 95% interval of the pass rate must be at the floor or above. Raise it to what must stay true.
test_application = eval_test(suite, floor=0.1)
'''


def quoted(text: str) -> str:
    """Return text as a Python literal."""
    return f'"{text}"' if re.fullmatch(r"[\w ./-]*", text, re.ASCII) else repr(text)


def suite_name(found: Found) -> str:
    """Return a name for the suite: that of its data or its function."""
    stem = found.table.path.rpartition("/")[2].partition(".")[0] if found.table else ""
    name = stem or (found.call.function if found.call else "application")
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") or "application"


def evaluator_of(table: SampleFile | None) -> str:
    """Return the name of an evaluator that fits the references."""
    return "not_empty" if table is None or not table.expected else "exact_match" if table.labels else "contains"


def suite_text(found: Found) -> str:
    """Return the content of evals.py."""
    evaluator, table, call = evaluator_of(found.table), found.table, found.call
    names = sorted({"Dataset", "EvalSuite", evaluator} - {"not_empty"} | ({"Sample"} if table is None else set()))
    recorders = [f"record_{name}" for name in sorted(found.sdks)]
    under_src = call is not None and call.path.startswith("src/")
    parts = [
        '"""Evaluates this application. Run this with: fairtrial run\n\n'
        'Written by `fairtrial init` from what it found in this folder. It is yours to change.\n"""\n',
        "from __future__ import annotations\n",
        "\n".join(
            [*(["import sys"] if under_src else []), *(["from pathlib import Path"] if under_src or table else [])]
        ),
        f"from fairtrial import {', '.join(names)}",
    ]
    text = "\n".join(part for part in parts[:3] if part) + ("\n\n" if parts[2] else "\n") + parts[3] + "\n"
    if recorders:
        text += f"from fairtrial.integrations.tracing import {', '.join(recorders)}\n"
    if under_src:
        text += '\nsys.path.insert(0, str(Path(__file__).parent / "src"))\n'
    if call is not None:
        text += f"\nimport {call.module} as application\n"
    if recorders:
        shown = " and ".join(_PROVIDERS[name] for name in sorted(found.sdks))
        lines = [f"{name}()" for name in recorders]
        text += (
            f"\n# Calls of the SDK of {shown} are recorded: messages, tools, tokens and cost.\n"
            + "\n".join(lines)
            + "\n"
        )
    text += "\n" + _task(call, "str" if table is None or table.typed else "object")
    if evaluator == "not_empty":
        text += _NOT_EMPTY
    return text + _suite(found, evaluator)


def _task(call: FunctionCall | None, kind: str) -> str:
    if call is None:
        return _PLACE.format(kind=kind)
    value = "value" if kind == "str" else "str(value)"
    made = f"application.{call.function}({call.argument.replace('{value}', value)})"
    made = f"await {made}" if call.is_async else made
    returned = f"reply{call.result}" if call.text else f"str(reply{call.result})"
    return (
        f"\n{'async ' if call.is_async else ''}def answer(value: {kind}) -> str:\n"
        f'    """What is evaluated: {call.function}() of {call.path}."""\n'
        f"    reply = {made}\n"
        f"    return {returned}\n\n"
    )


def _suite(found: Found, evaluator: str) -> str:
    table = found.table
    if table is None:
        data = _SAMPLES
    else:
        columns = ", ".join(f'"{field}": {quoted(column)}' for field, column in table.columns.items())
        types = "\n        str,\n        str," if table.typed else ""
        mapped = f"\n        columns={{{columns}}}," if columns else ""
        data = f"Dataset.load(\n        Path(__file__).parent / {quoted(table.path)},{types}{mapped}\n    )"
    return (
        "\nsuite = EvalSuite(\n"
        f'    name="{suite_name(found)}",\n'
        f"    dataset={data},\n"
        "    task=answer,\n"
        f"    # {_EVALUATORS[evaluator]}\n"
        f"    evaluator={evaluator},\n"
        ")\n"
    )


def keys_of(found: Found) -> str:
    """Return the variables that the SDKs read their keys from."""
    return " and ".join(SDKS[name] for name in sorted(found.sdks))


def described(found: Found) -> list[tuple[str, str]]:
    """Return what was found, in rows of a name and a description."""
    rows = [
        (f"{_PROVIDERS[name]} SDK", f"{where}; its calls are recorded") for name, where in sorted(found.sdks.items())
    ]
    if found.fastapi:
        rows.append(("FastAPI", found.fastapi))
    if found.call is not None:
        route = f", {found.call.route}" if found.call.route else ""
        rows.append(("function", f"{found.call.function}() of {found.call.path}{route}"))
    else:
        rows.append(("function", "none that is safe to guess: fill in `answer` in evals.py"))
    if found.table is not None:
        of = {"input": "input", "expected": "expected"} | found.table.columns
        column = of["expected"]
        without = ", without expected answers" if column == "expected" else f"; {column} is not always text"
        expected = f", expected = {column}" if found.table.expected else without
        rows.append(
            ("data", f"{found.table.path}: {count(found.table.samples, 'sample')}, input = {of['input']}{expected}")
        )
    rows += [("data", f"{path} is not used: {reason}") for path, reason in list(found.unused.items())[:_SHOWN]]
    if len(found.unused) > _SHOWN:
        rows.append(("data", f"{count(len(found.unused) - _SHOWN, 'more file')} not used"))
    if found.table is None:
        none = "" if found.unused else "no CSV or JSONL with inputs: "
        rows.append(("data", f"{none}replace the two samples in evals.py"))
    if found.pytest:
        rows.append(("pytest", found.pytest))
    return rows
