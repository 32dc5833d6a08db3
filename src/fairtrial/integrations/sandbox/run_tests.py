"""Score code that a model wrote by running tests against it in a sandbox."""

from __future__ import annotations

import re
import secrets
import textwrap
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.integrations.sandbox.environment import Sandbox, limit_reason
from fairtrial.integrations.sandbox.settings import ExecResult
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import Score

type ChosenBlock = Literal["first", "last", "all"]

_FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^\n`]*)$")
_ALIASES = {"python": {"python", "python3", "py", "py3"}, "javascript": {"javascript", "js", "node"}}
_MAX_REASON = 500

# Both files in one module that is not __main__: `if __name__ == "__main__":` in an answer must not run. The status says
# that the tests were reached and passed, which `sys.exit(0)` in an answer does not.
_HARNESS = """\
import os, sys, types
module = types.ModuleType("solution")
sys.modules["solution"] = module
for name in {files!r}:
    with open(name, encoding="utf-8") as file:
        code = compile(file.read(), name, "exec")
    exec(code, module.__dict__)
sys.stdout.flush()
os._exit({status})
"""


def extract_code(text: str, language: str = "python", *, block: ChosenBlock = "first") -> str:
    """Return the code of a Markdown answer.

    Fenced blocks of the language are preferred to blocks of no language, and these to the whole text. A block that is
    not closed, as in an answer that was cut off, reaches to the end.

    Args:
        text: The answer.
        language: The language after the fence, such as "python".
        block: Which of several blocks: the first, the last, or all of them, joined.
    """
    blocks = _fenced_blocks(text)
    names = _ALIASES.get(language, {language})
    chosen = [code for info, code in blocks if info in names] or [code for info, code in blocks if not info]
    if not chosen:
        return text
    return "\n".join(chosen) if block == "all" else chosen[0 if block == "first" else -1]


def _fenced_blocks(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, list[str]]] = []
    opened = ""
    for line in text.split("\n"):
        match = _FENCE.match(line.rstrip("\r"))
        if not opened and match is not None:
            opened = match["fence"]
            words = match["info"].lower().split()
            found.append((words[0].strip("{}.") if words else "", []))
        elif match is not None and match["fence"].startswith(opened) and not match["info"].strip():
            opened = ""
        elif opened:
            found[-1][1].append(line)
    return [(info, textwrap.dedent("\n".join(lines)) + "\n") for info, lines in found]


def runs_tests(
    *,
    sandbox: Callable[[], Sandbox] = Sandbox,
    timeout: float = 10.0,
    prepare: Callable[[str, Sample[Any, str]], str] | None = None,
    language: str = "python",
    block: ChosenBlock = "first",
    files: tuple[str, str] = ("solution.py", "tests.py"),
    command: Sequence[str] | None = None,
) -> Callable[[str, Sample[Any, str]], Awaitable[Score]]:
    """Passes if the code in an answer passes the tests, which are the expected value of the sample.

    Both run in a new sandbox, in one Python process: tests use the names that the code defines. An answer that is not
    tested to the end fails, also if it ends the process itself. If no sandbox can be made, that is an error of the
    evaluation, never a failed test. With `repeats`, reports have pass@k.

    The code runs in the process of its tests: a model that is after the score rather than the solution can pass them
    without solving anything. Read the answers that pass.

    Args:
        sandbox: Makes the sandbox: `Sandbox`, or a function that returns one with other settings.
        timeout: Seconds for code and tests together.
        prepare: Returns the program from the extracted code and the sample, for prompts that ask for a continuation.
        language: The language of the fenced blocks; see `extract_code`.
        block: Which of several blocks; see `extract_code`.
        files: The names of the files into which code and tests are written.
        command: What to run instead of Python with both files; it passes with exit status 0.
    """
    if timeout <= 0:
        raise ConfigurationError(f"timeout must be positive (got {timeout})")

    @evaluator(name="runs_tests")
    async def score_code(output: str, sample: Sample[Any, str]) -> Score:
        expected = sample.expected
        texts: tuple[object, object] = (output, expected)
        if expected is None or not all(isinstance(text, str) for text in texts):
            kinds = " and ".join(type(text).__name__ for text in texts)
            raise TypeError(f"runs_tests needs the answer and the tests, the expected value, as text (got {kinds})")
        code = extract_code(output, language, block=block)
        if prepare is not None:
            code = prepare(code, sample)
        passing = 0 if command is not None else 64 + secrets.randbelow(48)
        async with sandbox() as box:
            await box.write_file(files[0], code)
            await box.write_file(files[1], expected)
            program = command or ["python3", "-c", _HARNESS.format(files=files, status=passing)]
            result = await box.exec(program, timeout=timeout)
            passed = result.limit is None and result.returncode == passing
            return Score(1.0 if passed else 0.0, passed, "" if passed else _reason(result, box, timeout))

    return score_code


def _reason(result: ExecResult, box: Sandbox, timeout: float) -> str:
    if result.limit is not None:
        return limit_reason(result.limit, box.settings.limits, timeout)
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    if result.returncode == 0:
        return "the code ended the process before its tests had ended"
    status = f"exit status {result.returncode}"
    return f"{status}: {lines[-1][:_MAX_REASON]}" if lines else status
