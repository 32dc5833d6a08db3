"""Messages between a run and the processes that execute its trials, over the socket that each child process has."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from fairtrial.base.isolation.child import HEADER, PART, SECRETS, hear_secrets, unpack
from fairtrial.base.isolation.runner import pack, pack_plain
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError
from fairtrial.runs.plan import PlannedTrial
from fairtrial.trials.context import TrialKey
from fairtrial.trials.sample_types import value_type_name

# To the process. The id of a message is that of a trial or of a question.
TRIAL: Final = b"t"
"""Execute a trial; a pickle."""
CANCEL: Final = b"c"
"""Cancel a trial; it is answered with `FAILED`."""
ANSWER: Final = b"a"
"""The answer to a question."""
END: Final = b"e"
"""Close the lifespan and end."""

# From the process.
READY: Final = b"y"
"""The lifespan is open."""
RESULT: Final = b"r"
"""The result of a trial, as `EvalReply` writes it."""
FAILED: Final = b"f"
"""A trial that could not be read, and why; or that was cancelled."""
ASK: Final = b"q"
"""A question: a slot of a limiter, the usage of a run, or the trace of a trial."""
WITHDRAW: Final = b"w"
"""The question is withdrawn, or the slot that it was answered with is free."""
TELL: Final = b"n"
"""What needs no answer: the outcome of a model call, its usage, a log record, secrets."""


def encode_trial(trial: PlannedTrial, remedy: str) -> bytes:
    """Return the content of a `TRIAL` message. Plain values take a tenth of the time that records do.

    Raises:
        NotSendableError: the sample exists only in this process; `remedy` is what the error advises.
    """
    sample, stored = trial.sample, trial.stored
    if stored is not None:  # Without what reads the store.
        stored = replace(stored, source=None, metadata=stored.own_metadata)
    metadata = dict(sample.metadata)
    values = (sample.id, sample.input, sample.expected, metadata, sample.has_expected)
    content = (tuple(trial.key), trial.ordinal, trial.sample_ordinal, trial.experiment, trial.attempt, stored, values)
    try:
        is_plain = not value_type_name(sample.input) and not value_type_name(sample.expected)
    except CodecError:
        is_plain = False
    return pack_plain(content) if is_plain else pack(content, f"sample {sample.id!r}", remedy=remedy)


def decode_trial(content: bytes) -> PlannedTrial:
    """Return the trial of a message from the process that started this one."""
    key, ordinal, sample_ordinal, experiment, attempt, stored, values = unpack(content)
    *values, has_expected = values
    sample = Sample(*values, has_expected=has_expected)
    return PlannedTrial(TrialKey(*key), ordinal, sample_ordinal, experiment, sample, attempt, stored)


type OnMessage = Callable[[bytes, int, bytes], None]
"""Called with the kind of a message, its id and its content."""

_RECEIVED_AT_ONCE = 1 << 18
_START = struct.Struct("!cQcQ")  # `PART`, the size of what follows it, kind and id.
_OWN_SIZE = 1 + 8
_HEAD = 1 + HEADER.size


class Channel:
    """One end of the connection. It sends what was written in one turn of the event loop together.

    Args:
        connection: The socket; its owner closes it.
        on_message: Called for each message.
        on_end: Called once with what the function in the process returned, or None when the connection has ended.
    """

    def __init__(
        self, connection: socket.socket, on_message: OnMessage, on_end: Callable[[bytes | None], None]
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._flushing = False
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)

    def send(self, kind: bytes, id: int, content: bytes = b"") -> None:
        """Send a message; it is dropped if the connection has ended."""
        if not self._open:
            return
        self._unsent += _START.pack(PART, _OWN_SIZE + len(content), kind, id)
        self._unsent += content
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Leave the socket to its owner; what could not be sent yet is dropped."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)

    def _flush(self) -> None:
        if not self._open:
            return
        try:
            sent = self._connection.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._end(None)
            return
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._connection, self._flush)
        else:
            self._loop.remove_writer(self._connection)
            self._flushing = False

    def _read(self) -> None:
        try:
            received = self._connection.recv(_RECEIVED_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._end(None)
            return
        buffer = self._received
        buffer += received
        start = 0
        while self._open and len(buffer) >= start + _HEAD:
            end = start + _HEAD + HEADER.unpack_from(buffer, start + 1)[0]
            if len(buffer) < end:
                break
            if buffer[start : start + 1] == SECRETS:
                hear_secrets(bytes(buffer[start + _HEAD : end]))
                start = end
                continue
            if buffer[start : start + 1] != PART:
                self._end(bytes(buffer[start + _HEAD : end]))
                return
            _, _, kind, id = _START.unpack_from(buffer, start)
            self._on_message(kind, id, bytes(buffer[start + _START.size : end]))
            start = end
        del buffer[:start]

    def _end(self, answer: bytes | None) -> None:
        self.close()
        self._on_end(answer)
