"""`fairtrial gate --notify`: the decision at a webhook, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from fairtrial.cli import command_gate as module
from tests.cli.conftest import Cli


class Webhook:
    """A webhook that answers with given statuses, then 200."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.received: list[dict[str, Any]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.received.append(json.loads(body))
                self.send_response(hook.statuses.pop(0) if hook.statuses else 200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/T0/secret"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    hook = Webhook()
    hook.thread.start()
    yield hook
    hook.server.shutdown()
    hook.thread.join()
    hook.server.server_close()


@pytest.mark.proves("R137")
def test_a_gate_posts_its_decision_as_json_with_the_record_behind_it(ran: Cli, webhook: Webhook) -> None:
    done = ran("gate", "doubles:triple", "--floor", "passed=0.9", "--notify", webhook.url)
    assert done.code == 1
    (told,) = webhook.received
    assert told["text"].startswith("fairtrial gate: doubles:triple FAILED: ")
    assert (told["run"], told["gate"]["format"], told["gate"]["exit_code"]) == ("doubles:triple", "fairtrial.gate/1", 1)
    assert ran("gate", "doubles:plain", "--floor", "passed=0.15", "--notify", webhook.url).code == 0
    assert "passed" in webhook.received[1]["text"]


@pytest.mark.proves("R137")
def test_slack_is_told_the_text_alone(ran: Cli, webhook: Webhook) -> None:
    ran("gate", "doubles:triple", "--floor", "passed=0.9", "--notify", f"slack+{webhook.url}")
    assert [sorted(told) for told in webhook.received] == [["text"]]


@pytest.mark.proves("R137")
def test_a_webhook_that_fails_is_tried_again_and_one_that_stays_away_changes_no_exit_code(
    ran: Cli, webhook: Webhook
) -> None:
    webhook.statuses = [503, 429]
    done = ran("gate", "doubles:plain", "--floor", "passed=0.15", "--notify", webhook.url)
    assert (done.code, len(webhook.received), done.err) == (0, 3, "")
    webhook.statuses = [500, 500, 500]
    done = ran("gate", "doubles:plain", "--floor", "passed=0.15", "--notify", webhook.url)
    assert (done.code, len(webhook.received)) == (0, 6)
    assert "the webhook at 127.0.0.1 could not be notified: HTTP status 500" in done.err
    assert "secret" not in done.err
    webhook.statuses = [404]
    assert ran("gate", "doubles:triple", "--floor", "passed=0.9", "--notify", webhook.url).code == 1
    assert len(webhook.received) == 7  # A refusal is not tried again.
    done = ran("gate", "doubles:triple", "--floor", "passed=0.9", "--notify", "http://127.0.0.1:9/x")
    assert done.code == 1
    assert "could not be notified" in done.err


@pytest.mark.proves("R137")
def test_an_address_that_is_no_webhook_is_refused_before_anything_is_decided(ran: Cli) -> None:
    done = ran("gate", "doubles:plain", "--floor", "passed=0.15", "--notify", "file:///etc/secret")
    assert done.code == 2
    assert "--notify must be the http or https address" in done.err
    assert "secret" not in done.err
