"""Runs of many nights in a few seconds, with a fake model that gets worse, and no key.

python examples/nightly.py 12        twelve nights of the suites `support` and `support-anchors`
python examples/nightly.py 4         four more nights; from the 13th on, the provider answers with another model
fairtrial watch alarm support --reference 500 --anchors support-anchors
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from unittest.mock import patch

from fairtrial import Dataset, EvalSuite, Sample, Score, open_store, task
from fairtrial.data.session import ChatMessage
from fairtrial.models import MarkdownSection, PromptTemplate, ScriptedAdapter, prompt_task

FIRST = datetime(2026, 11, 1, 3, tzinfo=UTC).timestamp()
NIGHT, CHANGED = 86_400, 12
QUESTION = PromptTemplate[str](name="support", sections=[MarkdownSection("Question", "$question", "question")])
QUESTIONS = [f"Ticket {number}: how do I return order {number * 7919}?" for number in range(100)]


def chance(*parts: object) -> float:
    """Return a number from 0 to 1 that is always the same for these parts."""
    return random.Random(" ".join(map(str, parts))).random()


def support(night: int) -> EvalSuite:
    """Return the suite as it runs on a night: the model answers 92% of questions, the one that follows it 74%."""
    name, rate = ("helper-1", 0.92) if night < CHANGED else ("helper-2", 0.74)

    def reply(messages: Sequence[ChatMessage]) -> str:
        helps = chance((time.time() - FIRST) // NIGHT, messages[-1].text) < rate
        return "Use the label in the box." if helps else "I do not know."

    samples: list[Sample[str, None]] = [Sample(f"t{number}", text) for number, text in enumerate(QUESTIONS)]
    return EvalSuite(
        "support", Dataset(samples, name="tickets"), prompt_task(QUESTION, ScriptedAdapter(reply, model=name)), helpful
    )


def helpful(output: str) -> Score:
    """Judge an answer. A real judge asks a model, which changes too."""
    return Score(float("label" in output), reason="" if "label" in output else "it does not say what to do")


@task(inline=True)
def recorded(answer: str) -> str:
    """Return an answer that people have labelled, so that only the judge is asked."""
    return answer


ANSWERS = {"Use the label in the box.": True, "Send it with the label inside.": True, "I do not know.": False}
anchors = EvalSuite(
    "support-anchors",
    Dataset(
        [
            Sample(f"a{number}", f"{answer} (ticket {number})", None, {"anchor": good})
            for number, (answer, good) in enumerate(list(ANSWERS.items()) * 10)
        ],
        name="anchors",
    ),
    recorded,
    helpful,
)


def main(nights: int) -> None:
    """Run the next nights."""
    store = open_store(".fairtrial/runs.db")
    done = len(store.runs(suite="support"))
    for night in range(done, done + nights):
        with patch("time.time", lambda night=night: FIRST + night * NIGHT):  # Instead of a scheduler.
            for suite in (support(night), anchors):
                suite.run_sync(store=store, resume="never")
    print(f"{nights} nights, {len(store.runs(suite='support'))} in all")


if __name__ == "__main__":
    main(int(sys.argv[1]))
