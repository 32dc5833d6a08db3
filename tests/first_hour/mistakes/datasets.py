"""Wrong data, and wrong models, prompts, keys and judges."""

# ruff: noqa: E501
from __future__ import annotations

from tests.first_hour.mistakes.case import RAN, RUN, Mistake, loads, suite

ROW = '{"id": "a", "input": "q1", "expected": "a1"}\n'
NOWHERE = "OPENAI_API_KEY=x OPENAI_BASE_URL=http://127.0.0.1:9/v1"
TRY = "fairtrial try p.md --dataset d.jsonl --evaluator exact_match --model"


def prompt(text: str) -> dict[str, str]:
    """A prompt and a dataset."""
    return {"p.md": text, "d.jsonl": ROW}


CASES = (
    Mistake("ds-broken-line", loads("d.jsonl", ROW + '{"id": "b", "input": "x"\n'), RUN, 2,
            ("d.jsonl:2: not JSON: Expecting ',' delimiter at column 25",), "file, line, and the column in that line"),
    Mistake("ds-missing-key", loads("d.jsonl", '{"id": "a", "question": "x", "answer": "y"}\n'), RUN, 2,
            ("d.jsonl:1: unknown field 'question'", "columns=..."), "file, line, field, and two remedies"),
    Mistake("ds-wrong-column", loads("d.csv", "question,answer\nx,y\n", "'d.csv', columns={'input': 'qestion'}"), RUN, 2,
            ("d.csv:2: there is no column 'qestion' for 'input' (found question, answer)",), "lists the columns"),
    Mistake("ds-semicolon", loads("d.csv", "question;answer\nx;y\n", "'d.csv', columns={'input': 'question'}"), RUN, 2,
            ("separated by ';'", "save the file with ','"), "what is wrong, and the remedy"),
    Mistake("ds-crlf-bom", loads("d.csv", "\ufeffinput,expected\r\nq1,a1\r\n"), RAN, 0, ("100.0%",), "files of Windows work"),
    Mistake("ds-jsonl-crlf", loads("d.jsonl", ROW.replace("\n", "\r\n\r\n")), RAN, 0, ("100.0%",), "files of Windows work"),
    Mistake("ds-nan", loads("d.jsonl", '{"id": "a", "input": NaN}\n'), RUN, 2, ("d.jsonl:1: NaN is not JSON; write null",),
            "file, line, and the remedy"),
    Mistake("ds-int-expected", loads("d.jsonl", '{"id": "a", "input": "q42", "expected": 42}\n').copy()
            | suite("suite = EvalSuite('s', Dataset.load('d.jsonl'), lambda x: x[1:], exact_match)\n"), RUN, 0,
            ("All failures differ from the expected value by type only, such as '42' (str) from 42 (int)",),
            "the report says why everything failed"),
    Mistake("ds-no-expected", loads("d.jsonl", '{"id": "a", "input": "q1"}\n'), RUN, 4,
            ("the sample has no expected value, with which evaluator 'exact_match' compares: give it one",),
            "an error, not 0%; with the remedy"),
    Mistake("ds-expected-typo", loads("d.jsonl", '{"id": "a", "input": "q1", "expcted": "a1"}\n'), RUN, 2,
            ("d.jsonl:1: unknown field 'expcted'; did you mean 'expected'?",), "file, line, and the right name"),
    Mistake("ds-no-file", suite("suite = EvalSuite('s', Dataset.load('missing.jsonl'), task, exact_match)\n"), RUN, 2,
            ("missing.jsonl: no such file (looked from",), "the file, and where it was looked for"),
    Mistake("ds-xlsx", loads("d.xlsx", "x"), RUN, 2, ("d.xlsx", "save the sheet as .csv"), "the formats, and the remedy"),
    Mistake("ds-json-object", loads("d.json", '{"samples": [{"input": "q1"}]}'), RUN, 2,
            ("d.json: an array of rows was expected", "keep only the array under 'samples'"), "the file, and the remedy"),
    Mistake("model-no-key", prompt("Answer: $input\n"), f"{TRY} openai:gpt-4o-mini", 2, ("set OPENAI_API_KEY",),
            "names the variable", needs=("openai",)),
    Mistake("model-wrong-url", prompt("Answer: $input\n"), f"{NOWHERE} {TRY} openai:gpt-4o-mini", 4,
            ("could not be reached at http://127.0.0.1:9/v1", "--resume errors"), "the address, and how to retry",
            needs=("openai",), slow=True),
    Mistake("model-unknown-provider", prompt("Answer: $input\n"), f"{TRY} opnai:gpt-4o-mini", 2,
            ("there is no provider 'opnai'", "did you mean --model openai:gpt-4o-mini?"), "what to type"),
    Mistake("model-no-provider", prompt("Answer: $input\n"), f"{TRY} gpt-4o-mini", 2,
            ("there is no provider 'gpt-4o-mini'", "use PROVIDER:NAME"), "the form, and the providers"),
    Mistake("prompt-wrong-var", prompt("Answer: $question\n"), f"{NOWHERE} {TRY} openai:gpt-4o-mini", 4,
            ("could not be reached",), "the only placeholder takes a plain input, whatever its name", needs=("openai",),
            slow=True),
    Mistake("prompt-jinja", prompt("Answer: {{input}}\n"), f"{NOWHERE} {TRY} openai:gpt-4o-mini", 2,
            ("prompt 'p' has no placeholder for the input", "write $input where it belongs, not {input} or {{input}}"),
            "before a call is paid for; with the form", needs=("openai",)),
    Mistake("evaluator-unknown", prompt("Answer: $input\n"), f"{NOWHERE} fairtrial try p.md --dataset d.jsonl --model "
            "openai:gpt-4o-mini --evaluator exactmatch", 2, ("there is no evaluator 'exactmatch'",
            "did you mean exact_match?"), "the right name", needs=("openai",)),
    Mistake("judge-no-adapter", suite("from fairtrial import llm_judge\n"
            "suite = EvalSuite('s', data, task, llm_judge('Is it polite?'))\n"), RUN, 2,
            ("evals.py:7", "has a judge without a model", "llm_judge(adapter, criterion)"), "both ways to give it one"),
    # New ones.
    Mistake("ds-yaml", loads("d.yaml", "- input: q1\n"), RUN, 2, ("d.yaml", ".jsonl"), "the formats"),
    Mistake("ds-json-as-jsonl", loads("d.jsonl", '[\n{"id": "a", "input": "q1"}\n]\n'), RUN, 2, ("d.jsonl:1",),
            "file and line"),
    Mistake("ds-jsonl-as-json", loads("d.json", ROW + ROW), RUN, 2, ("d.json: an array of rows was expected",),
            "what was expected"),
    Mistake("ds-short-row", loads("d.csv", "input,expected\nq1\n"), RUN, 2, ("d.csv:2: expected 2 cells, found 1",),
            "file and line"),
    Mistake("ds-open-quote", loads("d.csv", 'input,expected\n"q1,a1\nq2,a2\n'), RUN, 2, ("d.csv:",), "file and line"),
    Mistake("ds-twice-the-column", loads("d.csv", "input,input\nq1,a1\n"), RUN, 2,
            ("d.csv:1: two columns are both named 'input'",), "file, line and name"),
    Mistake("ds-latin-1", loads("d.csv", "input,expected\nq1,a1\n") | {"x.py": "open('d.csv', 'ab').write(b'caf\\xe9,x\\n')\n"},
            f"python x.py\n{RUN}", 2, ("d.csv", "UTF-8"), "the file, and the encoding it needs"),
    Mistake("ds-duplicate-id", loads("d.jsonl", ROW + ROW), RUN, 2, ("d.jsonl", "'a'"), "the file, and the id"),
    Mistake("ds-empty-file", loads("d.jsonl", ""), RUN, 2, ("has no samples, so nothing was run",), "nothing passes"),
    Mistake("ds-folder", suite("suite = EvalSuite('s', Dataset.load('.'), task, exact_match)\n"), RUN, 2, ("evals.py:6",),
            "file and line"),
    Mistake("model-openai-slash", prompt("Answer: $input\n"), f"{TRY} openai/gpt-4o-mini", 2, ("PROVIDER:NAME",),
            "the form, and the providers"),
    Mistake("model-only-provider", prompt("Answer: $input\n"), f"{NOWHERE} {TRY} openai:", 2, ("--model must be PROVIDER:NAME (got 'openai:')",),
            "the name of the model is missing", needs=("openai",)),
    Mistake("try-without-model", prompt("Answer: $input\n"), "fairtrial try p.md --dataset d.jsonl --evaluator contains", 2,
            ("--model",), "the option that is missing"),
    Mistake("try-a-suite", {**prompt("x"), **suite("suite = EvalSuite('s', data, task, exact_match)\n")},
            "fairtrial try evals.py:suite --dataset d.jsonl --model openai:x --evaluator contains", 2, ("evals.py:suite must be a PromptTemplate (got EvalSuite)",),
            "a suite is no prompt"),
    Mistake("try-missing-prompt", {"d.jsonl": ROW}, f"{TRY} openai:gpt-4o-mini", 2, ("p.md",), "the file"),
    Mistake("key-as-model", prompt("Answer: $input\n"), f"{TRY} sk-proj-abcdefghijklmnopqrstuvwxyz0123456789AB", 2,
            ("use PROVIDER:NAME",), "the form; the key is not repeated", never=("sk-proj-abcdefgh",)),
)  # fmt: skip
