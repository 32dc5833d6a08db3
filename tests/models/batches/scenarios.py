"""What goes wrong with batches of three requests, as set-ups of the model server, and what a client must make of it.

Each holds for OpenAI and for Anthropic, unless `providers` says otherwise. In all of them every request must be
answered in the end, with the answer to its own question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fairtrial.integrations.model_server import (
    BatchFault,
    BatchOptions,
    FaultRule,
    HalfSent,
    MalformedJson,
    ModelServer,
    RateLimited,
    ReplyLost,
)

type ProviderName = Literal["openai", "anthropic"]

REQUESTS = 3
SECONDS = 1000.0
_CREATE = r"^POST /v1/(messages/)?batches$"
_RESULTS = r"^GET .*/(content|results)$"


@dataclass(frozen=True, slots=True)
class BatchScenario:
    """One set-up.

    Attributes:
        name: A short name.
        expected: What a client must do.
        paid: How many requests the provider bills in all; more than three only if an answer that was paid for is lost
            at the provider.
        batches: How many batches exist at the end.
        faults: What happens to batches.
        server_faults: What happens to requests.
        list_lag_polls: How many lists do not show a new batch.
        foreign: How many batches of others precede each batch.
        providers: For which providers it holds.
    """

    name: str
    expected: str
    paid: int
    batches: int
    faults: tuple[BatchFault, ...] = ()
    server_faults: tuple[FaultRule, ...] = ()
    list_lag_polls: int = 0
    foreign: int = 0
    providers: tuple[ProviderName, ...] = ("openai", "anthropic")

    def server(self, *, rate: float = 0.0) -> ModelServer:
        """Return a server with this set-up, which echoes questions; its clock is moved by the test, or by `rate`."""
        options = BatchOptions(
            SECONDS, rate=rate, faults=self.faults, list_lag_polls=self.list_lag_polls, foreign=self.foreign
        )
        return ModelServer(batches=options, faults=self.server_faults)


def _first(kind: Literal["missing", "expired"], *lines: int) -> BatchFault:
    return BatchFault(kind, batches=(1,), lines=lines or None)


# Four faults that leave trials waiting for ever, lose paid answers, or pay twice, if a client does not expect them.
MISSING_LINE = BatchScenario(
    "missing_line",
    "The results lack a line: two requests are answered, the third goes into another batch. Nobody waits for ever.",
    paid=4,
    batches=2,
    faults=(_first("missing", 3),),
)
EXPIRED_LINE = BatchScenario(
    "expired_line",
    "A request expired: its line has an error code and no HTTP status. The finished requests are answered, only the "
    "expired one goes into another batch.",
    paid=3,
    batches=2,
    faults=(_first("expired", 2),),
)
LOST_REPLY = BatchScenario(
    "lost_reply",
    "The provider accepted the batch, and its reply was lost: the client finds the batch in the list and sends none.",
    paid=3,
    batches=1,
    server_faults=(FaultRule(ReplyLost(), when=_CREATE, attempts=(1,)),),
)
ENDED_WITHOUT_FILES = BatchScenario(
    "ended_without_files",
    "A batch expired before any of its requests was executed, and has no files: it has ended, and its requests go into "
    "another batch.",
    paid=3,
    batches=2,
    faults=(_first("expired"), BatchFault("no_files", batches=(1,))),
)

SCENARIOS = (
    MISSING_LINE,
    EXPIRED_LINE,
    LOST_REPLY,
    ENDED_WITHOUT_FILES,
    BatchScenario(
        "gateway_timeout",
        "As lost_reply, but the reply is replaced by a status 504.",
        paid=3,
        batches=1,
        server_faults=(FaultRule(ReplyLost(504), when=_CREATE, attempts=(1,)),),
    ),
    BatchScenario(
        "lost_reply_and_late_list",
        "As lost_reply, but the list shows the batch late, and shows batches of others of the same size before.",
        paid=3,
        batches=1,
        server_faults=(FaultRule(ReplyLost(), when=_CREATE, attempts=(1,)),),
        list_lag_polls=2,
        foreign=1,
    ),
    BatchScenario(
        "refused_create",
        "The provider refuses the first create with status 429: nothing was done, so the client sends again.",
        paid=3,
        batches=1,
        server_faults=(FaultRule(RateLimited(), when=_CREATE, attempts=(1,)),),
    ),
    BatchScenario(
        "odd_lines",
        "The results are in another order, with a line twice and a line that nobody asked for: each counts once.",
        paid=3,
        batches=1,
        faults=(BatchFault("reordered"), BatchFault("duplicate", lines=(1,)), BatchFault("unknown", lines=(2,))),
    ),
    BatchScenario(
        "results_cut_off",
        "The connection ends in the middle of the results: they are read again.",
        paid=3,
        batches=1,
        server_faults=(FaultRule(HalfSent(0.4), when=_RESULTS, attempts=(1,)),),
    ),
    BatchScenario(
        "results_end_in_a_line",
        "The results end in the middle of a line without an error of the transport: they are read again.",
        paid=3,
        batches=1,
        server_faults=(FaultRule(MalformedJson(), when=_RESULTS, attempts=(1,)),),
    ),
    BatchScenario(
        "failed_after_create",
        "The batch is accepted and then fails, for too many enqueued tokens although no other is under way: its "
        "requests go into batches of half its size.",
        paid=3,
        batches=4,
        faults=(BatchFault("failed", batches=(1,)),),
        providers=("openai",),
    ),
    BatchScenario(
        "results_gone",
        "The batch has ended, but its results answer 404: its requests go into another batch, paid for again.",
        paid=6,
        batches=2,
        faults=(BatchFault("gone", batches=(1,)),),
    ),
)
