"""Equality of mathematical answers."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from fairtrial.errors import ConfigurationError, MissingExtraError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import SHARE, Metric, Score
from fairtrial.scoring.text import reference_text, text_of

_LONGEST = 100_000


def math_equal(*, decimals: int = 6) -> Callable[[object, object], Score]:
    """Passes if the output's final answer equals expected as mathematics: 1/2, 0.5 and \\\\frac{1}{2} are equal.

    The answer is found in a text: boxed, in LaTeX, or the last expression. The metric `extracted` is 0 if none was
    found. Computed by math-verify (extra `math`) in a child process, which the scoring timeout ends. Cobbe et al.
    (2021), GSM8K, arXiv:2110.14168; Hendrycks et al. (2021), MATH, arXiv:2103.03874.

    Args:
        decimals: The number of decimals to which floating-point numbers are compared.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtraError("math_equal", "math")
    if not 0 <= decimals <= 15:
        raise ConfigurationError(f"decimals of math_equal must be from 0 to 15 (got {decimals})")

    @evaluator(isolate=True, name="math_equal", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        import warnings

        text, wanted = text_of(output, "math_equal"), reference_text(expected, "math_equal")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarnings of generated parsers.
            from math_verify import parse, verify

            # It warns of every call without a time limit.
            logging.getLogger("math_verify").setLevel(logging.ERROR)

            # Its own time limits need signal.alarm, which works in the main thread only: ours ends the process.
            gold = parse(_as_latex(wanted), parsing_timeout=None)
            if not gold:
                raise ValueError(
                    f"the expected value of math_equal must be a number or an expression (got {expected!r})"
                )
            if len(text) > _LONGEST:
                raise ValueError(f"math_equal reads outputs of up to {_LONGEST:,} characters (got {len(text):,})")
            answer = parse(_as_latex(text), parsing_timeout=None)
            passed = bool(answer) and bool(verify(gold, answer, float_rounding=decimals, timeout_seconds=None))
        extracted = Metric("extracted", float(bool(answer)), higher_is_better=True, bounds=SHARE)
        if passed:
            return Score(1.0, True, "", [extracted])
        found = f"{str(answer[0])[:80]} is not equal to {str(gold[0])[:80]}" if answer else "no answer was found"
        return Score(0.0, False, found, [extracted])

    return score


def _as_latex(text: str) -> str:
    """Mark a line that is nothing but LaTeX as such: it is not recognised without its delimiters."""
    line = text.strip()
    bare = "\\" in line and not any(mark in line for mark in ("\n", "$", "\\boxed", "\\[", "\\("))
    return f"${line}$" if bare else text
