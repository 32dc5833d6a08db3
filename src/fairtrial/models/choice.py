"""Multiple-choice questions as a task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fairtrial.base.frozen import EMPTY
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.scoring.choice import ChoiceQuestion, ChoicesShown
from fairtrial.trials.context import TrialContext
from fairtrial.trials.task import WITH_ADAPTER, task


def choice_task(
    adapter: ProviderAdapter, *, shuffle: bool = True, params: Mapping[str, Any] = EMPTY
) -> Callable[[ChoiceQuestion, TrialContext], Awaitable[str]]:
    """Create a task that puts a `ChoiceQuestion` to a model and returns its reply; score it with `multiple_choice`.

    Args:
        adapter: The model.
        shuffle: Present the choices in an order drawn from the seed of the trial: another one for every sample and
            repeat, the same in every experiment.
        params: Sampling parameters of the call.
    """

    async def answer_choice(input: ChoiceQuestion, ctx: TrialContext) -> str:
        shown = input.shuffle(ctx.seed) if shuffle else input
        ctx.session.record(ChoicesShown(shown.choices))
        asked = ChatMessage("user", shown.prompt())
        ctx.session.record(asked)
        completion = await adapter.complete([asked], params=params, session=ctx.session, prompt_name="choice")
        ctx.session.record(completion.message)
        return completion.text

    setattr(answer_choice, WITH_ADAPTER, lambda other: choice_task(other, shuffle=shuffle, params=params))
    answer_choice.adapter = adapter  # type: ignore[attr-defined]  # Read by `runs.costs` to look up the price.
    return task(name="choice")(answer_choice)
