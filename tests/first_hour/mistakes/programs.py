"""Mistakes in programs, notebooks, tests and training."""

# ruff: noqa: E501
from __future__ import annotations

from tests.first_hour.mistakes.case import SUITE, Mistake, program, suite

REPORT = "from evals import suite\nr = suite.run_sync(store='memory:')\n"
TESTED = SUITE + "from fairtrial.testing import eval_test\nsuite = EvalSuite('s', data, task, exact_match)\n"
LAST = "the last line says it"

CASES = (
    Mistake("loop-running", program("import asyncio\nfrom evals import suite\nasync def main():\n"
            "    print(suite.run_sync(store='memory:').pass_rate)\nasyncio.run(main())\n"), "python x.py", 0, ("1.0",),
            "works in a running loop, as in a notebook"),
    Mistake("forgot-await", program("from evals import suite\nr = suite.run(store='memory:')\nprint(r.pass_rate)\n"),
            "python x.py", 1, ("'coroutine' object has no attribute 'pass_rate'", "'EvalSuite.run' was never awaited"),
            "Python's own words, which name the coroutine", "acceptable", traceback=True),
    Mistake("unknown-experiment-in-python", program(f"{REPORT}r['careful']\n"), "python x.py", 1,
            ("no experiment 'careful' in run", "it has baseline"), "lists what there is", traceback=True),
    Mistake("report-attr", program(f"{REPORT}r.accuracy\n"), "python x.py", 1,
            ("'EvalReport' object has no attribute 'accuracy'",), "Python's own words", "acceptable", traceback=True),
    Mistake("results-by-id", program(f"{REPORT}r.results['q1']\n"), "python x.py", 1,
            ("results are numbered, as in results[0]", "if result.sample_id == 'q1'"), "the line to write", traceback=True),
    Mistake("run_sync-positional", program("from evals import suite\nsuite.run_sync('memory:')\n"), "python x.py", 1,
            ("TypeError", "positional"), "Python's own words", "acceptable", traceback=True),
    Mistake("run_sync-keyword-typo", program("from evals import suite\nsuite.run_sync(stor='memory:')\n"), "python x.py", 1,
            ("unexpected keyword argument 'stor'",), "Python's own words", "acceptable", traceback=True),
    Mistake("old-python-311", program("from importlib.metadata import metadata\nprint(metadata('fairtrial')"
            "['Requires-Python'])\n"), "python x.py", 0, (">=3.12",), "pip refuses an older Python with this reason"),
    Mistake("old-python-path", program("import fairtrial, pathlib\nprint(pathlib.Path(fairtrial.__file__).parents[1])\n"),
            "PYTHONPATH=$(python x.py) python3.11 -c 'from fairtrial import EvalSuite'", 1, ("SyntaxError",),
            "only who goes around pip sees it", "acceptable", programs=("python3.11",), traceback=True, slow=True),
    Mistake("pytest-n", {"test_x.py": TESTED + "test_s = eval_test(suite, floor=0.3)\ntest_t = eval_test(suite, floor=0.9)\n"},
            "python -m pytest -q -n 2 -p no:cacheprovider test_x.py | cat", 0, ("1 passed",),
            "the same verdicts in several processes", needs=("pytest", "xdist"), slow=True),
    # New ones.
    Mistake("evaluate-order", program("from fairtrial import evaluate_sync, exact_match\nfrom evals import data, task\n"
            "evaluate_sync(task, data, exact_match)\n"), "python x.py", 1, ("the samples come first",), "the order",
            traceback=True),
    Mistake("evaluate-config-dict", program("from fairtrial import evaluate_sync, exact_match\nfrom evals import data, task\n"
            "evaluate_sync(data, task, exact_match, config={'repeats': 2})\n"), "python x.py", 1,
            ("config must be an EvalConfig (got dict)", "EvalConfig(repeats=2)"), "the line to write", traceback=True),
    Mistake("dataset-of-list", program("from fairtrial import Dataset\nDataset.of([1, 2])\n"), "python x.py", 1,
            ("Dataset.of",), LAST, traceback=True),
    Mistake("compare-with-itself-in-python", program(f"from fairtrial import compare\n{REPORT}compare(r)\n"), "python x.py", 1,
            ("a comparison needs a baseline and at least one candidate",), LAST, traceback=True),
    Mistake("gate-without-rules", program(f"from fairtrial import gate\n{REPORT}gate(r)\n"), "python x.py", 1, ("the gate has no rules: set at least min_pass_rate",), LAST,
            traceback=True),
    Mistake("store-object-closed", program("from fairtrial import open_store\nopen_store('results.csv')\n"), "python x.py", 1,
            ("invalid store URL",), "lists the forms", traceback=True),
    Mistake("score-of-two", program("from fairtrial import Score\nScore(1.2)\n"), "python x.py", 1, ("from 0 to 1 (got 1.2)",),
            LAST, traceback=True),
    Mistake("frozen-sample", program("from fairtrial import Sample\nSample('a', 1).input = 2\n"), "python x.py", 1,
            ("cannot assign to field 'input'",), LAST, traceback=True),
    Mistake("test-without-suite", {"test_x.py": "from fairtrial.testing import eval_test\ntest_s = eval_test('s', floor=0.3)\n"},
            "python -m pytest -q -p no:cacheprovider test_x.py", 2, ("eval_test takes an EvalSuite (got str)",), "what it takes", needs=("pytest",),
            traceback=True),
    Mistake("test-floor-percent", {"test_x.py": TESTED + "test_s = eval_test(suite, floor=80)\n"},
            "python -m pytest -q -p no:cacheprovider test_x.py", 1, ("such as 0.8, for 80% (got 80)",), "says how 80% is written", needs=("pytest",), traceback=True),
    Mistake("reward-of-text", program("from fairtrial.rl import reward_function\nreward_function('accuracy')\n"), "python x.py",
            1, ("cannot import name 'reward_function' from 'fairtrial.rl'",), "Python's own words", "acceptable", traceback=True),
    Mistake("notebook-suite", suite("suite = EvalSuite('s', data, lambda x: x.replace('q', 'a'), exact_match)\nprint(suite)\n"),
            "python evals.py", 0, ("<EvalSuite 's': 6 samples of 'd'>",), "a suite in a cell shows what it is"),
)  # fmt: skip
