"""OpenAI's files and batches."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from fairtrial.integrations.model_server.batch_account import (
    BEGIN,
    DAY,
    END,
    REFUSED,
    BatchLine,
    HostedBatch,
    HostedFile,
    problem,
    tokens_in,
)
from fairtrial.integrations.model_server.batch_wire import BatchApiError, BatchCall, ProviderBatchApi
from fairtrial.integrations.model_server.openai_wire import to_bytes


class OpenAIBatchApi(ProviderBatchApi):
    """OpenAI's files and batches."""

    name = "openai"
    prefix = "batch_"
    max_requests, max_bytes, page_limit = 50_000, 200 * 1024 * 1024, 100

    def upload(self, call: BatchCall) -> dict[str, Any]:
        """Store a file."""
        sent = call.form.get("file")
        if not isinstance(sent, web.FileField) or "purpose" not in call.form:
            raise BatchApiError(400, "a multipart form with `file` and `purpose` is required")
        if call.form["purpose"] == "batch" and not sent.filename.endswith(".jsonl"):
            raise BatchApiError(400, "Invalid file format for Batch API. Must be .jsonl")
        stored = self._store(sent.file.read(), sent.filename, call.form["purpose"])
        return self.get_file(call._replace(ids=(stored.id,)))

    def _store(self, content: bytes, filename: str, purpose: str) -> HostedFile:
        stored = HostedFile(self.host.new_id("file-"), content, filename, purpose, self.host.clock.now())
        self.host.files[stored.id] = stored
        return stored

    def store_results(self, batch: HostedBatch) -> None:
        """Store the output file and the error file of a batch, if they have lines."""
        done = [line for line in batch.lines if line.outcome == "succeeded"]
        others = [line for line in batch.lines if line.outcome != "succeeded"]
        for name, lines in (("output", done), ("error", others)):
            if text := self.results(batch, lines):
                batch.files[name] = self._store(text, f"{batch.id}_{name}.jsonl", "batch_output").id
                if "gone" in batch.faults:
                    del self.host.files[batch.files[name]]

    def get_file(self, call: BatchCall) -> dict[str, Any]:
        """Return what is known of a file."""
        stored = self.host.files.get(call.ids[0])
        if stored is None:
            raise BatchApiError(404, f"No such File object: {call.ids[0]}")
        sizes = {"bytes": len(stored.content), "created_at": int(stored.created), "expires_at": None}
        names = {"id": stored.id, "object": "file", "filename": stored.filename, "purpose": stored.purpose}
        return {**names, **sizes, "status": "processed", "status_details": None}

    def list_files(self, call: BatchCall) -> dict[str, Any]:
        """Return a page of the list of files, newest first."""
        purpose, limit = call.query.get("purpose"), int(call.query.get("limit", 10_000))
        shown = [name for name, file in self.host.files.items() if purpose in (None, file.purpose)][::-1]
        start = shown.index(call.query["after"]) + 1 if "after" in call.query else 0
        data = [self.get_file(call._replace(ids=(name,))) for name in shown[start : start + limit]]
        return {"object": "list", "data": data, "has_more": start + limit < len(shown)}

    def content(self, call: BatchCall) -> bytes:
        """Return the content of a file."""
        self.get_file(call)
        return self.host.files[call.ids[0]].content

    def delete_file(self, call: BatchCall) -> dict[str, Any]:
        """Delete a file."""
        self.get_file(call)
        del self.host.files[call.ids[0]]
        return {"id": call.ids[0], "object": "file", "deleted": True}

    def post(self, call: BatchCall) -> dict[str, Any]:
        """Create a batch. The file is validated afterwards: a batch with a bad one becomes `failed`."""
        body = call.json()
        if body.get("completion_window") != "24h":
            raise BatchApiError(400, "completion_window: must be 24h")
        if (endpoint := body.get("endpoint")) not in ("/v1/chat/completions", "/v1/responses"):
            raise BatchApiError(400, f"endpoint: there are no batches of {endpoint} here")
        metadata = body.get("metadata") or {}
        if len(metadata) > 16 or any(
            not isinstance(value, str) or len(name) > 64 or len(value) > 512 for name, value in metadata.items()
        ):
            raise BatchApiError(400, "metadata: at most 16 texts of 512 characters, with keys of 64")
        file_id = str(body.get("input_file_id"))
        stored = self.host.files.get(file_id)
        if stored is None or stored.purpose != "batch":
            raise BatchApiError(404, f"No such File object: {file_id}")
        now, seconds = self.host.clock.now(), self.options.seconds
        lines, problems = self._validate(stored.content, endpoint)
        batch = HostedBatch(
            self.host.new_id(self.prefix), endpoint, now, seconds, lines, 0, metadata, file_id, problems
        )
        limit = self.options.enqueued_tokens
        if not problems and limit is not None and self.enqueued(batch.model) + tokens_in(batch) > limit:
            text = f"Enqueued token limit reached for {batch.model}. Limit: {limit} enqueued tokens."
            problems.append(problem("token_limit_exceeded", text))
        return self.show(self.create(batch), call)

    def _validate(self, content: bytes, endpoint: str) -> tuple[list[BatchLine], list[dict[str, Any]]]:
        options, lines, problems, models = self.options, [], [], set[str]()
        seen = set[str]()
        if len(content) > (options.max_bytes or self.max_bytes):
            return [], [problem("file_too_large", "The file is larger than a batch may be.")]
        for number, row_text in enumerate(content.split(b"\n"), 1):
            if not row_text.strip():
                continue
            try:
                row = json.loads(row_text)
                custom_id, body = row["custom_id"], row["body"]
                method, url = row["method"], row["url"]
            except (ValueError, TypeError):
                problems.append(problem("invalid_json_line", "This line is not parseable as valid JSON.", number))
                continue
            except KeyError as missing:
                text = f"Missing required parameter: {missing}."
                problems.append(problem("missing_required_parameter", text, number, str(missing.args[0])))
                continue
            if method != "POST" or url != endpoint:
                problems.append(problem("url_mismatch", "The URL is not that of the batch.", number, "url"))
            if custom_id in seen:
                problems.append(problem("duplicate_custom_id", f"{custom_id} occurs twice.", number, "custom_id"))
            seen.add(custom_id)
            models.add(str(body.get("model")))
            if len(models) > 1:
                problems.append(problem("model_mismatch", "A batch has one model.", number, "body.model"))
            lines.append(BatchLine(custom_id, body))
        if not lines and not problems:
            problems.append(problem("empty_file", "The file has no requests."))
        if len(lines) > (options.max_requests or self.max_requests):
            problems.append(problem("too_many_tasks", "The file has more requests than a batch may have."))
        return lines, problems

    def list(self, call: BatchCall) -> dict[str, Any]:
        """Return a page of the list of batches."""
        return {"object": "list", **self._page(call, "after")}

    def cancel(self, call: BatchCall) -> dict[str, Any]:
        """Start to cancel a batch; repeating it changes nothing."""
        batch = self._find(call)
        status = self.status(batch, self.host.clock.now())
        if status in ("completed", "failed", "expired"):
            raise BatchApiError(409, f"Cannot cancel a batch with status '{status}'.")
        return self._stop(batch, call)

    def status(self, batch: HostedBatch, now: float) -> str:
        """The name of the batch's state."""
        phase = batch.phase(now)
        if phase != "ended":
            return phase
        if batch.problems:
            return "failed"
        if batch.cancelled is not None:
            return "cancelled"
        return "expired" if batch.count("expired") else "completed"

    def show(self, batch: HostedBatch, call: BatchCall) -> dict[str, Any]:
        """Return a batch as the provider shows it."""
        now = self.host.clock.now()
        status, span = self.status(batch, now), batch.seconds
        started = None if status in ("validating", "failed") else int(batch.created + BEGIN * span)
        finalized = status in ("finalizing", "completed")
        ended = {f"{state}_at": int(batch.end) if status == state else None for state in _ENDS}
        counted = status not in ("validating", "failed") and "counts_hidden" not in batch.faults
        done = batch.count("succeeded")
        failed = batch.count(*REFUSED)
        usage = batch.usage if batch.ended else []
        tokens = [sum(one.input_tokens for one in usage), sum(one.output_tokens for one in usage)]
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "model": batch.model,
            "errors": {"object": "list", "data": batch.problems} if status == "failed" else None,
            "input_file_id": batch.input_file,
            "completion_window": "24h",
            "status": status,
            "output_file_id": batch.files.get("output"),
            "error_file_id": batch.files.get("error"),
            "created_at": int(batch.created),
            "in_progress_at": started,
            "expires_at": int(batch.created + DAY),
            "finalizing_at": int(batch.created + END * span) if finalized else None,
            "cancelling_at": None if batch.cancelled is None else int(batch.cancelled),
            **ended,
            "request_counts": {
                "total": len(batch.lines) if counted else 0,
                "completed": done if counted else 0,
                "failed": failed if counted else 0,
            },
            "usage": {
                "input_tokens": tokens[0],
                "input_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in usage)},
                "output_tokens": tokens[1],
                "output_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in usage)},
                "total_tokens": sum(tokens),
            },
            "metadata": batch.metadata or None,
        }

    def line(self, number: int, line: BatchLine, result: dict[str, Any], status: int) -> bytes:
        """A line of the output file or the error file."""
        response = {"status_code": status, "request_id": f"req_{number}", "body": result}
        return _output_line(number, line, response, None)

    def stopped(self, number: int, line: BatchLine) -> bytes:
        """A line of the error file, for a request that was not executed."""
        if line.outcome == "expired":
            text = "This request could not be executed before the completion window expired."
            return _output_line(number, line, None, {"code": "batch_expired", "message": text})
        text = "This request could not be executed before the batch was cancelled."
        return _output_line(number, line, None, {"code": "batch_cancelled", "message": text})


_ENDS = ("completed", "failed", "expired", "cancelled")


def _output_line(number: int, line: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    row = {"id": f"batch_req_{number}", "custom_id": line.custom_id, "response": response, "error": error}
    return to_bytes(row)
