"""The keys of requests: the same call of the same trial has the same key in every process."""

from __future__ import annotations

import hashlib

from fairtrial.trials.context import TrialContext

INTENT_DIGITS = 12
KEY_DIGITS = 28


def request_key(trial: TrialContext, actor: str, address: str, body: str) -> str:
    """Count a call, and return its key: run, sample, repeat, attempt, actor, content, and the count of equal calls."""
    content = _digest(f"{actor}\0{address}\0{body}", 20)
    count = trial.count_call(f"batch {content}")
    key = trial.key
    parts = (key.run_id, key.experiment, key.sample_id, str(key.repeat), str(trial.attempt), content, str(count))
    return _digest("\0".join(parts), KEY_DIGITS // 2)


def custom_id(intent: str, key: str) -> str:
    """Return the id of a request in its batch: 40 hexadecimal digits, which every provider allows."""
    return intent + key


def account_digest(base_url: str, key: str) -> str:
    """Return what stands for an account in a store, which must not contain keys."""
    return _digest(f"{base_url}\0{key}", 8)


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
