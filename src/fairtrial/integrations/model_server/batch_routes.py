"""The routes of the batch APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from aiohttp import web

from fairtrial.integrations.model_server.anthropic_batches import AnthropicBatchApi
from fairtrial.integrations.model_server.batch_account import BatchHost
from fairtrial.integrations.model_server.batch_wire import BatchApiWire, Work
from fairtrial.integrations.model_server.openai_batches import OpenAIBatchApi
from fairtrial.integrations.model_server.openai_wire import Wire


class BatchApiRoutes:
    """The routes of the batch APIs."""

    def __init__(self, host: BatchHost, wires: Mapping[str, Wire]) -> None:
        openai, anthropic = OpenAIBatchApi(host, wires), AnthropicBatchApi(host, wires)
        of_openai: dict[str, Work] = {
            "POST /v1/files": openai.upload,
            "GET /v1/files": openai.list_files,
            "GET /v1/files/ID": openai.get_file,
            "GET /v1/files/ID/content": openai.content,
            "DELETE /v1/files/ID": openai.delete_file,
            "POST /v1/batches": openai.post,
            "GET /v1/batches": openai.list,
            "GET /v1/batches/ID": openai.get,
            "POST /v1/batches/ID/cancel": openai.cancel,
        }
        of_anthropic: dict[str, Work] = {
            "POST /v1/messages/batches": anthropic.post,
            "GET /v1/messages/batches": anthropic.list,
            "GET /v1/messages/batches/ID": anthropic.get,
            "GET /v1/messages/batches/ID/results": anthropic.content,
            "POST /v1/messages/batches/ID/cancel": anthropic.cancel,
            "DELETE /v1/messages/batches/ID": anthropic.delete,
        }
        self._routes = [
            (re.compile(route.replace("ID", "([^/]+)")), wires[path], work)
            for path, works in (("/v1/chat/completions", of_openai), ("/v1/messages", of_anthropic))
            for route, work in works.items()
        ]

    def at(self, http: web.BaseRequest) -> BatchApiWire | None:
        """Return the wire of a request; None if it is none of these APIs."""
        for route, errors, work in self._routes:
            if found := route.fullmatch(f"{http.method} {http.path}"):
                return BatchApiWire(errors, http, found.groups(), work)
        return None
