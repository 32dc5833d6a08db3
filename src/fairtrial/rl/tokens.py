"""Token rows: the calls of a conversation joined into training samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fairtrial.session.tokens import TokenCall


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training sample of tokens.

    Attributes:
        prompt_ids: The tokens before the first sampled one.
        completion_ids: All tokens after them: those sampled by the policy, and those of tools and users in between.
        mask: 1 for each token of the completion that the policy sampled, 0 for the others.
        logprobs: The log-probability of each sampled token, 0 for the others.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]


def stitch(calls: Iterable[TokenCall]) -> list[TokenRow]:
    """Join the calls of a conversation into as few rows as possible.

    A call extends the row if its prompt begins with all tokens of it; otherwise, if the engine tokenized the
    conversation differently or it was shortened, it starts a new row. No sampled token is changed or lost.
    """
    rows: list[TokenRow] = []
    held: tuple[int, ...] = ()
    for call in calls:
        sampled = (1,) * len(call.completion_ids)
        if rows and call.prompt_ids[: len(held)] == held:
            row, between = rows[-1], call.prompt_ids[len(held) :]
            rows[-1] = TokenRow(
                row.prompt_ids,
                (*row.completion_ids, *between, *call.completion_ids),
                (*row.mask, *(0,) * len(between), *sampled),
                (*row.logprobs, *(0.0,) * len(between), *call.logprobs),
            )
        else:
            rows.append(TokenRow(call.prompt_ids, call.completion_ids, sampled, call.logprobs))
        held = (*call.prompt_ids, *call.completion_ids)
    return rows
