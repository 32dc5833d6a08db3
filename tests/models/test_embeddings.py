"""`embed` of adapters, against the model server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fairtrial import AnthropicAdapter, ConfigurationError, OpenAIAdapter, PromptExecuted, ScriptedAdapter, Session
from fairtrial.errors import BudgetExceededError, InvalidCallError, MalformedReplyError
from fairtrial.integrations.model_server import FaultRule, ModelServer, RateLimited, WrongShape
from fairtrial.models import Budget, ResponseCache, RetryPolicy


def embedder(server: ModelServer, **options: Any) -> OpenAIAdapter[Any]:
    return OpenAIAdapter("embedder", base_url=f"{server.base_url}/v1", api_key="test", **options)


async def test_texts_with_the_same_words_are_similar() -> None:
    async with ModelServer(["a script that embeddings leave alone"]) as server, embedder(server) as model:
        session = Session()
        one, same, other = await model.embed(["red apple", "Apple, red!", "blue sky"], session=session)
        assert (await model.complete("Hello")).text == "a script that embeddings leave alone"
        assert len((await model.embed(["x"], params={"dimensions": 8}))[0]) == 8
    assert len(one) == 64
    assert math.isclose(math.hypot(*one), 1.0)
    assert math.sumprod(one, same) == pytest.approx(1.0)
    assert abs(math.sumprod(one, other)) < 0.5
    (event,) = session[PromptExecuted].all()
    assert event.usage is not None
    assert (event.prompt_name, event.usage.input_tokens > 0, event.usage.output_tokens) == ("embed", True, 0)


async def test_sampling_parameters_and_streams_of_the_adapter_do_not_apply() -> None:
    async with ModelServer() as server, embedder(server, params={"temperature": 0}, stream=True) as model:
        await model.embed(["x"])
        (request,) = server.requests()
    assert request.body == {"model": "embedder", "input": ["x"], "encoding_format": "float"}


async def test_retries_cache_and_budgets_apply(tmp_path: Path) -> None:
    faults = FaultRule(RateLimited(retry_after=0.01), 1.0, attempts=(1,))
    async with ModelServer(faults=faults) as server:
        async with embedder(server, retry=RetryPolicy(), cache=ResponseCache(tmp_path / "cache.db")) as model:
            first = await model.embed(["x", "y"])
            sent = len(server.requests())
            assert await model.embed(["x", "y"]) == first
            assert len(server.requests()) == sent == 2  # One was refused, and the second answer came from the cache.
            assert await model.embed(["y", "x"]) == first[::-1]
        async with embedder(server, retry=RetryPolicy(), run_budget=Budget(tokens=1)) as poor:
            await poor.embed(["some words"])
            with pytest.raises(BudgetExceededError):
                await poor.embed(["other words"])


@pytest.mark.parametrize("shape", [{"data": [{"index": 0}]}, {"data": []}, {"data": [{"index": 0, "embedding": []}]}])
async def test_answers_of_another_shape_are_malformed(shape: dict[str, Any]) -> None:
    async with ModelServer(faults=FaultRule(WrongShape(shape), 1.0)) as server, embedder(server) as model:
        with pytest.raises(MalformedReplyError):
            await model.embed(["x"])


@pytest.mark.parametrize("texts", [[], "one text", ["x", " "], [3]])
async def test_there_must_be_texts(texts: Any) -> None:
    with pytest.raises(ConfigurationError, match="embed needs a list of texts"):
        await ScriptedAdapter([], embedding=lambda text: [1.0]).embed(texts)


async def test_adapters_without_embeddings_say_so() -> None:
    with pytest.raises(ConfigurationError, match="AnthropicAdapter has no embeddings"):
        await AnthropicAdapter("claude", api_key="test").embed(["x"])
    with pytest.raises(ConfigurationError, match="pass embedding="):
        await ScriptedAdapter([]).embed(["x"])


async def test_the_server_refuses_what_providers_refuse() -> None:
    async with ModelServer() as server, embedder(server) as model:
        with pytest.raises(InvalidCallError, match="dimensions"):
            await model.embed(["x"], params={"dimensions": 0})
