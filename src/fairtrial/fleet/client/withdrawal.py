"""Withdraws the requests of a stopped run that no worker has begun."""

from __future__ import annotations

from fairtrial.errors import MailboxConnectionError
from fairtrial.fleet.client.batches import acknowledge, hand_back
from fairtrial.fleet.client.fleet_run import FleetRun
from fairtrial.fleet.log import log
from fairtrial.fleet.messages import EvalRequest
from fairtrial.mailbox.protocol import Message


async def withdraw_requests(fleet: FleetRun, *, stale_only: bool = False) -> list[int]:
    """Remove the requests of a run that no worker has begun from the mailbox; returns the ordinals of their trials.

    With `stale_only`, only requests made from other code than this client's.
    """
    withdrawn: list[int] = []
    others: list[Message[EvalRequest]] = []
    try:
        while messages := await fleet.requests.receive(fleet.config.batch, fleet.config.lease_seconds, 0):
            ours: list[Message[EvalRequest]] = []
            for message in messages:
                body = message.body
                stale = body.fingerprint != fleet.fingerprint
                mine = body.key.run_id == fleet.run_id and (stale or not stale_only)
                (ours if mine else others).append(message)
            await acknowledge(fleet.requests, ours)
            withdrawn += [message.body.ordinal for message in ours]
    except MailboxConnectionError as error:
        log.warning("waiting requests could not be withdrawn: %s", error)
    await hand_back(others)
    return withdrawn
