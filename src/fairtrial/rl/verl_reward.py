"""Evaluators as verl's custom reward function."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.rl.conversation import metrics_of
from fairtrial.rl.reward import RewardFunction, reward
from fairtrial.suites.suite import EvalSuite

_log = logging.getLogger("fairtrial.rl")


def verl_reward(suite: EvalSuite, *, metrics: Sequence[str] = (), on_error: float | None = None) -> VerlReward:
    """Return the evaluator of a suite as the function that verl's `reward.custom_reward_function` names.

    Train on a file of `write_prompts(suite, "train.jsonl", "verl")`. Assign the result to a variable of the file whose
    path verl gets: `compute_score = rl.verl_reward(suite)`.

    Args:
        suite: The suite, a variable of a module.
        metrics: The metrics of the score to report, too; verl wants the same ones from every answer, so a score without
            one of them reports NaN.
        on_error: The reward of an answer that could not be scored. verl has no "unknown", so by default the error is
            raised, which ends the training step.
    """
    return VerlReward(reward(suite, name="compute_score"), tuple(metrics), on_error)


class VerlReward:
    """A reward function of verl; made by `verl_reward`. It is synchronous, as verl's remote reward manager needs it."""

    def __init__(self, function: RewardFunction, metrics: tuple[str, ...], on_error: float | None) -> None:
        if "score" in metrics:
            raise ConfigurationError('metrics must not have the name "score", under which verl reads the reward')
        self.__name__ = "compute_score"
        self._function = function
        self._metrics = metrics
        self._on_error = on_error

    def __reduce__(self) -> tuple[Any, ...]:
        return VerlReward, (self._function, self._metrics, self._on_error)

    def __call__(
        self,
        data_source: str = "",
        solution_str: str = "",
        ground_truth: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        **ignored: Any,
    ) -> dict[str, float]:
        """Score one answer; `score` is the reward."""
        if not extra_info or not (extra_info.get("sample") or extra_info.get("sample_id")):
            raise ConfigurationError(
                "extra_info must have sample or sample_id (it has neither)\n"
                'write the training file with fairtrial.rl.write_prompts(suite, "train.jsonl", "verl")'
            )
        try:
            score = self._function.score(extra_info, solution_str)
        except ConfigurationError:
            raise
        except Exception as error:
            if self._on_error is None:
                raise
            _log.warning("an answer has the reward %g, because it could not be scored: %r", self._on_error, error)
            return {"score": self._on_error, **dict.fromkeys(self._metrics, math.nan)}
        known = metrics_of(score)
        return {"score": score.reward, **{name: known.get(name, math.nan) for name in self._metrics}}
