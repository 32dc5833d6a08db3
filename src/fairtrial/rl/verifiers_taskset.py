"""Suites as tasksets of verifiers, and so of prime-rl."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from anyio import to_thread

from fairtrial.base.codec import dumps
from fairtrial.rl.chat import ChatRow
from fairtrial.rl.prompts import prompt_maker
from fairtrial.rl.reward import reward, sample_text
from fairtrial.scoring.score import Score
from fairtrial.suites.suite import EvalSuite


def verifiers_taskset(suite: EvalSuite) -> Any:
    """Return a `Taskset` class of verifiers with the samples of a suite, scored by its evaluator.

    The package of a verifiers environment is three lines:

        from fairtrial import rl
        from my_evals import suite
        Words = rl.verifiers_taskset(suite); __all__ = ["Words"]

    Weighted metrics become rewards with weights that sum to 1, so that the reward of verifiers is that of the score;
    the others become metrics.

    Args:
        suite: The suite, a variable of a module.
    """
    import verifiers.v1 as vf

    function = reward(suite)
    prompt_of = prompt_maker(suite)

    class VerifiersData(vf.TaskData):  # type: ignore[misc]  # its types are not known here
        """The row of a sample."""

        sample_id: str
        sample: str

    class VerifiersTask(vf.Task[VerifiersData]):  # type: ignore[misc]
        """One sample."""

        @property
        def key(self) -> str:
            """The id of the sample."""
            return str(self.data.sample_id)

        async def score(self, trace: Any, runtime: Any = None) -> None:
            """Score the conversation of a rollout."""
            prompt, completion = split_trace([_row(message) for message in trace.messages])
            row = {"sample": self.data.sample}
            # In a thread, because an evaluator may block.
            score = await to_thread.run_sync(partial(function.score, row, completion, prompt))
            for name, value, weight in weighted_metrics(score):
                if weight > 0:
                    trace.record_reward(name, value, weight)
                else:
                    trace.record_metric(name, value)

    class VerifiersTaskset(vf.Taskset[VerifiersTask, vf.TasksetConfig]):  # type: ignore[misc]
        """The samples of the suite."""

        def load(self) -> Iterable[Any]:
            """Yield the samples as tasks."""
            for sample in suite.dataset:
                system, said = split_system(prompt_of(sample))
                yield VerifiersTask(
                    VerifiersData(
                        prompt=said,
                        system_prompt=system,
                        id=sample.id,
                        sample_id=sample.id,
                        sample=dumps(sample_text(sample)),
                    ),
                    self.config.task,
                )

    for made in (VerifiersData, VerifiersTask, VerifiersTaskset):
        made.__qualname__ = made.__name__
    return VerifiersTaskset


def weighted_metrics(score: Score) -> list[tuple[str, float, float]]:
    """Return the metrics of a score with weights that sum to 1; the reward itself, if none has a weight."""
    total = sum(metric.weight for metric in score.metrics)
    found = [(metric.name, float(metric.value), metric.weight / total if total else 0.0) for metric in score.metrics]
    return found if total else [("reward", score.reward, 1.0), *found]


def split_system(chat: list[ChatRow]) -> tuple[str | None, Any]:
    """Return the system message of a prompt and the rest; one message of the user is returned as text."""
    system = chat[0]["content"] if chat and chat[0]["role"] == "system" else None
    rest = chat[1:] if system is not None else chat
    return system, rest[0]["content"] if len(rest) == 1 and rest[0]["role"] == "user" else rest


def split_trace(chat: list[ChatRow]) -> tuple[list[ChatRow], list[ChatRow]]:
    """Return the messages before the first of the assistant, and the rest."""
    first = next((place for place, row in enumerate(chat) if row["role"] == "assistant"), len(chat))
    return chat[:first], chat[first:]


def _row(message: Any) -> ChatRow:
    content = message.content
    if not isinstance(content, str):
        content = "".join(getattr(part, "text", None) or "" for part in content or ())
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in getattr(message, "tool_calls", None) or ()
    ]
    row: ChatRow = {"role": message.role, "content": content, "tool_calls": calls}
    name = getattr(message, "tool_call_id", None)
    return {**row, "tool_call_id": name} if name else row
