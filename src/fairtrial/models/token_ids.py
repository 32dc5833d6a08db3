"""Token ids and log-probabilities in replies of inference engines, as vLLM and SGLang write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairtrial.data.session.session import Session
from fairtrial.data.session.tokens import POLICY, TokensMissing, check_tokens, record_tokens

TOKEN_PARAMS: Mapping[str, Any] = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
"""The parameters of a chat completion that request them; old versions of vLLM need `top_logprobs`, too."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "max_completion_tokens",
)
# The values with which the policy itself is sampled, so that log-probabilities are its own.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
}


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one reply; `problem` says why they cannot be trained on."""

    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    problem: str | None = None

    def record(self, session: Session, params: Mapping[str, Any], *, actor: str, model: str) -> None:
        """Record the tokens in a session, or why the policy's are missing."""
        if self.problem is None:
            ids = (self.prompt_ids, self.completion_ids, self.logprobs)
            record_tokens(session, *ids, sampling(params), actor=actor, model=model)
        elif actor == POLICY:
            session.record(TokensMissing(self.problem))


def sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a call that decide how tokens are sampled."""
    return {name: params[name] for name in _SAMPLING if params.get(name) is not None}


def changed_sampling(params: Mapping[str, Any]) -> list[str]:
    """Return the parameters with which tokens are not sampled from the policy itself."""
    return [f"{name}={params[name]!r}" for name, neutral in _NEUTRAL.items() if params.get(name) not in neutral]


def read_tokens(tree: Mapping[str, Any], choice: Mapping[str, Any]) -> SampledTokens:
    """Return the tokens of a chat completion.

    vLLM writes `prompt_token_ids` beside the choices and `token_ids` into the choice; SGLang writes `prompt_token_ids`
    and `response_token_ids` into the choice.
    """
    prompt = _either(tree.get("prompt_token_ids"), choice.get("prompt_token_ids"))
    sampled = _either(choice.get("token_ids"), choice.get("response_token_ids"))
    if not isinstance(prompt, list) or not isinstance(sampled, list):
        missing = "prompt" if not isinstance(prompt, list) else "reply"
        return SampledTokens(problem=f"the server sent no token ids of the {missing}")
    entries = (choice.get("logprobs") or {}).get("content")
    if not isinstance(entries, list):
        return SampledTokens(problem="the server sent no log-probabilities")
    logprobs: list[Any] = [entry.get("logprob") if isinstance(entry, Mapping) else None for entry in entries]
    try:
        check_tokens(prompt, sampled, logprobs)
    except ValueError as error:
        return SampledTokens(problem=str(error))
    if not prompt or not sampled:
        return SampledTokens(problem=f"the server sent {len(prompt)} ids of the prompt and {len(sampled)} of the reply")
    return SampledTokens(prompt, sampled, logprobs)


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first
