"""The tokens of model calls, recorded for training: ids and log-probabilities as the engine sampled them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairtrial.base.codec import to_json
from fairtrial.base.codec.encode import SPARSE
from fairtrial.base.frozen import EMPTY
from fairtrial.data.session.session import Session
from fairtrial.data.session.views import RecordedView

POLICY = "task"
"""The actor whose tokens are trained. A simulated user, for example, has another one."""
_CLAMPED = -9999.0  # What vLLM reports for a log-probability that it does not have.


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """The tokens of one model call. `prompt_ids` has only what follows the first `prefix` tokens.

    Those are equal to the prompt and completion of the actor's previous call, so a conversation of many turns is stored
    once.

    Attributes:
        prefix: The number of leading tokens of the prompt that equal those of the previous call.
        prompt_ids: The rest of the prompt.
        completion_ids: The sampled tokens.
        logprobs: Their log-probabilities under the policy that sampled them.
        sampling: The sampling parameters of the call.
        actor: Who made the call; only the tokens of "task" are trained.
        model: The model that answered.
    """

    prefix: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling: Mapping[str, Any] = EMPTY
    actor: str = field(default=POLICY, metadata=SPARSE)
    model: str = field(default="", metadata=SPARSE)


@dataclass(frozen=True, slots=True)
class TokensMissing:
    """The tokens of one model call were requested and cannot be trained on; `reason` says why."""

    reason: str


class TokenCall(NamedTuple):
    """One model call with its whole prompt."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    actor: str = POLICY
    model: str = ""
    sampling: Mapping[str, Any] = EMPTY


def record_tokens(
    session: Session,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    logprobs: Sequence[float],
    sampling: Mapping[str, Any] = EMPTY,
    *,
    actor: str = POLICY,
    model: str = "",
) -> None:
    """Record the tokens of a model call.

    Raises:
        ValueError: they cannot be trained on: ids that are no whole numbers, a log-probability that is missing, above
            0, not finite or clamped.
    """
    check_tokens(prompt_ids, completion_ids, logprobs)
    held: list[int] = []
    for event in session.view(attempt=session.attempt)[TokensSampled].all():
        if event.actor == actor:
            _append(held, event)
    prompt = tuple(prompt_ids)
    prefix = next(
        (at for at, (one, other) in enumerate(zip(held, prompt, strict=False)) if one != other),
        min(len(held), len(prompt)),
    )
    session.record(
        TokensSampled(prefix, prompt[prefix:], tuple(completion_ids), tuple(logprobs), sampling, actor, model),
        actor=actor,
    )


def check_tokens(prompt_ids: Sequence[Any], completion_ids: Sequence[Any], logprobs: Sequence[Any]) -> None:
    """Raise a ValueError for tokens that cannot be trained on."""
    for what, ids in (("prompt", prompt_ids), ("completion", completion_ids)):
        wrong = next((one for one in ids if type(one) is not int or one < 0), None)
        if wrong is not None:
            raise ValueError(f"the ids of the {what} must be whole numbers of at least 0 (got {wrong!r})")
    if len(logprobs) != len(completion_ids):
        raise ValueError(f"there must be a log-probability for each of {len(completion_ids)} ids (got {len(logprobs)})")
    for value in logprobs:
        known = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
        if not known or value > 0 or value <= _CLAMPED:
            raise ValueError(f"a log-probability must be a finite number of at most 0 (got {value!r})")


def token_calls(view: RecordedView) -> list[TokenCall]:
    """Return the model calls of a session whose tokens were recorded, with their whole prompts."""
    calls: list[TokenCall] = []
    by_actor: dict[str, list[int]] = {}
    for event in view[TokensSampled].all():
        held = by_actor.setdefault(event.actor, [])
        _append(held, event)
        sampled = tuple(event.completion_ids)
        prompt = tuple(held[: len(held) - len(sampled)])
        calls.append(
            TokenCall(prompt, sampled, tuple(event.logprobs), event.actor, event.model, to_json(event.sampling))
        )
    return calls


def _append(held: list[int], event: TokensSampled) -> None:
    """Change the tokens of one call into those of the next."""
    del held[event.prefix :]
    held += event.prompt_ids
    held += event.completion_ids
