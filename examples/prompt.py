"""A prompt with typed parameters and a typed answer, with two variants side by side.

python examples/prompt.py                       # against a model server started for the occasion
OPENAI_API_KEY=... python examples/prompt.py --model gpt-4o-mini
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from fairtrial import Dataset, EvalReport, Experiment, Sample, Score, evaluate_sync
from fairtrial.integrations.model_server import ModelServer, Reply, Rule
from fairtrial.models import MarkdownSection, OpenAIAdapter, PromptTemplate, ProviderAdapter, prompt_task


@dataclass(frozen=True, slots=True)
class Ticket:
    """What goes into the prompt, beside the experiment's style."""

    text: str


@dataclass(frozen=True, slots=True)
class Triage:
    """What comes out; the reason comes first, so that it is thought of first."""

    reason: str
    urgent: bool


TRIAGE = PromptTemplate[Triage](
    ns="support",
    key="triage",
    sections=[
        MarkdownSection("", "You sort support tickets. Be $style.", "system", role="system"),
        MarkdownSection("Ticket", "$text", "ticket"),
        MarkdownSection("Task", "Is this ticket urgent? Say why, then decide.", "task"),
    ],
)
TICKETS = Dataset(
    [
        Sample("outage", Ticket("Nobody can log in since this morning!"), True),
        Sample("colour", Ticket("Could the button be blue?"), False),
    ],
    name="tickets",
)


def decided_right(output: Triage, expected: bool) -> Score:
    """Passes if the decision is the expected one."""
    return Score(1.0 if output.urgent == expected else 0.0, reason=output.reason)


def run(adapter: ProviderAdapter) -> EvalReport:
    styles = [Experiment(style, params={"style": style}) for style in ("brief", "thorough")]
    return evaluate_sync(TICKETS, prompt_task(TRIAGE, adapter), decided_right, experiments=styles)


def main(model: str | None = None) -> EvalReport:
    if model is not None:
        return run(OpenAIAdapter(model=model))
    rules = [
        Rule("log in", Reply(output={"reason": "People cannot work.", "urgent": True})),
        Rule("blue", Reply(output={"reason": "A matter of taste.", "urgent": False})),
    ]
    with ModelServer(rules) as server:
        return run(OpenAIAdapter(model="test-model", base_url=server.base_url + "/v1", api_key="none"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    print(main(parser.parse_args().model))
