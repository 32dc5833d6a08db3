"""Post results of commands to a webhook."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from fairtrial.base.backoff import longest_pause
from fairtrial.cli.screen import err
from fairtrial.cli.user_errors import UserError

_TRIES = 3
_TIMEOUT_SECONDS = 5.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 8.0
_SLACK = "slack+"


def check_address(url: str) -> None:
    """Raise a `UserError` unless this is the address of a webhook."""
    parts = urlsplit(url.removeprefix(_SLACK))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # Do not print the address: anyone who knows it can post to the webhook.
        raise UserError(
            f"--notify must be the http or https address of a webhook (got one with scheme {parts.scheme!r})",
            "as in: --notify https://hooks.slack.com/services/...",
        )


def notify(url: str, text: str, record: dict[str, Any]) -> bool:
    """Post a message, with its record unless the webhook is Slack's; returns False if that failed.

    Whatever goes wrong is a note on standard error and nothing else: a webhook that is away decides nothing.
    """
    address = url.removeprefix(_SLACK)
    host = urlsplit(address).hostname or ""
    to_slack = address != url or host == "hooks.slack.com"
    body = {"text": text} if to_slack else {"text": text, **record}
    request = urllib.request.Request(  # noqa: S310 - http or https, see `check_address`
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    problem = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(longest_pause(attempt, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE))
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):  # noqa: S310
                return True
        except urllib.error.HTTPError as error:
            problem = f"HTTP status {error.code}"
            error.close()
            if error.code < 500 and error.code not in (408, 429):
                break  # It will not want the same message a second later.
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
    err().print(f"note: the webhook at {host} could not be notified: {problem}", markup=False)
    return False
