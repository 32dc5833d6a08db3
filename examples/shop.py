"""A small shop: an agent with tools and rules talks to simulated customers, and the state of the shop is the result.

python examples/shop.py                          # against a model server started for the occasion
ANTHROPIC_API_KEY=... OPENAI_API_KEY=... python examples/shop.py --agent anthropic:claude-sonnet-4-5 \
    --user openai:gpt-5-mini --judge openai:gpt-5-mini

30 customers want an order cancelled, paid back or sent elsewhere. The rules forbid some of it, and then the right
result is that nothing changes, however much the customer asks. The fake models show what a report looks like: the agent
breaks a rule now and then, and a few customers make up an order number.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fairtrial import Dataset, EvalConfig, EvalReport, EvalSuite, Sample, Score, all_of
from fairtrial.integrations.model_server import ModelServer, ParsedRequest, Reply, ToolCallReply
from fairtrial.models import (
    OpenAIAdapter,
    ProviderAdapter,
    agent_task,
    conversation_task,
    model_from_name,
    simulated_user,
)
from fairtrial.models.judges import USER_QUESTIONS, user_check

RULES = """\
You are the assistant of a small shop. Ask for the customer's e-mail address first, then look at their orders.
- An order can be cancelled, or sent to another address, only while it is "packed".
- A delivered order is paid back only within 30 days.
- Tell customers what you have done. If a rule forbids it, tell them so, and change nothing."""

ITEMS = ("red lamp", "oak desk", "wool rug", "tea set", "wall clock", "garden chair")
NAMES = ("ann", "bo", "cora", "dan", "eva", "finn", "gia", "hal", "ida", "jon")
STREETS = ("Hill Road 5", "Mill Lane 2", "Park Row 9")


@dataclass
class Order:
    """An order of a customer. `days` have passed since it was delivered."""

    email: str
    item: str
    status: str
    days: int = 0
    address: str = "Main Street 1"


class Shop:
    """The database of one conversation, with the tools of the agent."""

    def __init__(self, orders: Mapping[str, Order]) -> None:
        self.orders = dict(orders)

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the tools of the agent."""
        return [self.find_orders, self.cancel, self.pay_back, self.send_to]

    def find_orders(self, email: str) -> dict[str, dict[str, Any]]:
        """The orders of a customer by their numbers."""
        return {number: asdict(order) for number, order in self.orders.items() if order.email == email}

    def cancel(self, order: str) -> str:
        """Cancel an order."""
        self.orders[order].status = "cancelled"
        return "cancelled"

    def pay_back(self, order: str) -> str:
        """Pay an order back."""
        self.orders[order].status = "paid back"
        return "paid back"

    def send_to(self, order: str, address: str) -> str:
        """Change the address of an order."""
        self.orders[order].address = address
        return "changed"


# What customers want, the state of their order, and what it must come to.
CASES: Sequence[tuple[str, str, int, Mapping[str, str]]] = (
    ("cancel my order of the {item}", "packed", 0, {"status": "cancelled"}),
    ("cancel my order of the {item}, since I have found a cheaper one", "sent", 0, {}),
    ("get my money back for the {item}, which is broken", "delivered", 12, {"status": "paid back"}),
    ("get my money back for the {item}, which I do not like", "delivered", 45, {}),
    ("have the {item} sent to {street}", "packed", 0, {"address": "{street}"}),
)


def customer(number: int) -> Sample[str, dict[str, Any]]:
    """Return a sample: what the customer wants, and the state of the order when all is done as it should be."""
    want, status, days, change = CASES[number % len(CASES)]
    words = {"item": ITEMS[number % len(ITEMS)], "street": STREETS[number % len(STREETS)]}
    email = f"{NAMES[number % len(NAMES)]}{number}@example.com"
    order = Order(email, words["item"], status, days)
    right = {**asdict(order), **{name: value.format(**words) for name, value in change.items()}}
    facts = {"e-mail address": email, "item": words["item"]}
    metadata: dict[str, Any] = {
        "order": f"A{100 + number}",
        "before": asdict(order),
        "facts": facts,
        "allowed": bool(change),
    }
    return Sample(f"c{number:02}", want.format(**words), right, metadata)


def shop_of(sample: Sample[Any, Any]) -> Shop:
    """Return the shop before a conversation, with an order of another customer."""
    before: Any = sample.metadata["before"]
    other = Order("zoe@example.com", "red lamp", "packed")
    return Shop({str(sample.metadata["order"]): Order(**before), "A1": other})


def right_state(expected: dict[str, Any], sample: Sample[Any, Any], environment: Shop) -> Score:
    """Pass if the orders are as they should be, whatever was said."""
    order = environment.orders[str(sample.metadata["order"])]
    wrong = [f"{name} is {found!r}" for name, found in asdict(order).items() if found != expected[name]]
    return Score(0.0 if wrong else 1.0, reason="; ".join(wrong))


CUSTOMERS = Dataset([customer(number) for number in range(30)], name="customers")


def suite(agent: ProviderAdapter, user: ProviderAdapter, judge: ProviderAdapter) -> EvalSuite:
    """Return the suite: each customer calls three times, because an agent must be right every time."""
    task = conversation_task(
        agent_task(agent, system=RULES, environment_factory=shop_of, max_turns=8),
        simulated_user(user, goal="input", persona="friendly, writes short messages", knows="metadata.facts"),
        max_turns=6,
    )
    evaluator = all_of(user_check(judge), right_state)
    return EvalSuite("shop", CUSTOMERS, task, evaluator, config=EvalConfig(repeats=3))


def chance(*parts: str) -> float:
    """Return a number from 0 to 1 that is always the same for these texts."""
    return random.Random(" ".join(parts)).random()


def fake_user(request: ParsedRequest, calls: int) -> Reply | str:
    """Say what the customer wants, then the address, then end; now and then make up an order number."""
    goal = request.system.partition("Your goal:\n")[2].partition("\n")[0]
    email = request.system.partition("e-mail address: ")[2].partition("\n")[0]
    if request.turn == 0:
        greeting = ("Hello", "Hi", "Good morning")[calls % 3]  # Another one for each repeat.
        return f"{greeting}, I want to {goal}."
    if request.turn == 1:
        opening = next(message.text for message in request.messages if message.role == "assistant")
        return f"It is {email}." + (" The number is Z999." if chance("user", opening) < 0.06 else "")
    return Reply(tool_calls=(ToolCallReply("end_conversation", {"reason": "I have an answer."}),))


def fake_agent(request: ParsedRequest, _calls: int) -> Reply | str:
    """Ask for the address, look at the orders, and act; forget the rules in some conversations."""
    said = [message.text for message in request.messages if message.role == "user"]
    results = [message.text for message in request.messages if message.role == "tool"]
    if "@" not in said[-1]:
        return "Gladly. What is your e-mail address?"
    if not results:
        email = said[-1].partition("It is ")[2].partition(".com")[0] + ".com"
        return Reply(tool_calls=(ToolCallReply("find_orders", {"email": email}),))
    if len(results) > 1:
        return f"Done: {results[-1]}."
    ((number, order),) = json.loads(results[0]).items()
    tool = next(tool for word, tool in TOOLS_BY_WORD.items() if word in said[0])
    allowed = order["status"] == "packed" if tool != "pay_back" else order["days"] <= 30
    if not allowed and chance("agent", *said) >= 0.2:
        return "I am sorry, our rules do not allow this."
    street = {"address": said[0].partition("sent to ")[2].rstrip(".")} if tool == "send_to" else {}
    return Reply(tool_calls=(ToolCallReply(tool, {"order": number, **street}),))


TOOLS_BY_WORD = {"cancel": "cancel", "money": "pay_back", "sent to": "send_to"}


def fake_judge(request: ParsedRequest, _calls: int) -> Reply:
    """Find customers that make up a number."""
    sound = "Z999" not in request.last_user
    words = ["yes" if sound else "no", *["yes"] * (len(USER_QUESTIONS) - 1)]
    reasons = ["as in the brief" if sound else "the order number is not in the brief", *["nothing found"] * 3]
    answers = [
        {"question": place, "reason": reason, "answer": word}
        for place, (word, reason) in enumerate(zip(words, reasons, strict=True), 1)
    ]
    return Reply(output={"answers": answers})


FAKES: Mapping[str, Callable[[ParsedRequest, int], Reply | str]] = {
    "agent": fake_agent,
    "user": fake_user,
    "judge": fake_judge,
}


def replies() -> Callable[[ParsedRequest], Reply | str]:
    """Return what the model server answers: each model with its number of calls of the same content."""
    seen: Counter[str] = Counter()

    def reply(request: ParsedRequest) -> Reply | str:
        seen[request.digest] += 1
        return FAKES[request.model](request, seen[request.digest] - 1)

    return reply


def main(agent: str | None = None, user: str | None = None, judge: str | None = None) -> EvalReport:
    if agent is not None and user is not None and judge is not None:
        return suite(model_from_name(agent), model_from_name(user), model_from_name(judge)).run_sync()
    with ModelServer(replies()) as server:
        models = [OpenAIAdapter(name, base_url=f"{server.base_url}/v1", api_key="none") for name in FAKES]
        return suite(*models).run_sync()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in FAKES:
        parser.add_argument(f"--{name}")
    print(main(**vars(parser.parse_args())))
