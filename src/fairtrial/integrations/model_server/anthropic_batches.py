"""Anthropic's message batches."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from fairtrial.integrations.model_server.batch_account import DAY, BatchLine, HostedBatch
from fairtrial.integrations.model_server.batch_wire import BatchApiError, BatchCall, ProviderBatchApi
from fairtrial.integrations.model_server.openai_wire import to_bytes

_CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class AnthropicBatchApi(ProviderBatchApi):
    """Anthropic's message batches."""

    name = "anthropic"
    prefix = "msgbatch_"
    max_requests, max_bytes, page_limit = 100_000, 256 * 1024 * 1024, 1000

    def post(self, call: BatchCall) -> dict[str, Any]:
        """Create a batch. The parameters of its requests are validated when they are executed."""
        options, rows = self.options, call.json().get("requests")
        if len(call.body) > (options.max_bytes or self.max_bytes):
            raise BatchApiError(413, "Request exceeds the maximum size")
        if not isinstance(rows, list) or not rows:
            raise BatchApiError(400, "requests: at least one is required")
        if len(rows) > (limit := options.max_requests or self.max_requests):
            raise BatchApiError(400, f"requests: at most {limit} are allowed (got {len(rows)})")
        lines = []
        for place, row in enumerate(rows):
            if not isinstance(row, dict) or not isinstance(row.get("params"), dict):
                raise BatchApiError(400, f"requests.{place}.params: Field required")
            if not isinstance(row.get("custom_id"), str) or not _CUSTOM_ID.fullmatch(row["custom_id"]):
                raise BatchApiError(
                    400, f"requests.{place}.custom_id: String should match pattern {_CUSTOM_ID.pattern}"
                )
            lines.append(BatchLine(row["custom_id"], row["params"]))
        if len({line.custom_id for line in lines}) < len(lines):
            raise BatchApiError(400, "requests: each custom_id must be unique within a batch")
        new_id, now = self.host.new_id(self.prefix), self.host.clock.now()
        batch = HostedBatch(new_id, "/v1/messages", now, options.seconds, lines)
        return self.show(self.create(batch), call)

    def list(self, call: BatchCall) -> dict[str, Any]:
        """Return a page of the list of batches."""
        return self._page(call, "after_id", "before_id")

    def store_results(self, batch: HostedBatch) -> None:
        """Nothing is stored: the results are no file."""

    def content(self, call: BatchCall) -> bytes:
        """Return the results of a batch that has ended."""
        batch = self._find(call)
        if not batch.ended or batch.faults & {"no_files", "gone"}:
            raise BatchApiError(404, f"there are no results of batch {batch.id!r}")
        return self.results(batch, batch.lines)

    def cancel(self, call: BatchCall) -> dict[str, Any]:
        """Start to cancel a batch; repeating it changes nothing."""
        batch = self._find(call)
        if batch.ended:
            raise BatchApiError(400, f"Batch {batch.id} cannot be canceled because it has already ended.")
        return self._stop(batch, call)

    def delete(self, call: BatchCall) -> dict[str, Any]:
        """Delete a batch that has ended."""
        batch = self._find(call)
        if not batch.ended:
            raise BatchApiError(400, f"Batch {batch.id} cannot be deleted while it is being processed.")
        batch.deleted = True
        return {"id": batch.id, "type": "message_batch_deleted"}

    def status(self, batch: HostedBatch, now: float) -> str:
        """The name of the batch's state."""
        return {"ended": "ended", "cancelling": "canceling"}.get(batch.phase(now), "in_progress")

    def show(self, batch: HostedBatch, call: BatchCall) -> dict[str, Any]:
        """Return a batch as the provider shows it; the counts stay 0 until it has ended."""
        succeeded, canceled, expired = batch.count("succeeded"), batch.count("canceled"), batch.count("expired")
        total, counted = len(batch.lines), batch.ended and "counts_hidden" not in batch.faults
        has_results = batch.ended and "no_files" not in batch.faults
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": self.status(batch, self.host.clock.now()),
            "request_counts": {
                "processing": 0 if counted else total,
                "succeeded": succeeded if counted else 0,
                "errored": total - succeeded - canceled - expired if counted else 0,
                "canceled": canceled if counted else 0,
                "expired": expired if counted else 0,
            },
            "created_at": _rfc3339(batch.created),
            "expires_at": _rfc3339(batch.created + DAY),
            "ended_at": _rfc3339(batch.end) if batch.ended else None,
            "cancel_initiated_at": None if batch.cancelled is None else _rfc3339(batch.cancelled),
            "archived_at": None,
            "results_url": f"{call.origin}/v1/messages/batches/{batch.id}/results" if has_results else None,
        }

    def line(self, number: int, line: BatchLine, result: dict[str, Any], status: int) -> bytes:
        """A line of the results."""
        if status == 200:
            return _result_line(line, {"type": "succeeded", "message": result})
        return _result_line(line, {"type": "errored", "error": result})

    def stopped(self, number: int, line: BatchLine) -> bytes:
        """A line of the results, for a request that was not executed."""
        return _result_line(line, {"type": line.outcome})


def _result_line(line: BatchLine, result: dict[str, Any]) -> bytes:
    return to_bytes({"custom_id": line.custom_id, "result": result})


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
