"""Finds out whether the queue of a fleet is in the database of the store, so that workers can store results there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairtrial.errors import MailboxError
from fairtrial.fleet.log import log
from fairtrial.fleet.queues import Broker, PostgresBroker
from fairtrial.runs.writer import ask_store
from fairtrial.store.protocol import RunStore

if TYPE_CHECKING:
    from fairtrial.mailbox.postgres import PostgresConnection
    from fairtrial.store.sql import SqlStore

_ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SharedDatabase:
    """The one database of a queue and a store."""

    connection: PostgresConnection
    store: SqlStore


async def find_shared_database(broker: Broker, store: RunStore) -> SharedDatabase | None:
    """Return the database that the queue and the store share; None if they are in different ones."""
    compare = getattr(store, "is_database_of", None)
    if compare is None or not isinstance(broker, PostgresBroker):
        return None
    connection: PostgresConnection = broker.connection
    loop = asyncio.get_running_loop()

    def look(key: int) -> tuple[bool, int | None]:
        statement = f"SELECT NOT pg_try_advisory_xact_lock({int(key)}), to_regclass('runs')::oid::bigint"
        asked = asyncio.run_coroutine_threadsafe(connection.ask("comparing queue and store", statement), loop)
        ((locked, table),) = asked.result(_ANSWER_SECONDS)
        return locked, table

    try:
        same = await ask_store(lambda: bool(compare(look)), "comparing queue and store")
    except (MailboxError, TimeoutError) as error:
        log.debug("workers will not store results themselves: %s", error)
        return None
    if not same:
        return None
    log.info("queue and store are in the same database: workers store results themselves")
    found: Any = store
    return SharedDatabase(connection, found)
