"""Suites that are written wrong: definitions, tasks and evaluators."""

# ruff: noqa: E501
from __future__ import annotations

from tests.first_hour.mistakes.case import RAN, RUN, Mistake, suite

S = "suite = EvalSuite('s', data, task, exact_match"
UNICODE = (
    "d = Dataset.of({'東京はどこ？ 🗼': '日本', 'שלום': 'peace', 'e\\u0301': '\\u00e9'}, name='дан')\n"
    "suite = EvalSuite('тест-😀', d, lambda x: 'x\\u202e\\x1b[31m', exact_match)\n"
)
PLACE = "the file and the line"


def evaluator(body: str) -> dict[str, str]:
    """A suite with an evaluator of its own."""
    return suite(f"def ev(output, expected):\n    {body}\nsuite = EvalSuite('s', data, task, ev)\n")


def task(body: str) -> dict[str, str]:
    """A suite with a task of its own."""
    return suite(
        f"import asyncio, os, sys, time\ndef t(x):\n    {body}\nsuite = EvalSuite('s', data, t, exact_match)\n"
    )


CASES = (
    Mistake("syntax-error", suite(f"{S}\n"), RUN, 2, ("evals.py:6: SyntaxError: '(' was never closed",), PLACE),
    Mistake("no-suite", suite("x = 1\n"), RUN, 2, ("must define an EvalSuite at the top level", "suite = EvalSuite(...)"),
            "what is missing, and how it is written"),
    Mistake("two-suites-same-name", suite(f"a = EvalSuite('s', data, task, exact_match)\nb{S[5:]})\n"), RUN, 2,
            ("evals.py has 2 suites", "evals.py:a, evals.py:b"), "what to type"),
    Mistake("missing-evaluator", suite("suite = EvalSuite('s', data, task)\n"), RUN, 2,
            ("evals.py:6", "must have an evaluator, such as evaluator=exact_match"), f"{PLACE}, and an example"),
    Mistake("evaluator-list", suite("suite = EvalSuite('s', data, task, [exact_match, contains])\n"), RUN, 2,
            ("evals.py:6", "all_of(exact_match, contains)"), f"{PLACE}, and how to combine them"),
    Mistake("evaluator-called", suite("suite = EvalSuite('s', data, task, exact_match())\n"), RUN, 2,
            ("evals.py:6", "exact_match() missing 2 required positional arguments"), f"{PLACE}; the words are Python's"),
    Mistake("task-called", suite("suite = EvalSuite('s', data, task('q1'), exact_match)\n"), RUN, 2,
            ("evals.py:6: a task must be callable (got 'a1'): pass the function itself",), f"{PLACE}, and the remedy"),
    Mistake("experiments-strings", suite(f"{S}, experiments=['a', 'b'])\n"), RUN, 2,
            ("evals.py:6", "write experiments=[Experiment('a')]"), f"{PLACE}, and how it is written"),
    Mistake("experiment-duplicate", suite(f"{S}, experiments=[Experiment('a'), Experiment('a')])\n"), RUN, 2,
            ("evals.py:6: experiment names must be unique (got a, a)",), PLACE),
    Mistake("experiment-colon", suite(f"{S}, experiments=[Experiment('gpt:4o')])\n"), RUN, 2,
            ("evals.py:6", "'gpt:4o': it must be text without ':', '@' or '/'"), PLACE),
    Mistake("suite-name-slash", suite("suite = EvalSuite('a/b c', data, task, exact_match)\n"), RUN, 2,
            ("evals.py:6", "'a/b c'", "without ':', '@' or '/'"), PLACE),
    Mistake("suite-name-empty", suite("suite = EvalSuite('', data, task, exact_match)\n"), RAN, 0, ("d@1",),
            "the suite has the name of its dataset", "acceptable"),
    Mistake("config-typo", suite(f"{S}, config=EvalConfig(repeat=3))\n"), RUN, 2,
            ("evals.py:6", "EvalConfig has no 'repeat'; did you mean repeats?"), f"{PLACE}, and the right name"),
    Mistake("config-dict", suite(f"{S}, config={{'repeats': 3}})\n"), RUN, 2,
            ("evals.py:6: config must be an EvalConfig (got dict)", "write config=EvalConfig(repeats=3)"),
            f"{PLACE}, and the line to write"),
    Mistake("config-string", suite(f"{S}, config=EvalConfig(repeats='3'))\n"), RUN, 2,
            ("evals.py:6: EvalConfig.repeats must be a whole number of at least 1 (got '3')",), PLACE),
    Mistake("config-timeout-0", suite(f"{S}, config=EvalConfig(timeout_seconds=0))\n"), RUN, 2,
            ("evals.py:6: EvalConfig.timeout_seconds must be more than 0",), PLACE),
    Mistake("dataset-list-of-str", suite("suite = EvalSuite('s', ['a', 'b'], task, exact_match)\n"), RUN, 2,
            ("evals.py:6", "must be a Dataset (got list)", "Dataset.of(", "Sample("), f"{PLACE}, and three ways"),
    Mistake("dataset-empty", suite("suite = EvalSuite('s', Dataset([], name='e'), task, exact_match)\n"), RUN, 2,
            ("dataset 'e' of suite 's' has no samples, so nothing was run",), "the dataset is named; nothing passes"),
    Mistake("dataset-dicts", suite("suite = EvalSuite('s', Dataset([{'input': 'q'}], name='e'), task, exact_match)\n"),
            RUN, 2, ("evals.py:6", "must be Sample objects (got dict)", "Sample(", "Dataset.of"), f"{PLACE}, and two ways"),
    Mistake("dup-ids", suite("suite = EvalSuite('s', Dataset([Sample('a', 1, 2), Sample('a', 2, 2)]), task, exact_match)\n"),
            RUN, 2, ("evals.py:6", "duplicate id 'a' at positions 0 and 1"), PLACE),
    Mistake("eval-order-io", suite("def ev(inputs, output, expected): return output == expected\n"
            "suite = EvalSuite('s', data, task, ev)\n"), RAN, 0, ("100.0%",), "names decide, in any order"),
    Mistake("eval-order-eo", suite("def ev(expected, output): return output == expected\n"
            "suite = EvalSuite('s', data, task, ev)\n"), RAN, 0, ("100.0%",), "names decide, in any order"),
    Mistake("eval-order-unknown", suite("def ev(truth, answer): return answer.startswith('a')\n"
            "suite = EvalSuite('s', data, task, ev)\n"), RAN, 0, ("'truth' receives the output", "Name them (output, expected)"),
            "says which is which, and the remedy"),
    Mistake("eval-returns-none", evaluator("output == expected"), RUN, 4, ("evaluator 'ev' returned None; return a Score",
            "fairtrial rescore"), "what was returned, what is expected, how to score again"),
    Mistake("eval-returns-5", evaluator("return 5"), RUN, 4, ("from 0 to 1 (got 5.0); use a Metric for other numbers",),
            "the value, and what it may be"),
    Mistake("eval-returns-nan", evaluator("return float('nan')"), RUN, 4, ("a finite number (got nan)",), "the value"),
    Mistake("eval-returns-str", evaluator("return 'yes'"), RUN, 4, ("evaluator 'ev' returned str; return a Score",),
            "what was returned, and what is expected"),
    Mistake("eval-typo-attr", evaluator("return output.lowr() == expected"), RUN, 4, ("Did you mean: 'lower'?",
            "evals.py:7 in ev"), "an error, not a failure; with its line"),
    Mistake("no-await", suite("async def inner(x): return task(x)\ndef t(x): return inner(x)\n"
            "suite = EvalSuite('s', data, t, exact_match)\n"), RAN, 0, ("100.0%",), "the coroutine is awaited"),
    Mistake("task-returns-object", suite("class R: pass\nsuite = EvalSuite('s', data, lambda x: R(), exact_match)\n"), RUN,
            4, ("evals.R cannot be encoded as JSON; use plain values, dataclasses",),
            "the type, and what can be stored"),
    Mistake("task-prints", task("print(f'debugging {x}')"), RAN, 0, ("debugging q0",), "what it prints is shown"),
    Mistake("task-sys-exit", task("sys.exit(3)"), RUN, 4, ("SystemExit: 3 (evals.py:8 in t)",), "an error with its line"),
    Mistake("task-os-exit", task("os._exit(3)"), f"{RUN}\nfairtrial runs", 0,
            ("interrupted", "its process ended before the run did; resume it with"), "what happened, and how to go on"),
    Mistake("task-input", task("return input('?')"), RUN, 4, ("EOFError", "evals.py:8 in t"), "an error with its line"),
    Mistake("task-blocking-async", suite("import time\nasync def t(x):\n    time.sleep(0.2)\n    return task(x)\n"
            "suite = EvalSuite('s', data, t, exact_match)\n"), RAN, 0, ("100.0%",),
            "right figures; only longer runs are told that their loop was blocked", "acceptable"),
    Mistake("task-three-params", suite("def t(x, y, z): return x\nsuite = EvalSuite('s', data, t, exact_match)\n"), RUN, 2,
            ("evals.py:7: task 't' must take (input) or (input, ctx) (got (x, y, z))",), PLACE),
    Mistake("task-all-crash", task("raise RuntimeError('boom ' + x)"), RUN, 4, ("RuntimeError: boom q0",
            "(evals.py:8 in t)", "--resume errors"), "the line, and how to retry"),
    Mistake("task-secret-in-error", task("raise RuntimeError('call with sk-proj-abcdefghijklmnopqrstuvwxyz0123456789AB')"),
            f"{RAN}\nfairtrial trials s --failed", 0, ("[redacted]",), "no key is stored or shown", never=("sk-proj-abc",)),
    Mistake("huge-output", task("return 'x' * 20_000_000"), RUN, 4, ("larger than 16,777,216 bytes",), "the limit"),
    Mistake("unicode", suite(UNICODE), f"{RAN}\nfairtrial trials 'тест-😀' --failed", 0, ("日本",),
            "names and values as they are, control characters escaped", never=("\x1b", "\u202e")),
    Mistake("latin1-locale", suite(f"{S})\n"), "LC_ALL=C LANG=C PYTHONUTF8=0 fairtrial run evals.py | cat", 0, ("100.0%",),
            "drawn in ASCII", slow=True),
    # New ones.
    Mistake("args-without-name", suite("suite = EvalSuite(data, task, exact_match)\n"), RUN, 2,
            ("evals.py:6: the name of a suite must be text (got Dataset)", 'EvalSuite("support"'), f"{PLACE}, and the order"),
    Mistake("task-and-evaluator-swapped", suite("suite = EvalSuite('s', data, exact_match, task)\n"), RUN, 2,
            ("evals.py:6: evaluator 'task' takes (x: str) -> str",), PLACE),
    Mistake("sample-inputs", suite("d = Dataset([Sample(id='a', inputs='q')])\n"), RUN, 2,
            ("evals.py:6", "Sample has no 'inputs'; did you mean input?"), f"{PLACE}, and the right name"),
    Mistake("sample-without-id", suite("d = Dataset([Sample(42, 'x')])\n"), RUN, 2,
            ("evals.py:6", "the id of a sample must be text that is not empty (got 42)"), PLACE),
    Mistake("experiment-dict", suite(f"{S}, experiments=[{{'name': 'a'}}])\n"), RUN, 2,
            ("evals.py:6", "must be Experiment objects"), PLACE),
    Mistake("experiment-model-keyword", suite(f"{S}, experiments=[Experiment('a', model='gpt')])\n"), RUN, 2,
            ("evals.py:6", "Experiment has no 'model'", "params"), f"{PLACE}, and the fields that there are"),
    Mistake("wrong-import", {"evals.py": "from fairtrial import Suite\n"}, RUN, 2, ("evals.py:1", "Suite"), PLACE),
    Mistake("missing-package", {"evals.py": "import langchainn\n"}, RUN, 2, ("evals.py:1", "langchainn"), PLACE),
    Mistake("suite-in-main", suite("if __name__ == '__main__':\n    suite = EvalSuite('s', data, task, exact_match)\n"), RUN, 2,
            ("must define an EvalSuite at the top level",), "what is missing, and where"),
    Mistake("eval-returns-dict-of-text", evaluator("return {'tone': 'good'}"), RUN, 4, ("returned str",),
            "what was returned, and what is expected"),
    Mistake("eval-async-not-awaited", suite("async def inner(output): return 1\ndef ev(output, expected): return inner(output)\n"
            "suite = EvalSuite('s', data, task, ev)\n"), RAN, 0, ("100.0%",), "the coroutine is awaited"),
    Mistake("task-returns-none", task("x.replace('q', 'a')"), f"{RAN}\nfairtrial trials s --failed", 0, ("None",),
            "the failures show that nothing was returned"),
    Mistake("task-wants-dict", task("return x['question']"), RUN, 4, ("TypeError", "evals.py:8 in t"), "the line"),
    Mistake("timeout-in-ms", suite(f"{S}, config=EvalConfig(timeout_ms=500))\n"), RUN, 2,
            ("EvalConfig has no 'timeout_ms'", "timeout"), f"{PLACE}, and a name that is near"),
    Mistake("gate-rules-typo", suite("from fairtrial import GateRules\nrules = GateRules(min_passrate=0.8)\n"), RUN, 2,
            ("evals.py:7", "GateRules has no 'min_passrate'; did you mean min_pass_rate?"), f"{PLACE}, and the right name"),
)  # fmt: skip
