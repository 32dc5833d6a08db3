"""Evaluators of benchmarks: choices, short answers, mathematics, overlap with references."""

from __future__ import annotations

import importlib.util
import logging
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairtrial.base.frozen import first_is
from fairtrial.data.sample import Sample
from fairtrial.data.session.views import SessionView
from fairtrial.errors import ConfigurationError, MissingExtraError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import SHARE, Metric, Score
from fairtrial.scoring.text import output_text, reference_text

_LETTERS = string.ascii_uppercase
# Repetitions are bounded, so that a search stays linear in the length of the output.
_GAP = r"[\s*_`:$({\[\"']{0,12}"
_LETTER = r"(?:\\?(?:text|mathrm|mathbf)?\{)?([A-Za-z])(?![A-Za-z'’])"
_MARKED = re.compile(rf"(?i:answer){_GAP}(?i:is|=)?{_GAP}(?i:option|choice)?{_GAP}{_LETTER}")
_COLON = re.compile(rf"(?i:answer)[\s*_`]{{0,6}}[:=]{_GAP}(?i:option|choice)?{_GAP}{_LETTER}")
_BOXED = re.compile(rf"\\boxed\{{{_GAP}{_LETTER}")
_NAMED = re.compile(rf"(?i:correct|right|best)\s{{1,4}}(?i:option|choice)\s{{1,4}}(?i:is){_GAP}{_LETTER}")
_ALONE = re.compile(r"[\s*_`($\[\"']{0,8}([A-Z])[\s*_`)$\].:\"']{0,8}")
_LED = re.compile(r"[\s*_`]{0,8}(?:\(([A-Z])\)|([A-Z])[).:])[\s*_`]{1,8}\S")


@first_is(str)
@dataclass(frozen=True, slots=True)
class ChoiceQuestion:
    """A question with choices, in the order of the dataset. Use it as the input type of a dataset."""

    question: str
    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        choices = tuple(self.choices)
        object.__setattr__(self, "choices", choices)
        if not 2 <= len(choices) <= len(_LETTERS) or len(set(choices)) != len(choices):
            raise ValueError(f"choices must be 2 to {len(_LETTERS)} different texts (got {list(choices)!r})")

    def shuffle(self, seed: int) -> ChoiceQuestion:
        """Return the question with its choices in the order of a seed, such as `ctx.seed`."""
        return ChoiceQuestion(self.question, tuple(random.Random(seed).sample(self.choices, len(self.choices))))  # noqa: S311

    def prompt(self) -> str:
        """Return the question, the lettered choices and how to answer."""
        listed = "\n".join(f"{letter}) {choice}" for letter, choice in zip(_LETTERS, self.choices, strict=False))
        return (
            f"{self.question}\n\n{listed}\n\n"
            "Think first if you need to. The last line of your reply must be 'ANSWER: X', where X is the letter of the "
            "choice."
        )


@dataclass(frozen=True, slots=True)
class ChoicesShown:
    """The order in which the choices of a question were presented."""

    choices: tuple[str, ...]


def extract_choice(text: str, count: int = len(_LETTERS), choices: Sequence[str] = ()) -> str | None:
    """Return the letter that a reply chooses, or None if it names none.

    In this order: the last "ANSWER: X", the last boxed letter, the last "answer is X", a reply or last line that is a
    letter, a reply that begins with a lettered choice, and a reply that is the text of one choice. A letter inside a
    sentence is not taken: "A" and "I" are words.

    Args:
        text: The reply.
        count: The number of choices; other letters are not accepted.
        choices: The choices as presented, to recognise a reply that repeats one of them.
    """
    valid = _LETTERS[:count]
    for pattern in (_COLON, _BOXED, _MARKED, _NAMED):
        found = [letter.upper() for letter in pattern.findall(text) if _is_letter(letter, pattern)]
        if found:
            return found[-1] if found[-1] in valid else None
    lines = [line for line in text.strip().splitlines() if line.strip()]
    for part in (text, *lines[-1:]):
        alone = _ALONE.fullmatch(part)
        if alone is not None:
            return alone[1] if alone[1] in valid else None
    led = _LED.match(text)
    if led is not None:
        letter = led[1] or led[2]
        return letter if letter in valid else None
    answer = _plain(text)
    same = [letter for letter, choice in zip(valid, choices, strict=False) if answer and _plain(choice) == answer]
    return same[0] if len(same) == 1 else None


def _is_letter(letter: str, pattern: re.Pattern[str]) -> bool:
    """Without a colon or a box, a small letter is a word: "the answer is a matter of taste"."""
    return letter.isupper() or pattern in (_COLON, _BOXED)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .*_`\"'")


@evaluator(inline=True, needs_expected=True)
def multiple_choice(sample: Sample[Any, Any], output: object, session: SessionView) -> Score:
    """Passes if the reply chooses the right letter. The metric `extracted` is 0 if no letter was found.

    The expected value is a letter, the text of a choice, or its number from 0, in the order of the dataset. The order
    in which the choices were presented is that of the last `ChoicesShown` event, else that of the dataset. If the input
    is not a `ChoiceQuestion`, letters are compared as they are.

    Hendrycks et al. (2021), Measuring Massive Multitask Language Understanding, arXiv:2009.03300. Order matters: Zheng
    et al. (2024), Large Language Models Are Not Robust Multiple Choice Selectors, arXiv:2309.03882.
    """
    known = sample.input.choices if isinstance(sample.input, ChoiceQuestion) else ()
    shown = session[ChoicesShown].all()
    presented: Sequence[str] = shown[-1].choices if shown else known
    right = _right_letter(sample.expected, known or presented, presented)
    chosen = extract_choice(output_text(output, "multiple_choice"), len(presented) or len(_LETTERS), presented)
    passed = chosen == right
    reason = "" if passed else f"chose {chosen}, expected {right}" if chosen else f"no letter found, expected {right}"
    extracted = Metric("extracted", float(chosen is not None), higher_is_better=True, bounds=SHARE)
    return Score(float(passed), passed, reason, [extracted])


def _right_letter(expected: Any, choices: Sequence[str], presented: Sequence[str]) -> str:
    """Return the letter under which the right choice was presented."""
    if not choices:
        if isinstance(expected, str) and len(expected.strip()) == 1 and expected.strip().upper() in _LETTERS:
            return expected.strip().upper()
        raise TypeError(f"the expected value of multiple_choice must be a letter (got {expected!r})")
    place: int | None = None
    if isinstance(expected, int) and not isinstance(expected, bool):
        place = expected
    elif isinstance(expected, str):
        as_text = choices.index(expected) if expected in choices else None
        letter = expected.strip().upper()
        as_letter = _LETTERS.index(letter) if len(letter) == 1 and letter in _LETTERS[: len(choices)] else None
        if as_text is not None and as_letter is not None and as_text != as_letter:
            raise ValueError(f"expected {expected!r} is a letter and the text of another choice: use its number from 0")
        place = as_letter if as_text is None else as_text
    if place is None or not 0 <= place < len(choices) or choices[place] not in presented:
        raise TypeError(
            f"the expected value of multiple_choice must be a letter, the text of a choice or its number from 0 (got "
            f"{expected!r})"
        )
    return _LETTERS[presented.index(choices[place])]


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case a text and remove ASCII punctuation, English articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(output: str, reference: str) -> float:
    """Return the F1 of the normalised words of two texts. If one has no words, they must both have none."""
    tokens, wanted = normalize_answer(output).split(), normalize_answer(reference).split()
    if not tokens or not wanted:
        return float(tokens == wanted)
    common = (Counter(tokens) & Counter(wanted)).total()
    return 2 * common / (len(tokens) + len(wanted))


def squad(pass_at: float | None = None) -> Callable[[object, object], Score]:
    """The best token F1 over the references. Passes an exact match after normalisation, or an F1 of `pass_at`.

    The expected value is one text or several; an empty text, or none, means that the question has no answer. Metrics:
    `exact_match` and `f1`.

    Rajpurkar et al. (2016), SQuAD, arXiv:1606.05250; Rajpurkar et al. (2018), Know What You Don't Know,
    arXiv:1806.03822.
    """
    if pass_at is not None and not 0.0 < pass_at <= 1.0:
        raise ConfigurationError(f"pass_at of squad must be above 0 and at most 1 (got {pass_at})")

    @evaluator(inline=True, name="squad", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        references = _references(expected)
        answer = output_text(output, "squad")
        exact = any(normalize_answer(answer) == normalize_answer(reference) for reference in references)
        best = max(references, key=lambda reference: token_f1(answer, reference))
        f1 = token_f1(answer, best)
        passed = exact if pass_at is None else f1 >= pass_at
        metrics = [
            Metric("exact_match", float(exact), higher_is_better=True, bounds=SHARE),
            Metric("f1", f1, higher_is_better=True, bounds=SHARE),
        ]
        return Score(f1, passed, "" if exact else f"F1 {f1:.2f} with {best[:80]!r}", metrics)

    return score


def _references(expected: Any) -> list[str]:
    if isinstance(expected, str):
        return [expected]
    texts = list(expected) if isinstance(expected, Collection) and not isinstance(expected, bytes) else [expected]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"the expected value of squad must be a text or a list of texts (got {expected!r})")
    # An answer without words matches no output, unless it is the only one: then the question has no answer.
    return [text for text in texts if normalize_answer(text)] or [""]


type RougeKind = Literal["rouge1", "rouge2", "rouge3", "rouge4", "rougeL", "rougeLsum"]
_KINDS = ("rouge1", "rouge2", "rouge3", "rouge4", "rougeL", "rougeLsum")


def _check(name: str, package: str, pass_at: float) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(name, "text")
    if not 0.0 <= pass_at <= 1.0:
        raise ConfigurationError(f"pass_at of {name} must be from 0 to 1 (got {pass_at})")


def _reference_texts(name: str, expected: Any) -> list[str]:
    texts = [expected] if isinstance(expected, str) else list(expected) if isinstance(expected, Collection) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise TypeError(f"the expected value of {name} must be a text or a list of texts, not empty (got {expected!r})")
    return texts


def rouge(kind: RougeKind = "rougeL", *, pass_at: float = 0.5, stem: bool = False) -> Callable[[object, object], Score]:
    """The ROUGE F1 of the output with the best reference; metrics `precision` and `recall`.

    Computed by rouge-score (extra `text`). Lin (2004), ROUGE: A Package for Automatic Evaluation of Summaries.

    Args:
        kind: Common n-grams ("rouge1" to "rouge4") or the longest common subsequence ("rougeL", "rougeLsum").
        pass_at: The F1 from which it passes.
        stem: Compare the stems of English words.
    """
    _check("rouge", "rouge_score", pass_at)
    if kind not in _KINDS:
        raise ConfigurationError(f"the kind of rouge must be one of {', '.join(_KINDS)} (got {kind!r})")
    scorer: list[Any] = []  # Made on first use: its import takes long.

    @evaluator(name=kind, needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        if not scorer:
            from rouge_score.rouge_scorer import RougeScorer

            scorer.append(RougeScorer([kind], use_stemmer=stem))
        best = scorer[0].score_multi(_reference_texts("rouge", expected), output_text(output, "rouge"))[kind]
        metrics = [
            Metric("precision", best.precision, higher_is_better=True, bounds=SHARE),
            Metric("recall", best.recall, higher_is_better=True, bounds=SHARE),
        ]
        return Score(best.fmeasure, best.fmeasure >= pass_at, f"F1 {best.fmeasure:.3f}, needed {pass_at:g}", metrics)

    return score


def bleu(*, pass_at: float = 0.5) -> Callable[[object, object], Score]:
    """The sentence BLEU of the output with all references, from 0 to 1. A poor measure of a single text.

    BLEU was made for a corpus: over one sentence it depends on smoothing. Prefer `chrf`, or compare means of many
    samples. Computed by sacrebleu (extra `text`) with exponential smoothing and effective order. Papineni et al.
    (2002), BLEU; Post (2018), A Call for Clarity in Reporting BLEU Scores, arXiv:1804.08771.
    """
    _check("bleu", "sacrebleu", pass_at)

    @evaluator(name="bleu", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        from sacrebleu.metrics import BLEU  # type: ignore[attr-defined]

        found = BLEU(effective_order=True).sentence_score(
            output_text(output, "bleu"), _reference_texts("bleu", expected)
        )
        return _of_percent(found.score, pass_at)

    return score


def chrf(*, word_order: int = 0, pass_at: float = 0.5) -> Callable[[object, object], Score]:
    """The chrF of the output with the best reference, from 0 to 1: the F2 of character n-grams.

    Computed by sacrebleu (extra `text`). Popović (2015), chrF: character n-gram F-score for automatic MT evaluation.

    Args:
        word_order: 2 for chrF++, which counts word n-grams too.
        pass_at: The value from which it passes.
    """
    _check("chrf", "sacrebleu", pass_at)

    @evaluator(name="chrf", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        from sacrebleu.metrics import CHRF  # type: ignore[attr-defined]

        found = CHRF(word_order=word_order).sentence_score(
            output_text(output, "chrf"), _reference_texts("chrf", expected)
        )
        return _of_percent(found.score, pass_at)

    return score


def _of_percent(percent: float, pass_at: float) -> Score:
    value = min(max(percent / 100, 0.0), 1.0)
    return Score(value, value >= pass_at, f"{value:.3f}, needed {pass_at:g}")


_LONGEST = 100_000


def math_equal(*, decimals: int = 6) -> Callable[[object, object], Score]:
    """Passes if the output's final answer equals expected as mathematics: 1/2, 0.5 and \\\\frac{1}{2} are equal.

    The answer is found in a text: boxed, in LaTeX, or the last expression. The metric `extracted` is 0 if none was
    found. Computed by math-verify (extra `text`) in a child process, which the scoring timeout ends. Cobbe et al.
    (2021), GSM8K, arXiv:2110.14168; Hendrycks et al. (2021), MATH, arXiv:2103.03874.

    Args:
        decimals: The number of decimals to which floating-point numbers are compared.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtraError("math_equal", "text")
    if not 0 <= decimals <= 15:
        raise ConfigurationError(f"decimals of math_equal must be from 0 to 15 (got {decimals})")

    @evaluator(isolate=True, name="math_equal", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        import warnings

        text, wanted = output_text(output, "math_equal"), reference_text(expected, "math_equal")
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
