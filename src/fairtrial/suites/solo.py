"""One trial in a process of its own: `python -m fairtrial.suites.solo SUITE DESCRIPTOR`, started by a worker.

The request comes on standard input, the reply goes to the descriptor. If the trial ends the process, that is the
answer: it was not its neighbours who did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence

from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.mailbox.memory import InMemoryMailbox
from fairtrial.runs.runner import open_lifespan
from fairtrial.suites.loading import load_suite
from fairtrial.suites.suite import EvalSuite
from fairtrial.suites.worker import make_loop


async def execute_alone(suite: EvalSuite, request: EvalRequest) -> EvalReply:
    """Execute and score one request of a suite."""
    async with open_lifespan(suite.lifespan) as shared:
        loop = make_loop(suite, InMemoryMailbox("alone", EvalRequest), shared=shared)
        return await loop.execute_alone(request)


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the request on standard input."""
    where, descriptor = sys.argv[1:] if arguments is None else arguments
    request = EvalRequest.from_wire(sys.stdin.buffer.read())
    answer = asyncio.run(execute_alone(load_suite(where), request)).to_wire()
    with contextlib.suppress(BrokenPipeError), os.fdopen(int(descriptor), "wb") as out:
        out.write(answer)  # The worker may have been killed meanwhile; then another one asks again.
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
