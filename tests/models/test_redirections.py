"""Keys are sent to the address that was configured, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fairtrial.errors import ModelError
from fairtrial.models import AnthropicAdapter, OpenAIAdapter, RetryPolicy
from fairtrial.models.bedrock import ConverseAdapter
from fairtrial.models.gemini import GeminiAdapter

KEY = "sk-the-key-of-somebody-1234567890"


@pytest.fixture
def redirecting() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that leads to another host, and the heads of the requests that got there."""
    heads: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.server is servers[1]:
                heads.append(str(self.headers))
            self.send_response(307 if self.server is servers[0] else 400)
            self.send_header("Location", f"http://localhost:{servers[1].server_port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{servers[0].server_port}", heads
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("adapter", [OpenAIAdapter, AnthropicAdapter, GeminiAdapter, ConverseAdapter])
async def test_a_provider_cannot_have_the_key_sent_to_another_host(
    redirecting: tuple[str, list[str]], adapter: Any
) -> None:
    address, heads = redirecting
    model = adapter("m", api_key=KEY, base_url=address, retry=RetryPolicy(attempts=1))
    with pytest.raises(ModelError):
        await model.complete([{"role": "user", "content": "hello"}])
    assert KEY not in "".join(heads)
