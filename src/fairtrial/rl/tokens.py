"""Token rows: the calls of a conversation joined into training samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fairtrial.base.frozen import EMPTY
from fairtrial.data.session.tokens import POLICY, TokenCall


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training sample of tokens.

    Attributes:
        prompt_ids: The tokens before the first sampled one.
        completion_ids: All tokens after them: those sampled by the policy, and those of tools and users in between.
        mask: 1 for each token of the completion that the policy sampled, 0 for the others.
        logprobs: The log-probability of each sampled token, 0 for the others.
        actor: Who made the calls: "task", because only the policy is trained.
        model: The model that sampled the tokens.
        sampling: The sampling parameters of the calls.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    actor: str = POLICY
    model: str = ""
    sampling: Mapping[str, Any] = EMPTY


def stitch(calls: Iterable[TokenCall]) -> list[TokenRow]:
    """Join the calls of a conversation into as few rows as possible.

    A call extends the row if its prompt begins with all tokens of it and it was sampled in the same way; otherwise, if
    the engine tokenized the conversation differently or it was shortened, it starts a new row. No sampled token is
    changed or lost.
    """
    open_rows: list[_OpenRow] = []
    for call in calls:
        if not open_rows or not open_rows[-1].continues(call):
            open_rows.append(_OpenRow(call))
        open_rows[-1].add(call)
    return [row.close() for row in open_rows]


class _OpenRow:
    """A row that may still grow."""

    def __init__(self, call: TokenCall) -> None:
        self._origin = _origin(call)
        self._prompt = len(call.prompt_ids)
        self._tokens = list(call.prompt_ids)
        self._mask: list[int] = []
        self._logprobs: list[float] = []

    def continues(self, call: TokenCall) -> bool:
        """Return whether a call was sampled as this row was, and its prompt begins with all tokens of it."""
        return _origin(call) == self._origin and list(call.prompt_ids[: len(self._tokens)]) == self._tokens

    def add(self, call: TokenCall) -> None:
        between = call.prompt_ids[len(self._tokens) :]
        self._tokens += (*between, *call.completion_ids)
        self._mask += (*(0,) * len(between), *(1,) * len(call.completion_ids))
        self._logprobs += (*(0.0,) * len(between), *call.logprobs)

    def close(self) -> TokenRow:
        tokens = self._tokens
        prompt, completion = tuple(tokens[: self._prompt]), tuple(tokens[self._prompt :])
        return TokenRow(prompt, completion, tuple(self._mask), tuple(self._logprobs), *self._origin)


def _origin(call: TokenCall) -> tuple[str, str, Mapping[str, Any]]:
    return call.actor, call.model, call.sampling
