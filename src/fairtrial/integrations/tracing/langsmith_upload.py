"""Uploads a stored run to LangSmith as experiments that ran elsewhere, or writes the requests to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO
from urllib.parse import urlsplit

import anyio

from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError, TraceSendError
from fairtrial.integrations.tracing.endpoint import FROM_ENVIRONMENT
from fairtrial.integrations.tracing.files import write_whole
from fairtrial.integrations.tracing.langsmith import MAX_ROWS, UploadRequest, rejected_rows, upload_requests
from fairtrial.integrations.tracing.posting import HttpAnswer, HttpPoster
from fairtrial.store.redact import register_guess

if TYPE_CHECKING:
    from fairtrial.store.protocol import RunRecord, RunStore

_CLOUD = "https://api.smith.langchain.com"
_PATH = "/datasets/upload-experiment"
_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_CONFLICT = 409  # It has an experiment of this name.
_TIMEOUT_SECONDS = 120.0
_NAMED_ROWS = 3  # Rows that an error message names.


@first_is(int)
@dataclass(slots=True)
class UploadTotals:
    """What became of the experiments of a run, and the number of trials in those that were created."""

    created: int = 0
    existing: int = 0  # LangSmith had them already: they were uploaded before.
    unconfirmed: int = 0  # LangSmith has them since an attempt that it did not answer.
    trials: int = 0


def upload_run(
    store: RunStore,
    run: RunRecord,
    url: str = FROM_ENVIRONMENT,
    *,
    content: bool = False,
    max_rows: int = MAX_ROWS,
    patience_seconds: float = 60.0,
) -> UploadTotals:
    """Upload a stored run to LangSmith: each of its experiments becomes one there, in the dataset of its name.

    The key is read from LANGSMITH_API_KEY, the workspace from LANGSMITH_WORKSPACE_ID. Uploading again creates nothing
    twice and continues where an earlier upload ended.

    Args:
        store: The store of the run.
        run: The run.
        url: The address of LangSmith; "env" for LANGSMITH_ENDPOINT, or else its cloud.
        content: Include inputs, outputs, expected values, parameters, errors and reasons; secrets are replaced.
        max_rows: The largest number of trials in a request. An experiment with more is uploaded in parts.
        patience_seconds: For how long a request is repeated while the server is busy or away.

    Raises:
        TraceSendError: If the server refuses an experiment, or stays busy or away.
    """
    _check_rows(max_rows)
    address, headers = resolve_langsmith(url)
    poster = HttpPoster(
        "uploading experiments", _RETRIED_STATUSES, timeout_seconds=_TIMEOUT_SECONDS, patience_seconds=patience_seconds
    )

    async def upload() -> UploadTotals:
        totals = UploadTotals()
        async with poster:
            for request in upload_requests(store, run, content=content, max_rows=max_rows):
                try:
                    answer = await poster.post(f"experiment {request.name!r}", address, request.body, headers)
                    _count(totals, request, answer)
                except TraceSendError as error:
                    raise TraceSendError(f"{error}{_progress(totals)}") from None
        return totals

    return anyio.run(upload)


def write_experiments(
    store: RunStore, run: RunRecord, target: Path | TextIO, *, content: bool = False, max_rows: int = MAX_ROWS
) -> int:
    """Write the requests of an upload as JSON lines; returns their number. A file appears when it is complete."""
    _check_rows(max_rows)

    def write(file: TextIO) -> int:
        count = 0
        for request in upload_requests(store, run, content=content, max_rows=max_rows):
            file.write(request.body.decode("utf-8") + "\n")
            count += 1
        return count

    return write_whole(target, write)


def resolve_langsmith(url: str, environ: Mapping[str, str] = os.environ) -> tuple[str, dict[str, str]]:
    """Return the address of the endpoint and the headers of its requests."""
    base, key = langsmith_address(environ, "upload experiments", None if url == FROM_ENVIRONMENT else url)
    version = "" if base.endswith("/api/v1") else "/v1" if base.endswith("/api") else "/api/v1"
    headers = {"Content-Type": "application/json", "x-api-key": key}
    workspace = environ.get("LANGSMITH_WORKSPACE_ID", "").strip()
    return f"{base}{version}{_PATH}", headers | ({"x-tenant-id": workspace} if workspace else {})


def langsmith_address(environ: Mapping[str, str], purpose: str, url: str | None = None) -> tuple[str, str]:
    """Return the address of LangSmith, from the environment unless it is given, and the key, a secret from then on."""
    base = environ.get("LANGSMITH_ENDPOINT") or _CLOUD if url is None else url
    base = base.strip().rstrip("/").removesuffix(_PATH)
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"the address of LangSmith must be an http:// or https:// URL (got {base!r})")
    key = environ.get("LANGSMITH_API_KEY", "").strip()
    if not key:
        raise ConfigurationError(f"LANGSMITH_API_KEY must be set to {purpose} (it is not set)")
    register_guess(key, "key", "the value of $LANGSMITH_API_KEY")
    return base, key


def _count(totals: UploadTotals, request: UploadRequest, answer: HttpAnswer) -> None:
    if answer.status == _CONFLICT:
        if answer.attempts > 1:
            totals.unconfirmed += 1
        else:
            totals.existing += 1
    elif answer.accepted and _names_experiment(answer.body):
        totals.created += 1
        totals.trials += len(request.sample_ids)
    elif answer.accepted:
        raise TraceSendError(f"{answer}, but not with an experiment: is this the address of LangSmith?")
    else:
        raise TraceSendError(f"experiment {request.name!r} was refused: {_reason(answer, request)}")


def _names_experiment(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body)["experiment"], dict)
    except (ValueError, LookupError, TypeError):
        return False


def _reason(answer: HttpAnswer, request: UploadRequest) -> str:
    rows = rejected_rows(answer.body, request)
    if not rows:
        return str(answer)
    named = "; ".join(f"sample {sample_id!r}: {problem}" for sample_id, problem in list(rows.items())[:_NAMED_ROWS])
    more = len(rows) - _NAMED_ROWS
    return f"the server answered {answer.status}: {named}" + (f"; and {more:,} more" if more > 0 else "")


def _progress(totals: UploadTotals) -> str:
    there = totals.created + totals.existing + totals.unconfirmed
    return f" ({there:,} of its experiments are there)" if there else ""


def _check_rows(max_rows: int) -> None:
    if max_rows < 1:
        raise ConfigurationError(f"max_rows must be at least 1 (got {max_rows!r})")
