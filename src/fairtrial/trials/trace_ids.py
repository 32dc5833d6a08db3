"""The ids of the OpenTelemetry trace of a trial, derived from its key: the same trial is the same trace everywhere."""

from __future__ import annotations

import hashlib
from zlib import crc32

from fairtrial.trials.keys import TrialKey


def trace_id_of(key: TrialKey, attempt: int) -> bytes:
    """Return the 16 bytes of the trace id of one attempt at a trial."""
    return _digest(f"{key.run_id}\0{key.experiment}\0{key.sample_id}\0{key.repeat}\0{attempt}", 16)


def trial_span_id(trace_id: bytes) -> bytes:
    """Return the 8 bytes of the id of the trial's own span, the root of its trace."""
    return hashlib.blake2b(trace_id, digest_size=8, person=b"trial").digest()


def event_span_id(trace_id: bytes, sequence: int) -> bytes:
    """Return the id of the span of a recorded event, by its number in the session."""
    return hashlib.blake2b(trace_id + sequence.to_bytes(8, "big"), digest_size=8, person=b"event").digest()


def traceparent_of(key: TrialKey, attempt: int) -> str:
    """Return the W3C `traceparent` that makes spans children of the trial's own span."""
    trace_id = trace_id_of(key, attempt)
    return f"00-{trace_id.hex()}-{trial_span_id(trace_id).hex()}-01"


def is_sampled(key: TrialKey, share: float) -> bool:
    """Decide by a hash of the key whether a trial belongs to a sample of this share of all trials."""
    if share >= 1.0:
        return True
    # Not the trace id: the decision must be the same for every attempt, and this costs a third.
    content = f"{key.run_id}\0{key.experiment}\0{key.sample_id}\0{key.repeat}"
    return crc32(content.encode("utf-8", "surrogatepass")) < share * 2**32


def _digest(content: str, size: int) -> bytes:
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=size).digest()
