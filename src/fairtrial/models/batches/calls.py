"""An adapter of an SDK as the sender of batches sees it, and batches as the adapter sees them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import ConfigurationError, ModelAuthError, ModelError, ModelUnavailableError
from fairtrial.models.batches.batching import Batching, current_batches
from fairtrial.models.batches.requests import account_digest
from fairtrial.models.pricing import UsageExtras, priced
from fairtrial.trials.context import TrialContext

if TYPE_CHECKING:
    from fairtrial.models.adapter import ModelCall, ModelReply
    from fairtrial.models.batches.sender import RunBatches
    from fairtrial.models.batches.wire import BatchWire

log = logging.getLogger("fairtrial.models")

_EXPECTED_OUTPUT = 500  # Tokens of an answer, for estimates before the first one.
_CHARACTERS_PER_TOKEN = 4


def pause_after(failures: int, asked: float | None) -> float:
    """Return the seconds until the next attempt."""
    return min(max(asked or 0.0, 0.2 * 2.0 ** min(failures, 10)), 60.0)


class LineError(Exception):
    """The error that a batch has for one request, in the form in which an SDK raises it."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(json.dumps(body)[:500])
        self.status_code = status
        self.body = body


class UnansweredError(Exception):
    """No batch had an outcome for a request. `live` says that it may be sent at full price."""

    def __init__(self, message: str, *, live: bool) -> None:
        super().__init__(message)
        self.live = live


class BatchCalls:
    """What a sender of batches needs of an adapter.

    Attributes:
        wire: The batches of the provider.
        provider: The provider.
        model: The model.
        base_url: The address.
        endpoint: What its requests are for.
        account: A digest of the address and the key.
        labelled: Whether the list of batches shows the intent of each.
    """

    def __init__(self, adapter: Any, wire: BatchWire) -> None:
        self._adapter = adapter
        self.wire = wire
        self.provider: str = adapter.name
        self.model: str = adapter.model
        self.base_url: str = adapter._base_url
        self.endpoint = wire.endpoint(adapter.path)
        # Servers with the same paths may drop metadata.
        self.labelled = wire.labelled and adapter._base_url == adapter.default_url
        self.account = account_digest(adapter._base_url, adapter._key or "")

    @property
    def queue(self) -> tuple[str, str, str]:
        """What requests of one batch have in common."""
        return self.account, self.endpoint, self.model

    @property
    def address(self) -> str:
        """What the keys of its requests contain of that."""
        return " ".join(self.queue)

    def line(self, custom_id: str, body: str) -> str:
        """Return one request as JSON, from the JSON of its body."""
        return self.wire.line(custom_id, self.endpoint, body)

    @property
    def terms(self) -> tuple[str, str]:
        """What requests of one batch have in common too: they are sent with one adapter's headers, at its prices."""
        return repr(sorted(self._adapter._headers.items())), repr(self._adapter._given_prices())

    async def repeated[T](self, call: Callable[[Any], Awaitable[T]]) -> T:
        """Return the result of a call that may be repeated; until it succeeds, or fails for good."""
        failures = 0
        while True:
            try:
                return await call(await self.client())
            except Exception as error:
                found = self.model_error(error)
                if not found.retryable:
                    raise found from error
                failures += 1
                if failures == 3:
                    log.warning("the provider's batches are unavailable, trying again: %s", found)
                await asyncio.sleep(pause_after(failures, found.retry_after))

    async def client(self) -> Any:
        """Return the client of the SDK, with the present key."""
        client = await self._adapter._client()
        if self._adapter._renewed_key is not None:
            client = client.with_options(api_key=await self._adapter._current_key())
        return client

    def with_batches_kept(self, error: ModelAuthError) -> ModelAuthError:
        """Return the error of a key that was refused after a batch was sent, with what becomes of the batches."""
        renewed = self._adapter._renewed_key is not None
        once = "a key works" if renewed else "this key works again"
        other = "" if renewed else " (with another key, it sends their requests again)"
        return ModelAuthError(
            f"{error}\nthe batches stay at the provider: once {once}, the same command continues with them{other}"
        )

    def error(self, error: Exception) -> ModelError:
        """Return the `ModelError` for an error of the SDK or of a line; raises any other error."""
        found: ModelError | None = self._adapter._classified(error)
        if found is None:
            raise error
        return found

    def model_error(self, error: Exception) -> ModelError:
        """Return the `ModelError` for an error of a request about batches; raises any other error."""
        if isinstance(error, ModelError):
            return error
        if isinstance(error, ValueError | KeyError | TypeError | AttributeError):
            return ModelUnavailableError(f"the provider's answer about a batch cannot be read: {error!r}")
        return self.error(error)

    def never_sent(self, error: Exception) -> bool:
        """Return whether a request has certainly not reached the provider."""
        found = self._adapter._unreachable(error)
        return found is not None and not found.sent

    def cost(self, tree: Mapping[str, Any]) -> float | None:
        """Return what an answer cost."""
        adapter = self._adapter
        extras = adapter._extras(tree)
        usage = adapter._usage(tree.get("usage"), adapter._served_model(tree.get("model")), extras)
        prices = adapter._given_prices()
        cost: float | None = None
        if usage is not None:
            cost = usage.cost_usd if prices is None else prices.cost(usage, extras)
        return cost

    def estimate(self, characters: int) -> float:
        """Return about what a request will cost, by its length; 0 if the model has no known price."""
        adapter, extras = self._adapter, UsageExtras(tier="batch")
        usage = TokenUsage(characters // _CHARACTERS_PER_TOKEN, _EXPECTED_OUTPUT)
        prices = adapter._given_prices()
        if prices is not None:
            return float(prices.cost(usage, extras) or 0.0)
        found = priced(usage, self.model, provider=adapter._prices_of, base_url=self.base_url, extras=extras)
        return found.cost_usd or 0.0


def _of_run(adapter: Any, wire: BatchWire) -> tuple[RunBatches | None, BatchCalls]:
    known: BatchCalls | None = adapter._batch_calls
    if known is None:
        known = adapter._batch_calls = BatchCalls(adapter, wire)
    return current_batches.get(), known


def _encoded(adapter: Any, call: ModelCall) -> str:
    body = adapter._body(call)
    body.pop("stream_options", None)  # Nothing is streamed in a batch, and providers refuse them without a stream.
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=dict)


async def send_in_batch(
    adapter: Any, wire: BatchWire, settings: Batching, call: ModelCall, trial: TrialContext | None
) -> ModelReply | None:
    """Return the reply to a call from a batch; None if it is to be sent at full price instead."""
    batches, known = _of_run(adapter, wire)
    if trial is None or batches is None:
        raise ConfigurationError(
            "calls in batches must be those of a run's trials, in the process of the run: not of isolated tasks, of "
            "processes=2, of workers of a fleet, or outside of runs\nuse an adapter without batch=..."
        )
    encode = partial(_encoded, adapter, call)
    try:
        try:
            tree = await batches.ask(known, settings, encode, call.actor, trial)
        except LineError as error:
            if not adapter._adapts(known.error(error)):
                raise
            tree = await batches.ask(known, settings, encode, call.actor, trial)
    except UnansweredError as error:
        if error.live:
            return None
        remedy = 'Batching(fallback="live") sends such a request at full price'
        raise ModelUnavailableError(f"{adapter._where()}: {error}\n{remedy}") from None
    except LineError as error:
        raise known.error(error) from error
    reply: ModelReply = adapter._completed(call, tree)
    return reply


async def count_cached(adapter: Any, wire: BatchWire, call: ModelCall, trial: TrialContext | None) -> None:
    """Count a call that the response cache has answered, perhaps with the reply of a batch."""
    batches, known = _of_run(adapter, wire)
    if trial is not None and batches is not None:
        await batches.count_cached(known, _encoded(adapter, call), call.actor, trial)
