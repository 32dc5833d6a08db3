"""Generated replies: whatever a server sends with status 200, a score comes only from what the reply contains.

The replies come from a seeded generator: well-formed answers of each protocol, damaged in one or two places.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fairtrial import Dataset, EvalReport, EvalSuite, OpenAIAdapter, Sample, agent_task, contains, llm_judge
from fairtrial.data.session.events import (
    ANTHROPIC_ENDINGS,
    CHAT_ENDINGS,
    CONVERSE_ENDINGS,
    GEMINI_ENDINGS,
    RESPONSES_ENDINGS,
    Ending,
    ending_of,
)
from fairtrial.integrations.model_server import FaultRule, ModelServer, WrongShape
from fairtrial.models import AnthropicAdapter, RetryPolicy, Unlimited
from fairtrial.models.bedrock import ConverseAdapter
from fairtrial.models.gemini import GeminiAdapter
from fairtrial.models.judges import RATING_VALUES
from fairtrial.models.sdk import SdkAdapter

TABLES: Mapping[str, Mapping[str, Ending]] = {
    "chat": CHAT_ENDINGS,
    "responses": RESPONSES_ENDINGS,
    "anthropic": ANTHROPIC_ENDINGS,
    "gemini": GEMINI_ENDINGS,
    "bedrock": CONVERSE_ENDINGS,
}
REASON = {"chat": "finish_reason", "responses": "status", "anthropic": "stop_reason", "gemini": "finishReason",
          "bedrock": "stopReason"}  # fmt: skip
ONCE = RetryPolicy(attempts=1, rate_limited_attempts=1)
REPLIES = 60
SECRET = "4711"


def adapter(wire: str, server: ModelServer) -> SdkAdapter:
    given: dict[str, Any] = {"api_key": "k", "retry": ONCE, "limiter": Unlimited()}
    match wire:
        case "anthropic":
            return AnthropicAdapter("m", base_url=server.base_url, **given)
        case "gemini":
            return GeminiAdapter("m", base_url=f"{server.base_url}/v1beta", **given)
        case "bedrock":
            return ConverseAdapter("m", base_url=server.base_url, **given)
        case "chat":
            return OpenAIAdapter("m", base_url=f"{server.base_url}/v1", api="chat", **given)
        case _:
            return OpenAIAdapter("m", base_url=f"{server.base_url}/v1", api="responses", **given)


def normal(wire: str, text: str) -> dict[str, Any]:
    """A well-formed answer of a protocol."""
    counts = {"input_tokens": 3, "output_tokens": 2}
    match wire:
        case "chat":
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return {"model": "m", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        case "responses":
            item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
            return {"model": "m", "status": "completed", "output": [item], "usage": counts}
        case "anthropic":
            content = [{"type": "text", "text": text}]
            return {"model": "m", "content": content, "stop_reason": "end_turn", "usage": counts}
        case "gemini":
            candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": "STOP", "index": 0}
            usage = {"promptTokenCount": 3, "candidatesTokenCount": 2, "promptTokensDetails": [{"modality": "TEXT"}]}
            return {"candidates": [candidate], "modelVersion": "m", "usageMetadata": usage}
        case _:
            message = {"role": "assistant", "content": [{"text": text}]}
            usage = {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5}
            return {"output": {"message": message}, "stopReason": "end_turn", "usage": usage}


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    simple: list[Any] = [None, True, 0, -1, 1.5, "", "x", "stop", "error", SECRET, [], {}, "\u202e", "null"]
    if depth > 2 or rng.random() < 0.6:
        return rng.choice(simple)
    if rng.random() < 0.5:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(["type", "text", "content", "x", "functionCall", "toolUse"]): odd_value(rng, depth + 1)
            for _ in range(2)}  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def reason_in(wire: str, body: Any) -> Any:
    return next((holder[key] for holder, key in places(body) if key == REASON[wire]), None)


def damaged(wire: str, rng: random.Random, text: str) -> dict[str, Any]:
    body = normal(wire, text)
    for _ in range(rng.randrange(1, 3)):
        holder, key = rng.choice(list(places(body)))
        kind = rng.random()
        if kind < 0.25 and isinstance(holder, dict):
            del holder[key]
        elif kind < 0.5:
            holder[key] = odd_value(rng)
        else:
            found = ((holder, key) for holder, key in places(body) if key == REASON[wire])
            holder, key = next(found, (body, "x"))
            holder[key] = rng.choice([*TABLES[wire], "weird", None, 5])
    return body


def odd_verdict(rng: random.Random) -> str:
    """A verdict, whole or in some way not one. Ratings stand in it only where it says them."""
    rating, other = rng.sample(list(RATING_VALUES), 2)
    said: dict[str, Any] = {"reason": "r", "rating": rating}
    whole = json.dumps(said)
    return rng.choice(
        [
            whole,
            whole,
            f"```json\n{whole}\n```",
            f"Here it is: {whole}",
            f"<think>{json.dumps({**said, 'rating': other})}</think>{whole}",
            f"{whole}\n{json.dumps({**said, 'rating': other})}",
            f'{{"reason": "r", "rating": "{rating}", "rating": "{other}"}}',
            whole[: rng.randrange(len(whole))],
            whole.replace(rating, rng.choice([rating.upper(), f"{rating} ", f"not {rating}", "", "5", "excellеnt"])),
            json.dumps([said]),
            json.dumps({"value": said}),
            json.dumps({**said, "rating": rng.choice([[rating], {"x": rating}, None, 1, True, [rating, other]])}),
            json.dumps({**said, "score": other}),
            json.dumps({"rating": rating}),
            rating,
            json.dumps(rating),
            "\n" * 1000,
            "[" * 1000,
        ]
    )


async def ask(wire: str, bodies: list[Any], suite: Any) -> EvalReport:
    """Run a suite against a server that answers question n with body n, also when it is asked again."""
    faults = [FaultRule(WrongShape(body), when=rf"\bquestion {n}\b", where="anywhere") for n, body in enumerate(bodies)]
    with ModelServer("never", faults=faults) as server:
        async with adapter(wire, server) as model:
            data = Dataset([Sample(f"s{n}", f"question {n}", SECRET) for n in range(len(bodies))], name="odd")
            report: EvalReport = await suite(data, model).run(store="memory:")
    assert [int(one.sample_id[1:]) for one in report.results] == list(range(len(bodies)))
    return report


@pytest.mark.parametrize("wire", TABLES)
async def test_odd_replies_never_give_a_score_that_they_do_not_contain(wire: str) -> None:
    rngs = [random.Random(f"{wire} {seed}") for seed in range(REPLIES)]
    texts = [SECRET, f"It is {SECRET}.", "I do not know.", ""]
    bodies = [damaged(wire, rng, rng.choice(texts)) for rng in rngs]
    report = await ask(wire, bodies, lambda data, model: EvalSuite("odd", data, agent_task(model), contains))
    for body, result in zip(bodies, report.results, strict=True):
        assert result.outcome in ("scored", "task_error"), body
        if result.outcome == "task_error":
            assert re.search(r"Model\w*Error|MalformedReplyError|InvalidCallError|RateLimited", str(result.error)), body
            continue
        assert result.score is not None
        assert isinstance(result.output, str)
        assert result.output == "" or json.dumps(result.output)[1:-1] in json.dumps(body), body
        assert result.score.passed == (SECRET in result.output), body
        reason = reason_in(wire, body)
        assert reason is None or isinstance(reason, str), body
        assert ending_of(reason, TABLES[wire]) not in ("failed", "refused"), body
    assert {one.outcome for one in report.results} == {"scored", "task_error"}


@pytest.mark.parametrize("wire", TABLES)
async def test_odd_replies_never_give_a_verdict_that_they_do_not_contain(wire: str) -> None:
    bodies = []
    for seed in range(REPLIES):
        rng = random.Random(f"judge {wire} {seed}")
        text = odd_verdict(rng)
        bodies.append(damaged(wire, rng, text) if rng.random() < 0.4 else normal(wire, text))
    report = await ask(
        wire,
        bodies,
        lambda data, model: EvalSuite("odd", data, lambda given: given, llm_judge(model, "It is right.")),
    )
    for body, result in zip(bodies, report.results, strict=True):
        assert result.outcome in ("scored", "scorer_error"), body
        if result.outcome == "scorer_error":
            assert re.search(r"Model\w*Error|MalformedReply|InvalidCall|OutputParse|RateLimited", str(result.error)), (
                body,
                result.error,
            )
            continue
        assert result.score is not None
        said = set(re.findall(r'\\"rating\\": \\"(\w+)\\"', json.dumps(body)))
        assert {RATING_VALUES[rating] for rating in said} == {result.score.value}, body
        assert ending_of(reason_in(wire, body), TABLES[wire]) not in ("failed", "refused"), body
    assert {one.outcome for one in report.results} == {"scored", "scorer_error"}
    assert len({one.score.value for one in report.results if one.score is not None}) > 2
