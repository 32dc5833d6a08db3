from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairtrial.integrations.model_server import ModelServer
from fairtrial.models import AnthropicAdapter, OpenAIAdapter, RetryPolicy, Unlimited
from fairtrial.models.sdk import SdkAdapter

QUICK = RetryPolicy(attempts=3, rate_limited_attempts=8, base_seconds=0.01, max_seconds=0.05)

type MakeAdapter = Callable[..., SdkAdapter]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["openai", "anthropic"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def adapter_for(provider: str) -> AsyncIterator[MakeAdapter]:
    """Makes adapters of the provider for a server, closed at the end of the test."""
    async with AsyncExitStack() as stack:

        def make(server: Any, **options: Any) -> SdkAdapter:
            adapter = _make(provider, server.base_url, **options)
            stack.push_async_callback(adapter.aclose)
            return adapter

        yield make


@pytest.fixture
def make_adapter() -> MakeAdapter:
    """Makes adapters that the test closes, or does not."""
    return _make


def _make(provider: str, base_url: str, **options: Any) -> SdkAdapter:
    given = {"api_key": "test", "retry": QUICK, "limiter": Unlimited(), **options}
    model = given.pop("model", "test-model")
    if provider == "openai":
        return OpenAIAdapter(model, base_url=base_url + "/v1", **given)
    return AnthropicAdapter(model, base_url=base_url, **given)


@pytest.fixture
def echo() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running
