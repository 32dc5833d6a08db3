"""Requests to batch APIs: read, executed when they are admitted, and refused."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from aiohttp import web

from fairtrial.integrations.model_server.batch_account import BatchApi, HostedBatch
from fairtrial.integrations.model_server.openai_wire import Wire
from fairtrial.integrations.model_server.reply import ParsedRequest
from fairtrial.integrations.model_server.rules import ResourceWire


class BatchApiError(Exception):
    """The batch API refuses a request with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BatchCall(NamedTuple):
    """A request to the batch API: its query, its body or form, the ids in its path, the address of the server."""

    query: Mapping[str, str]
    body: bytes
    form: Mapping[str, Any]
    ids: tuple[str, ...]
    origin: str

    def json(self) -> dict[str, Any]:
        """The body as an object."""
        try:
            value = json.loads(self.body)
        except ValueError:
            raise BatchApiError(400, "the body must be JSON") from None
        if not isinstance(value, dict):
            raise BatchApiError(400, "the body must be a JSON object")
        return value


type Work = Callable[[BatchCall], dict[str, Any] | bytes]


class BatchApiWire(ResourceWire):
    """A request to the batch API, which is executed when it is admitted; limits and faults apply to it.

    Fault rules see its method and path as the last user message, such as `POST /v1/batches`; `attempts` counts the
    requests of one method and path.
    """

    def __init__(self, errors: Wire, http: web.BaseRequest, ids: tuple[str, ...], work: Work) -> None:
        super().__init__(200, b"")
        self.resource = f"{http.method} {http.path_qs}"
        self._errors, self._http, self._ids, self._work = errors, http, ids, work
        self._call: BatchCall | None = None

    async def receive(self) -> None:
        """Read the request."""
        http, form, body = self._http, {}, b""
        if http.content_type == "multipart/form-data":
            form = dict(await http.post())
        else:
            body = await http.read()
        self._call = BatchCall(http.query, body, form, self._ids, str(http.url.origin()))

    def execute(self) -> None:
        """Do the work; afterwards `status` and `body` are the answer."""
        assert self._call is not None  # noqa: S101 - it has been received
        try:
            self.body = self._work(self._call)
        except BatchApiError as refusal:
            self.status, self.body = refusal.status, self.error(refusal.status, str(refusal))

    def parse(self, body: Mapping[str, Any], number: int) -> ParsedRequest:
        """The request in neutral form."""
        return replace(super().parse(body, number), protocol=self._errors.name)

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """The body of an error answer, in the format of the provider."""
        return self._errors.error(status, message, code)


class ProviderBatchApi(BatchApi):
    """What the two APIs have in common."""

    max_requests: ClassVar[int]
    max_bytes: ClassVar[int]
    page_limit: ClassVar[int]

    @abstractmethod
    def show(self, batch: HostedBatch, call: BatchCall) -> dict[str, Any]:
        """Return a batch as the provider shows it."""

    def get(self, call: BatchCall) -> dict[str, Any]:
        """Return a batch."""
        batch = self._find(call)
        if self.host.clock.now() < batch.created + self.host.options.get_lag:
            raise BatchApiError(404, f"there is no batch {batch.id!r}")
        return self.show(batch, call)

    def _find(self, call: BatchCall) -> HostedBatch:
        batch = self.batches.get(call.ids[0])
        if batch is None or batch.deleted:
            raise BatchApiError(404, f"there is no batch {call.ids[0]!r}")
        return batch

    def _stop(self, batch: HostedBatch, call: BatchCall) -> dict[str, Any]:
        if batch.cancelled is None:
            batch.cancelled = self.host.clock.now()
        return self.show(batch, call)

    def _page(self, call: BatchCall, after: str, before: str = "") -> dict[str, Any]:
        """Return a page of the list, newest first."""
        given = call.query.get("limit", "20")
        if not given.isdecimal() or not 1 <= int(given) <= self.page_limit:
            raise BatchApiError(400, f"limit: must be from 1 to {self.page_limit} (got {given})")
        limit, cursors = int(given), {name: call.query[name] for name in (after, before) if name in call.query}
        shown = self.listed(first_page=not cursors)
        places = {batch.id: place for place, batch in enumerate(shown)}
        if unknown := [cursor for cursor in cursors.values() if cursor not in places]:
            raise BatchApiError(400, f"there is no batch {unknown[0]!r} in this list")
        if before in cursors:
            end = places[cursors[before]]
            start, more = max(0, end - limit), end > limit
        else:
            start = places[cursors[after]] + 1 if after in cursors else 0
            end, more = start + limit, start + limit < len(shown)
        data = [self.show(batch, call) for batch in shown[start:end]]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return {"data": data, "has_more": more, **ends}
