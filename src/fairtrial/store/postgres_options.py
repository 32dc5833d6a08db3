"""Options of connections to PostgreSQL, shared by stores and mailboxes."""

from __future__ import annotations

import logging
import os
from typing import Any

ISOLATION = r"-c default_transaction_isolation=read\ committed"
"""What our statements are made for, whatever the database has as its default: others fail where these wait or skip."""
POSTGRES_SETTINGS: dict[str, Any] = {
    "application_name": "fairtrial",
    "connect_timeout": 10,
    # A server that does not respond for 30 s is given up, for reads and for unacknowledged writes.
    # The limits of the kernel are two hours and about 15 minutes.
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

log = logging.getLogger("fairtrial.store")
_warned: set[str] = set()


def warn_about_plain_text(host: str, sslmode: object, owner: str) -> None:
    """Warn, once per host, if the connection may be unencrypted or the server is not authenticated.

    Args:
        host: The host name, or the folder of a socket.
        sslmode: The value in the URL; None if there is none.
        owner: What the address belongs to, for the message.
    """
    local = host in ("", "localhost", "::1") or host.startswith(("/", "127."))
    if local or sslmode is not None or "PGSSLMODE" in os.environ or host in _warned:
        return
    _warned.add(host)
    log.warning(
        "the connection to PostgreSQL on %s may be unencrypted, and the server's identity is not checked: add "
        "?sslmode=verify-full to the %s's address (sslmode=disable accepts that, as inside a private network)",
        host,
        owner,
    )
