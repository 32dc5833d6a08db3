"""One trial in a process of its own: `python -m fairtrial.suites.solo SUITE DESCRIPTOR`, started by a worker.

The request comes on standard input, the reply goes to the descriptor. If the trial ends the process, that is the
answer: it was not its neighbours who did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.fleet.solo import NOT_STARTED
from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.mailbox.memory import InMemoryMailbox
from fairtrial.runs.runner import open_lifespan
from fairtrial.suites.loading import load_suite
from fairtrial.suites.suite import EvalSuite
from fairtrial.suites.worker import make_loop


class NotStartedError(Exception):
    """The trial could not even begin: what all trials share does not open."""


async def execute_alone(suite: EvalSuite, request: EvalRequest) -> EvalReply:
    """Execute and score one request of a suite.

    Raises:
        NotStartedError: the suite's lifespan does not open.
    """
    async with AsyncExitStack() as stack:
        lifespan = open_lifespan(suite.lifespan)
        try:
            shared = await lifespan.__aenter__()
        except Exception as error:
            raise NotStartedError(f"the suite's lifespan does not open: {error!r}") from error
        stack.push_async_callback(_closed, lifespan)
        loop = make_loop(suite, InMemoryMailbox("alone", EvalRequest), shared=shared)
        return await loop.execute_alone(request)


async def _closed(lifespan: AbstractAsyncContextManager[Any]) -> None:
    try:
        await lifespan.__aexit__(None, None, None)
    except Exception:
        traceback.print_exc()  # The trial is done, and its result must not be lost by this.


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the request on standard input."""
    where, descriptor = sys.argv[1:] if arguments is None else arguments
    request = EvalRequest.from_wire(sys.stdin.buffer.read())
    try:
        answer = asyncio.run(execute_alone(load_suite(where), request)).to_wire()
    except (ConfigurationError, NotStartedError) as error:  # Code on disk may have changed since the worker started.
        answer = NOT_STARTED + str(error).encode("utf-8", "replace")
    with contextlib.suppress(BrokenPipeError), os.fdopen(int(descriptor), "wb") as out:
        out.write(answer)  # The worker may have been killed meanwhile; then another one asks again.
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
