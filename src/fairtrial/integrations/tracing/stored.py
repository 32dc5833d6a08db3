"""Exports a stored run as OTLP: to a server, or to a file of OTLP's JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import anyio

from fairtrial.integrations.tracing.endpoint import resolve_endpoint
from fairtrial.integrations.tracing.facts import trials_with_samples
from fairtrial.integrations.tracing.files import write_whole
from fairtrial.integrations.tracing.profiles import profile_named
from fairtrial.integrations.tracing.protocol_buffers import otlp_messages
from fairtrial.integrations.tracing.requests import json_lines
from fairtrial.integrations.tracing.sender import OtlpSender, SendTotals
from fairtrial.integrations.tracing.spans import ConvertedTrial, TrialConverter

if TYPE_CHECKING:
    from fairtrial.store.protocol import RunRecord, RunStore

_BATCH = 128


def converted_trials(
    store: RunStore, run: RunRecord, *, content: bool = False, profile: str | None = None
) -> Iterator[ConvertedTrial]:
    """Yield the trials of a stored run as spans and log records, in the order of the plan."""
    converter = TrialConverter.of_run(run, content=content, profile=profile_named(profile))
    for result, sample in trials_with_samples(store, run, content=content, snapshots=True):
        yield converter.convert(result, sample)


def send_run(
    store: RunStore, run: RunRecord, url: str, *, content: bool = False, profile: str | None = None
) -> SendTotals:
    """Send a stored run to an OTLP endpoint. Raises `TraceSendError` if that fails."""
    otlp_messages("sending traces")
    endpoint = resolve_endpoint(url)

    async def send() -> SendTotals:
        async with OtlpSender(endpoint) as sender:
            for trials in batched(converted_trials(store, run, content=content, profile=profile), _BATCH):
                await sender.send(trials, run.suite)
            return sender.totals

    return anyio.run(send)


def write_run(
    store: RunStore, run: RunRecord, target: Path | TextIO, *, content: bool = False, profile: str | None = None
) -> int:
    """Write a stored run as lines of OTLP's JSON; returns the number of trials. A file appears when it is complete."""
    otlp_messages("exporting traces")

    def write(file: TextIO) -> int:
        count = 0
        for trials in batched(converted_trials(store, run, content=content, profile=profile), _BATCH):
            spans = [span for trial in trials for span in trial.spans]
            logs = [log for trial in trials for log in trial.logs]
            for line in json_lines(spans, logs, run.suite):
                file.write(line + "\n")
            count += len(trials)
        return count

    return write_whole(target, write)
