"""Two searches for a better prompt, with a fake model and no key: one finds nothing, and one a real gain.

fairtrial improve examples/improve.py:nothing --parameter prompt --max-cost 1.60
fairtrial improve examples/improve.py:units --parameter prompt --max-cost 0.80

The model of the first passes 70% of questions, whatever the prompt says: the best of many candidates looks better by
chance. That of the second forgets the unit unless the prompt asks for it, as the reasons of failures say.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, Score
from fairtrial.data.session import ChatMessage, TokenUsage
from fairtrial.models import MarkdownSection, PromptTemplate, ScriptedAdapter, prompt_task

TOWNS = ("Aarhus", "Bergen", "Chania", "Dundee", "Evora", "Fulda", "Ghent", "Huelva", "Izmir", "Jena")
QUESTION = PromptTemplate[str](
    name="distance",
    sections=[
        MarkdownSection("", "$prompt", "system", role="system"),
        MarkdownSection("Question", "$question", "question"),
    ],
)
TONES = ("calm", "brief", "careful", "friendly", "exact", "patient", "formal", "warm", "plain", "quick")


def chance(*parts: str) -> float:
    """Return a number from 0 to 1 that is always the same for these texts."""
    return random.Random(" ".join(parts)).random()


def forgetful(messages: Sequence[ChatMessage]) -> str:
    """Know the distance, and forget its unit in 45% of replies unless the prompt asks for it."""
    prompt, question = messages[0].text, messages[-1].text
    names_unit = "unit" in prompt or chance(prompt, question) < 0.55
    return f"{distance(question)} km" if names_unit and chance(question) < 0.95 else distance(question)


def indifferent(messages: Sequence[ChatMessage]) -> str:
    """Answer 70% of questions, whatever the prompt says."""
    prompt, question = messages[0].text, messages[-1].text
    return f"{distance(question)} km" if chance("leaf", prompt, question) < 0.7 else "I do not know."


def distance(question: str) -> str:
    """Return the answer of a fake atlas."""
    return str(round(100 + 900 * chance(question.partition("How far")[2])))


def propose(messages: Sequence[ChatMessage]) -> str:
    """Propose a prompt: one that asks for the unit if failures say so, else one in another tone."""
    question = messages[-1].text
    if "the unit is missing" in question:
        return "```\nAnswer the question. Name the unit.\n```"
    first, second = random.Random(question).sample(TONES, 2)
    return f"```\nAnswer the question. Be {first} and {second}.\n```"


def names_distance(output: str, expected: str) -> Score:
    """Pass for the distance with its unit."""
    missing = output == expected.removesuffix(" km")
    return Score(float(output == expected), reason="the unit is missing" if missing else "")


def questions() -> Dataset[str, str]:
    """Return 250 questions."""
    texts = [
        f"{random.Random(n).randbytes(24).hex()}: How far is it from {TOWNS[n % 10]} to place {n}?" for n in range(250)
    ]
    samples = [Sample(f"q{n:03}", text, f"{distance(text)} km") for n, text in enumerate(texts)]
    return Dataset(samples, name="distances")


COST = TokenUsage(120, 10, cost_usd=0.001)
PROPOSER = ScriptedAdapter(propose, usage=COST)
PLAIN = (Experiment("plain", {"prompt": "Answer the question."}),)


def suite(name: str, model: ScriptedAdapter) -> EvalSuite:
    """Return a suite whose prompt is a parameter of its experiment."""
    config = EvalConfig(max_concurrent=50)
    task = prompt_task(QUESTION, model)
    return EvalSuite(name, questions(), task, names_distance, experiments=PLAIN, adapter=PROPOSER, config=config)


nothing = suite("nothing", ScriptedAdapter(indifferent, usage=COST))
units = suite("units", ScriptedAdapter(forgetful, usage=COST))
