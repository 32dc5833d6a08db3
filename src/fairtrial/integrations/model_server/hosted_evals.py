"""A fake of OpenAI's hosted Evals: read-only lists in pages, and the files that runs were made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.openai_wire import OpenAIWire
from fairtrial.integrations.model_server.record import Record
from fairtrial.integrations.model_server.reply import Reply, Usage
from fairtrial.integrations.model_server.request import ParsedMessage, ParsedRequest, digest_of


@first_is(list)
@dataclass(frozen=True, slots=True)
class HostedEvals(Record):
    """The evals, runs, output items (by run id) and files (by file id) of one project, as the API returns them.

    The lists are read with every request, so a test can add, finish or delete runs while the server is running. A page
    holds at most `page_size` objects, whatever `limit` the client asks for.
    """

    evals: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    items: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    page_size: int = 20

    def answer(self, path: str, query: Mapping[str, str]) -> ResourceWire | None:
        """What `GET path` returns; None if the path does not belong to this API."""
        match path.strip("/").split("/"):
            case ["v1", "evals"]:
                return self._page(self.evals, query)
            case ["v1", "evals", eval_id, "runs"]:
                if any(one["id"] == eval_id for one in self.evals):
                    return self._page([run for run in self.runs if run["eval_id"] == eval_id], query)
                return _not_found(f"eval {eval_id}")
            case ["v1", "evals", eval_id, "runs", run_id, "output_items"]:
                if any(run["id"] == run_id and run["eval_id"] == eval_id for run in self.runs):
                    return self._page(self.items.get(run_id, []), query)
                return _not_found(f"run {run_id}")
            case ["v1", "files", file_id, "content"]:
                content = self.files.get(file_id)
                return _not_found(f"file {file_id}") if content is None else ResourceWire(200, content.encode())
        return None

    def _page(self, objects: list[dict[str, Any]], query: Mapping[str, str]) -> ResourceWire:
        ordered = list(objects) if query.get("order", "asc") == "asc" else objects[::-1]
        start, after = 0, query.get("after")
        if after is not None:
            start = next((place for place, one in enumerate(ordered, 1) if one["id"] == after), -1)
            if start < 0:
                return ResourceWire(400, OpenAIWire().error(400, f"after: there is no object {after!r} in this list"))
        size = min(int(query.get("limit", "20")), self.page_size)
        data = ordered[start : start + size]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return ResourceWire(200, {"object": "list", "data": data, "has_more": start + size < len(ordered), **ends})


class ResourceWire(OpenAIWire):
    """An answer that is computed before the request is admitted; limits and faults still apply to it.

    Fault rules see the path and the query as the last user message.
    """

    def __init__(self, status: int, body: dict[str, Any] | bytes) -> None:
        self.status = status
        self.body = body

    def parse(self, body: Mapping[str, Any], *, number: int, raw: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """The request in neutral form."""
        message = ParsedMessage("user", str(body["resource"]), {})
        return ParsedRequest(number, self.name, "", (message,), body, digest_of(raw), len(raw), headers=headers)

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> Any:
        """The body of the answer, which some faults damage."""
        return self.body


def _not_found(what: str) -> ResourceWire:
    return ResourceWire(404, OpenAIWire().error(404, f"there is no {what}"))
