"""Messages that were received and not returned to a caller, while their server does not answer."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fairtrial.errors import LeaseLostError, MailboxConnectionError
from fairtrial.mailbox import receive as reading
from fairtrial.mailbox.receive import hand_back_all


class Unreliable:
    """A receipt whose server fails some times before it answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[tuple[float, bool]] = []

    async def nack(self, delay: float, *, counted: bool) -> None:
        self.calls.append((delay, counted))
        if self.errors:
            raise self.errors.pop(0)


async def test_each_message_is_tried_again_until_its_server_answers(caplog: pytest.LogCaptureFixture) -> None:
    receipts = [Unreliable(MailboxConnectionError("gone"), MailboxConnectionError("gone")), Unreliable()]
    await hand_back_all("requests", cast(Any, receipts))
    assert [receipt.calls for receipt in receipts] == [[(0, False)] * 3, [(0, False)]]
    assert "when its lease expires" not in caplog.text


async def test_a_server_that_stays_away_or_refuses_is_left_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reading, "RETURN_SECONDS", 0.0)
    away, lost = Unreliable(MailboxConnectionError("gone")), Unreliable(LeaseLostError("lost"))
    await hand_back_all("requests", cast(Any, [away, lost]))
    assert [len(away.calls), len(lost.calls)] == [1, 1]
    assert caplog.text.count("a message of requests will be redelivered when its lease expires") == 2
