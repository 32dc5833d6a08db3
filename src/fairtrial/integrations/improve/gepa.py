"""GEPA as an optimizer: reflection on failures, and a Pareto front over the validation split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.data.sample import Sample
from fairtrial.errors import MissingExtraError, ModelError
from fairtrial.integrations.improve.searching import Evaluated, Searching
from fairtrial.reports.render.safe_text import lines, session_lines
from fairtrial.scoring.evaluator import as_text

_IDLE = 50
"""Iterations without an evaluation or a question, after which nothing new is expected."""
_LONGEST = 4_000
"""Characters of a text in a question to the model."""


def gepa(search: Searching) -> None:
    """Search with the `gepa` package until the budget is used up."""
    try:
        from gepa.api import optimize
        from gepa.core.adapter import EvaluationBatch
    except ImportError:
        raise MissingExtraError("--optimizer gepa", "gepa") from None
    adapter: Any = _Adapter(search, EvaluationBatch)  # GEPA's protocols name their arguments.
    idle: Any = _Idle(search)

    def reflect(prompt: str | Sequence[Mapping[str, Any]]) -> str:
        question = prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)
        try:
            return search.ask(question)
        except ModelError:
            raise  # GEPA continues with another minibatch.
        except Exception as error:
            raise _FailedError(error) from error

    try:
        optimize(
            seed_candidate={search.parameter: search.baseline},
            trainset=list(search.train),
            valset=list(search.validation),
            adapter=adapter,
            reflection_lm=reflect,
            stop_callbacks=idle,
            logger=_Silent(),
            seed=search.seed,
            track_best_outputs=False,
        )
    except _FailedError as failed:
        raise failed.error from None


class _FailedError(BaseException):
    """An error on its way out of GEPA, which goes on after every other that is raised while it reflects."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Adapter:
    """What GEPA asks for. Errors of ours end the search: GEPA would take them for a candidate that is worth nothing."""

    propose_new_texts = None

    def __init__(self, search: Searching, batch_type: Any) -> None:
        self._search, self._batch_type = search, batch_type
        self._parent = search.baseline

    def evaluate(
        self, batch: Sequence[Sample[Any, Any]], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> Any:
        text = candidate[self._search.parameter]
        found = self._search.evaluate(text, batch, () if text == self._search.baseline else (self._parent,))
        return self._batch_type(outputs=found, scores=_scores(found), trajectories=found if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: Any, components_to_update: Sequence[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        self._parent = candidate[self._search.parameter]
        records = [reflection_record(one) for one in eval_batch.trajectories]
        return {name: records for name in components_to_update}  # noqa: C420 - GEPA only reads them


def _scores(found: Sequence[Evaluated]) -> list[float]:
    """Return a number for each sample, as GEPA needs: in place of a missing score, the mean of the others.

    GEPA takes sums and means, and the sample is left out of both so. A candidate without any score is never accepted.
    """
    scores = [one.score for one in found if one.score is not None]
    mean = sum(scores) / len(scores) if scores else float("-inf")
    return [mean if one.score is None else one.score for one in found]


def reflection_record(one: Evaluated) -> dict[str, Any]:
    """Return what a model should know of a sample to write a better text: input, outputs, reasons and transcript."""
    trials = []
    for result in one.results:
        score = result.score
        if score is None:
            feedback = f"The trial ended in an error, which is no score: {result.error}"
        else:
            feedback = f"Score {score.value:g}, {'passed' if score.passed else 'failed'}. {score.reason or ''}".strip()
            if not score.passed and one.sample.expected is not None:
                feedback += f" Expected: {as_text(one.sample.expected)}"
        trial = {"Generated Outputs": _shown(result.output), "Feedback": lines(feedback, limit=_LONGEST)}
        steps = [f"{label}: {text}" for _, label, text, _ in session_lines(result)]
        trials.append(trial | ({"Transcript": lines("\n".join(steps), limit=_LONGEST)} if steps else {}))
    first, *more = trials or [{}]
    return {"Inputs": _shown(one.sample.input), **first, **({"Other Trials": more} if more else {})}


def _shown(value: Any) -> str:
    return lines(as_text(value), limit=_LONGEST)


class _Idle:
    """Stops GEPA when it only repeats what is known: minibatches that are perfect, or texts that were evaluated."""

    def __init__(self, search: Searching) -> None:
        self._search = search
        self._work, self._idle = search.work, 0

    def __call__(self, state: Any) -> bool:
        self._idle = 0 if self._search.work > self._work else self._idle + 1
        self._work = self._search.work
        return self._idle > _IDLE


class _Silent:
    def log(self, message: str) -> None:
        """Log nothing: every evaluation is announced."""
