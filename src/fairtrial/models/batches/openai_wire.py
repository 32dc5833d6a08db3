"""Batches of OpenAI, and of servers with the same paths: a file of requests, and files of results and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from io import BytesIO
from typing import Any

from fairtrial.base.frozen import EMPTY
from fairtrial.models.batches.recovery import MARGIN_SECONDS, Candidate
from fairtrial.models.batches.wire import BatchStatus, Line, as_tree, is_gone, read_line
from fairtrial.store.batches import BatchIntent

_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_LABEL = "fairtrial"
_FILES = 1000  # On a page of the list.
_TIMEOUT = 1800.0  # For a file of 200 MB.


class OpenAIBatches:
    """The batches of OpenAI."""

    max_requests = 50_000
    max_bytes = 190_000_000  # Of 200 MB.
    labelled = True

    def endpoint(self, path: str) -> str:
        """Return the name of an endpoint in a batch."""
        return f"/v1{path}"

    def line(self, custom_id: str, endpoint: str, body: str) -> str:
        """Return one request as JSON, from the JSON of its body."""
        return f'{{"custom_id":"{custom_id}","method":"POST","url":"{endpoint}","body":{body}}}\n'

    async def upload(self, client: Any, intent: BatchIntent, lines: Sequence[str]) -> str | None:
        """Upload the requests; returns the id of the file."""
        content = BytesIO()
        content.writelines(line.encode() for line in lines)  # Joined first, large batches would be twice in memory.
        file = (_file_name(intent), content.getvalue(), "application/jsonl")
        return str(as_tree(await client.files.create(file=file, purpose="batch", timeout=_TIMEOUT))["id"])

    async def create(self, client: Any, intent: BatchIntent, lines: Sequence[str]) -> BatchStatus:
        """Make a batch of the uploaded requests."""
        made = await client.batches.create(
            input_file_id=intent.file_id,
            endpoint=intent.endpoint,
            completion_window="24h",
            metadata={_LABEL: intent.id},
        )
        return _status(as_tree(made))

    async def get(self, client: Any, batch_id: str) -> BatchStatus:
        """Return the state of a batch."""
        return _status(as_tree(await client.batches.retrieve(batch_id)))

    async def results(self, client: Any, status: BatchStatus) -> AsyncIterator[Line]:
        """Yield the outcomes of a batch that has ended: first the answers, then the errors."""
        for file_id in status.files:
            async with client.files.with_streaming_response.content(file_id, timeout=_TIMEOUT) as response:
                async for text in response.iter_lines():
                    if text.strip():
                        yield read_line(text, _line)

    async def listed(self, client: Any, since: float) -> list[Candidate]:
        """Return the batches of the account that were made since a time; the list begins with the newest."""
        found: list[Candidate] = []
        async for one in await client.batches.list(limit=100):
            tree = as_tree(one)
            if tree["created_at"] < since:
                break
            label = (tree.get("metadata") or EMPTY).get(_LABEL)
            status = _status(tree)
            found.append(Candidate(status.id, tree["created_at"], label, status.requests, status.ended))
        return found

    async def cancel(self, client: Any, batch_id: str) -> None:
        """Cancel a batch; what is finished is kept and paid."""
        await client.batches.cancel(batch_id)

    async def delete(self, client: Any, intent: BatchIntent, status: BatchStatus | None) -> None:
        """Delete the files of a batch, and those with its requests that nobody knows: of uploads without an answer."""
        files = {intent.file_id} if status is None else {intent.file_id, status.input_file, *status.files}
        problem: Exception | None = None
        try:
            async for one in await client.files.list(purpose="batch", order="desc", limit=_FILES):
                if one.created_at < intent.created_at - MARGIN_SECONDS:
                    break
                if one.filename == _file_name(intent):
                    files.add(one.id)
        except Exception as error:
            problem = error  # What is known is deleted all the same.
        for file_id in files - {None}:
            try:
                await client.files.delete(file_id)
            except Exception as error:
                if not is_gone(error):
                    problem = error
        if problem is not None:
            raise problem


def _file_name(intent: BatchIntent) -> str:
    return f"{_LABEL}-{intent.id}.jsonl"


def _status(tree: Mapping[str, Any]) -> BatchStatus:
    counts = tree.get("request_counts") or EMPTY
    problems = tuple(
        (one.get("line"), str(one.get("code") or ""), str(one.get("message") or ""))
        for one in (tree.get("errors") or EMPTY).get("data") or ()
    )
    done, failed = counts.get("completed"), counts.get("failed")
    ended = tree["status"] in _ENDED
    return BatchStatus(
        id=tree["id"],
        ended=ended,
        text=tree["status"],
        requests=counts.get("total"),
        done=None if done is None else done + (failed or 0),
        failed=failed,
        problems=problems or (((None, "failed", "the batch failed"),) if tree["status"] == "failed" else ()),
        files=tuple(tree[name] for name in ("output_file_id", "error_file_id") if tree.get(name)),
        input_file=tree.get("input_file_id"),
    )


def _line(tree: Mapping[str, Any]) -> Line:
    response, error = tree.get("response"), tree.get("error")
    if isinstance(response, Mapping):
        status, body = response.get("status_code"), response.get("body")
        if status == 200 and isinstance(body, Mapping):
            return Line(tree["custom_id"], 200, {**body, "service_tier": "batch"})
        return Line(tree["custom_id"], status if isinstance(status, int) and status != 200 else 500, body)
    code = error.get("code") if isinstance(error, Mapping) else None
    return Line(tree["custom_id"], None, str(code or "no outcome"))
