"""Errors of attempts: whose they are, how they are described, and when to try again."""

from __future__ import annotations

import dis
import random
import signal
import traceback
import types
from functools import partial
from typing import Any

import anyio

from fairtrial.base.backoff import longest_pause
from fairtrial.base.offload import on_trio

_MAX_ERROR = 10_000
MAX_PAUSE = 60.0  # Between two attempts at one trial.


async def raise_if_external(error: BaseException) -> None:
    """Re-raise errors from outside: a cancellation, Ctrl-C, the end of the coroutine. Others belong to the trial."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit) and not _is_raised_by_code(error):
        raise error
    if isinstance(error, anyio.get_cancelled_exc_class()):
        if not on_trio():
            import asyncio

            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise error
        await anyio.lowlevel.checkpoint_if_cancelled()


def _is_raised_by_code(error: BaseException) -> bool:
    """Distinguish `raise KeyboardInterrupt` in user code from the same error raised by a signal.

    A signal without a handler of Python's own interrupts any instruction but `raise`; one with a handler shows the
    handler in the traceback. `GeneratorExit` arrives in the same way, at an `await`.
    """
    handlers = {_code_of(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)} - {None}
    innermost = error.__traceback__
    if innermost is None:
        return False
    while True:
        if innermost.tb_frame.f_code in handlers:
            return False
        if innermost.tb_next is None:
            break
        innermost = innermost.tb_next
    instruction = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return isinstance(error, SystemExit) or dis.opname[instruction] == "RAISE_VARARGS"


def _code_of(handler: Any) -> types.CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    found = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return found if isinstance(found, types.CodeType) else None


def read_retry_after(error: BaseException) -> float | None:
    """Return the pause that an error asks for, in seconds."""
    try:
        wanted = getattr(error, "retry_after", None)
        return float(wanted) if isinstance(wanted, int | float) and wanted >= 0 else None
    except Exception:
        return None  # A property that raises; the error itself is reported.


def retry_pause(failures: int, retry_after: float | None) -> float:
    """Return the seconds to wait before the next attempt."""
    # Full jitter spreads the retries of trials that failed together.
    if retry_after is not None:
        return min(retry_after, MAX_PAUSE)
    return random.uniform(0.0, longest_pause(failures, first=1.0, longest=30.0))  # noqa: S311 - a delay, not a secret


def describe_error(error: BaseException | str | None) -> str:
    """Return the type and the message of an error, truncated to a length that can be stored."""
    if isinstance(error, str) or error is None:
        return error or ""
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        text = type(error).__name__
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + " ..."
