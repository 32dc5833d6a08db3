"""Batches of Anthropic: the requests in one call, without metadata; the results as lines once all have ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from fairtrial.base.frozen import EMPTY
from fairtrial.models.batches.recovery import Candidate
from fairtrial.models.batches.wire import BatchStatus, Line, as_tree, read_line
from fairtrial.store.batches import BatchIntent

_PATH = "/v1/messages/batches"
_TIMEOUT = 1800.0
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}


class AnthropicBatches:
    """The batches of Anthropic."""

    max_requests = 100_000
    max_bytes = 240_000_000  # Of 256 MB.
    labelled = False

    def endpoint(self, path: str) -> str:
        """Return the name of an endpoint in a batch."""
        return path

    def line(self, custom_id: str, endpoint: str, body: str) -> str:
        """Return one request as JSON, from the JSON of its body."""
        return f'{{"custom_id":"{custom_id}","params":{body}}}'

    async def upload(self, client: Any, intent: BatchIntent, lines: Sequence[str]) -> str | None:
        """Do nothing: the requests are sent with the batch."""
        return None

    async def create(self, client: Any, intent: BatchIntent, lines: Sequence[str]) -> BatchStatus:
        """Make a batch."""
        content = f'{{"requests":[{",".join(lines)}]}}'.encode()
        headers = {"Content-Type": "application/json"}
        options = {"timeout": _TIMEOUT, "headers": headers}
        return _status(as_tree(await client.post(_PATH, cast_to=object, content=content, options=options)))

    async def get(self, client: Any, batch_id: str) -> BatchStatus:
        """Return the state of a batch."""
        return _status(as_tree(await client.messages.batches.retrieve(batch_id)))

    async def results(self, client: Any, status: BatchStatus) -> AsyncIterator[Line]:
        """Yield the outcomes of a batch that has ended; nothing if the provider names no results."""
        if not status.files:
            return
        batches = client.messages.batches.with_streaming_response
        async with batches.results(status.id, timeout=_TIMEOUT) as response:
            async for text in response.iter_lines():
                if text.strip():
                    yield read_line(text, _line)

    async def listed(self, client: Any, since: float) -> list[Candidate]:
        """Return the batches of the account that were made since a time; the list begins with the newest."""
        found: list[Candidate] = []
        async for one in await client.messages.batches.list(limit=1000):
            tree = as_tree(one)
            created = datetime.fromisoformat(tree["created_at"]).timestamp()
            if created < since:
                break
            status = _status(tree)
            found.append(Candidate(status.id, created, None, status.requests, status.ended))
        return found

    async def cancel(self, client: Any, batch_id: str) -> None:
        """Cancel a batch; what is finished is kept and paid."""
        await client.messages.batches.cancel(batch_id)

    async def delete(self, client: Any, intent: BatchIntent, status: BatchStatus | None) -> None:
        """Delete a batch with its results."""
        if status is not None:
            await client.messages.batches.delete(status.id)


def _status(tree: Mapping[str, Any]) -> BatchStatus:
    counts = tree.get("request_counts") or EMPTY
    ended = tree["processing_status"] == "ended"
    total = sum(counts.values()) or None
    failed = sum(counts.get(name, 0) for name in ("errored", "canceled", "expired"))
    done = counts.get("succeeded", 0) + failed
    files = (tree["results_url"],) if tree.get("results_url") else ()
    status = BatchStatus(tree["id"], ended, tree["processing_status"], total, files=files)
    # The counts stay 0 until the whole batch has ended.
    return replace(status, done=done, failed=failed) if ended else status


def _line(tree: Mapping[str, Any]) -> Line:
    result = tree["result"]
    kind = result["type"]
    if kind == "succeeded":
        message = dict(result["message"])
        message["usage"] = {**(message.get("usage") or {}), "service_tier": "batch"}
        return Line(tree["custom_id"], 200, message)
    if kind != "errored":
        return Line(tree["custom_id"], None, kind)
    error = result.get("error") or EMPTY
    inner: Any = error.get("error") if isinstance(error.get("error"), Mapping) else error
    return Line(tree["custom_id"], _STATUSES.get(str(inner.get("type")), 500), {"error": inner})
