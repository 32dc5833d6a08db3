"""The common part of adapters that speak a provider's protocol themselves, over aiohttp, without its SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

from fairtrial.base.codec import parse_json
from fairtrial.errors import CodecError, MalformedReplyError, ModelError, ModelUnavailableError
from fairtrial.models.adapter import AnswerT
from fairtrial.models.sdk import SdkAdapter


class HttpStatusError(Exception):
    """An answer with a status of 300 or more, with the attributes that the SDKs' errors have."""

    def __init__(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.status_code = status
        self.response = SimpleNamespace(headers=headers)
        try:
            self.body = parse_json(content)
        except CodecError:
            self.body = None
        super().__init__(content[:200].decode("utf-8", "replace"))


class HttpClient:
    """A session of aiohttp; made in the event loop that uses it."""

    def __init__(self) -> None:
        import aiohttp

        # The adapter limits the time of a whole answer, and the limiter the number of connections.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )

    async def open(self, url: str, headers: Mapping[str, str], content: bytes) -> Any:
        """Send a request; returns the response, whose body is not read yet."""
        from yarl import URL

        # The path is sent as it is: its signature covers it. A redirection would take the key to another host.
        address = URL(url, encoded=True)
        response = await self._session.post(address, data=content, headers=headers, allow_redirects=False)
        if response.status >= 300:
            body = await response.read()
            raise HttpStatusError(response.status, response.headers, body)
        return response

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()


class HttpAdapter(SdkAdapter[AnswerT]):
    """The base class of adapters without an SDK. Subclasses make the headers and read the events of a stream."""

    package = "aiohttp"
    stream_path: str

    def _make_client(self) -> Any:
        return HttpClient()

    async def _request_headers(self, url: str, content: bytes) -> dict[str, str]:
        """Return the headers of a request, with the key or the signature."""
        raise NotImplementedError

    def _events(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        """Return the events of a stream."""
        raise NotImplementedError

    async def _opened(self, client: Any, body: dict[str, Any], path: str) -> Any:
        url, content = f"{self._base_url}{path}", json.dumps(body).encode()
        headers = await self._request_headers(url, content)
        return await client.open(url, {"content-type": "application/json", **self._headers, **headers}, content)

    async def _posted(self, client: Any, body: dict[str, Any], path: str) -> Any:
        async with await self._opened(client, body, path) as response:
            return self._parsed_answer(await response.read())

    async def _streamed(self, client: Any, body: dict[str, Any]) -> Any:
        async with await self._opened(client, body, self.stream_path) as response:
            try:
                return await self._gather(self._events(response.content.iter_any()))
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise MalformedReplyError(f"{self._where()} sent a stream of the wrong shape: {error!r}") from None

    def _classified(self, error: Exception) -> ModelError | None:
        if isinstance(error, HttpStatusError):
            return self._by_status(error, error.status_code)
        if (unreachable := self._unreachable(error)) is not None:
            return unreachable
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "aiohttp":
            return ModelUnavailableError(
                f"the connection to {self._where()} failed: {type(error).__name__}: {error}", sent=True
            )
        return None


async def server_sent_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """Return the data of server-sent events, each of which is JSON in one line."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield _parsed(line)
    if rest.startswith(b"data:"):
        yield _parsed(rest)


def _parsed(line: bytes) -> Any:
    try:
        return parse_json(line[5:].strip())
    except CodecError as error:
        raise MalformedReplyError(f"an event of the stream is not JSON: {error}") from None
