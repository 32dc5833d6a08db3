"""Clients of providers that are shared and closed, their errors by kind, and families of models."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import re
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

from fairtrial.base.frozen import EMPTY
from fairtrial.errors import (
    BudgetExceededError,
    ContextLengthError,
    InvalidCallError,
    ModelAuthError,
    ModelError,
    ModelRefusedError,
    ModelUnavailableError,
    RateLimitedError,
)

_FAMILIES = {
    "gpt": ("gpt", "chatgpt", r"o[1-9]"),
    "claude": ("claude",),
    "gemini": ("gemini",),
    "llama": ("llama", "codellama"),
    "qwen": ("qwen", "qwq"),
    "mistral": ("mistral", "mixtral", "ministral", "magistral", "codestral", "devstral", "pixtral"),
    "deepseek": ("deepseek",),
    "command": ("command",),
    "grok": ("grok",),
    "phi": ("phi",),
    "gemma": ("gemma",),
}
# A whole word, which a version may follow: "phi3" and "Phi-4" belong to the family, "dolphin" does not.
_FAMILY_NAMES = {name: re.compile(rf"(?<![a-z0-9])(?:{'|'.join(words)})(?![a-z])") for name, words in _FAMILIES.items()}


def family(model: str) -> str:
    """Return the family of a model, such as "claude"; its name if the family is unknown."""
    lowered = model.lower()
    return next((name for name, pattern in _FAMILY_NAMES.items() if pattern.search(lowered)), lowered)


_CLOSE_SECONDS = 2.0  # The time limit at the end of the process, which a blocked event loop must not delay.


class OpenClient:
    """A client of one event loop. It is closed by `aclose`, or when its adapter is deleted or its event loop ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Any) -> None:
        self.client = client
        self.closed = False
        self.loop = loop
        self._keeper = self._keep()

    async def _keep(self) -> AsyncGenerator[None]:
        _open_clients.add(self)  # A reference, so that it is closed before it is garbage collected.
        try:
            yield
        finally:
            self.closed = True
            _open_clients.discard(self)
            await self.client.close()

    async def start(self) -> None:
        """Open it, in its event loop."""
        # An event loop that ends closes the async generators that were started in it, and so this client.
        await anext(self._keeper)

    async def aclose(self) -> None:
        """Close it."""
        await self._keeper.aclose()

    def close_later(self) -> None:
        """Close it from another thread, without waiting."""
        try:
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.aclose()))
        except RuntimeError:
            pass  # The loop has ended and has closed the client.


_open_clients: set[OpenClient] = set()
own_clients: weakref.WeakSet[Any] = weakref.WeakSet()
"""The clients of adapters, which record their calls themselves."""


@atexit.register
def _close_at_exit() -> None:
    """Close the clients of running event loops, such as that of `run_sync`, which runs until the process ends."""
    running = [opened for opened in tuple(_open_clients) if opened.loop.is_running()]
    closing = [asyncio.run_coroutine_threadsafe(opened.aclose(), opened.loop) for opened in running]
    concurrent.futures.wait(closing, timeout=_CLOSE_SECONDS)


def close_all(clients: dict[asyncio.AbstractEventLoop, OpenClient]) -> None:
    """Close the clients of an adapter that is gone."""
    for client in clients.values():
        client.close_later()


_LONGEST_WAIT = 3600.0
_CONTEXT_FULL = re.compile(r"context[ _](length|window|size|limit)|(prompt|input) is too long|input token count", re.I)
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?")
# The headers of providers with the remaining quota and the time until it is reset.
_RESETS = (
    ("x-ratelimit-remaining-{}", "x-ratelimit-reset-{}", ("requests", "tokens")),
    ("anthropic-ratelimit-{}-remaining", "anthropic-ratelimit-{}-reset", ("requests", "input-tokens", "output-tokens")),
)
_QUOTA = frozenset({"insufficient_quota", "billing_error", "billing_hard_limit_reached"})


def error_by_code(where: str, problem: Any) -> ModelError | None:
    """Return the error for an error object in an answer with status 200; None if its code says nothing."""
    code = problem.get("code") if isinstance(problem, Mapping) else None
    message = f"{where} failed while it was answering: {_message_in(problem)}"
    if isinstance(code, int):  # OpenRouter's are HTTP statuses.
        code = {429: "rate_limit_exceeded", 402: "insufficient_quota", 400: "invalid_request"}.get(code, "failed")
    if not isinstance(code, str):
        return None
    if code == "context_length_exceeded" or _CONTEXT_FULL.search(message):
        return ContextLengthError(message)
    if code == "rate_limit_exceeded":
        return RateLimitedError(message)
    if code in _QUOTA:
        return BudgetExceededError(message)
    if code == "content_filter" or (code == "invalid_prompt" and re.search(r"usage polic|flagged", message)):
        return ModelRefusedError(message)
    if code.startswith(("invalid_", "image_", "unsupported_")):
        return InvalidCallError(message)
    return ModelUnavailableError(message, sent=True)


def error_by_status(where: str, error: Any, status: int, key_variable: str) -> ModelError:
    """Return the error for an answer with this status."""
    message = f"{where}: {provider_message(error)}"
    codes = _codes(getattr(error, "body", None))
    wait = retry_after(getattr(getattr(error, "response", None), "headers", EMPTY))
    if wait is None:
        wait = _delay_in(getattr(error, "body", None))
    if "content_filter" in codes:
        return ModelRefusedError(message)
    if codes & _QUOTA:
        return BudgetExceededError(message)
    if status == 429:
        return RateLimitedError(message, retry_after=wait)
    if status in (401, 403):
        return ModelAuthError(f"{message}; the key comes from api_key=... or {key_variable}")
    # Status 200 means an error event in a stream.
    if status in (200, 408, 409, 425) or status >= 500:
        found = error_by_code(where, getattr(error, "body", None)) if status == 200 else None
        return found or ModelUnavailableError(message, retry_after=wait, sent=status == 200)
    if "context_length_exceeded" in codes or (status in (400, 422) and _CONTEXT_FULL.search(message)):
        return ContextLengthError(message)
    return InvalidCallError(message + _remedy(message))


def retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Return how many seconds a provider asked to wait, from milliseconds, seconds or a date; None without a header."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - now()
            except (TypeError, ValueError):
                continue
        if seconds == seconds:  # Not NaN.
            return min(max(seconds, 0.0), _LONGEST_WAIT)
    resets = [
        _until(headers.get(reset.format(quota)), now())
        for left, reset, quotas in _RESETS
        for quota in quotas
        if headers.get(left.format(quota)) == "0"
    ]
    return max((seconds for seconds in resets if seconds is not None), default=None)


def _until(text: str | None, now: float) -> float | None:
    """Return the seconds until a quota is reset, from a duration such as "6m0s" or "120ms", or from a date."""
    if not text:
        return None
    try:
        seconds = datetime.fromisoformat(text).timestamp() - now if "-" in text else _seconds(text)
    except ValueError:
        return None
    return None if seconds is None else min(max(seconds, 0.0), _LONGEST_WAIT)


def _seconds(text: str) -> float | None:
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        return None
    hours, minutes, seconds, milliseconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def _delay_in(body: Any) -> float | None:
    """Return the pause that Google asks for in the body of an error; its endpoint also sends a list with the error."""
    outer = body[0] if isinstance(body, list) and body else body
    inner = outer.get("error", outer) if isinstance(outer, Mapping) else None
    details = inner.get("details") if isinstance(inner, Mapping) else None
    for detail in details if isinstance(details, list) else ():
        delay = detail.get("retryDelay") if isinstance(detail, Mapping) else None
        seconds = _seconds(delay) if isinstance(delay, str) else None
        if seconds is not None:
            return min(seconds, _LONGEST_WAIT)
    return None


def _message_in(body: Any) -> str | None:
    inner = body.get("error") if isinstance(body, Mapping) and isinstance(body.get("error"), Mapping) else body
    message = inner.get("message") if isinstance(inner, Mapping) else None
    return str(message) if message else None


def provider_message(error: BaseException) -> str:
    """Return what the provider says, or else the error."""
    status = getattr(error, "status_code", None)
    text = _message_in(getattr(error, "body", None)) or str(error)
    return f"{text} (status {status})" if isinstance(status, int) else text


def _remedy(message: str) -> str:
    """Return a remedy for known refusals of requests, else an empty text."""
    if "/v1/responses" in message:
        return '\nUse OpenAIAdapter(..., api="responses").'
    if "temperature" in message or "top_p" in message:
        return "\nReasoning models do not support sampling parameters: remove them from params."
    return ""


def _codes(body: Any) -> set[str]:
    inner = body.get("error") if isinstance(body, Mapping) and isinstance(body.get("error"), Mapping) else body
    if not isinstance(inner, Mapping):
        return set()
    return {value for key in ("code", "type") if isinstance(value := inner.get(key), str)}


def remember_addresses(client: Any, http_client: Any) -> None:
    """Let a client of an SDK parse its few addresses once; it parses each three times for every request.

    That is a tenth of the CPU time of a request.
    """
    parsed = lru_cache(maxsize=16)(type(http_client.base_url))
    build = http_client.build_request
    http_client.build_request = lambda method, url, **given: build(method, parsed(url), **given)
    if hasattr(client, "_prepare_url"):  # Not public.
        client._prepare_url = lru_cache(maxsize=16)(client._prepare_url)
