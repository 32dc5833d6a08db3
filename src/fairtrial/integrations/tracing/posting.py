"""Posts requests over HTTP and repeats them while the server is busy or cannot be reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from fairtrial._version import __version__
from fairtrial.base.backoff import backoff
from fairtrial.errors import MissingExtraError, TraceSendError

if TYPE_CHECKING:
    import aiohttp

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 8.0
_EXPLANATION = 300  # Characters of an answer that are quoted.
_MAX_ANSWER = 65_536


class HttpAnswer(NamedTuple):
    """What the server answered in the end, and after how many attempts."""

    status: int
    body: bytes
    attempts: int

    @property
    def accepted(self) -> bool:
        """Whether the status is one of success."""
        return 200 <= self.status < 300

    def __str__(self) -> str:
        text = self.body.decode("utf-8", "replace").strip()[:_EXPLANATION]
        return f"the server answered {self.status}{': ' + text if text else ''}"


class HttpPoster:
    """Posts bodies to one server. To be used as `async with`, on asyncio.

    Args:
        purpose: What it is used for, for the error message if aiohttp is missing.
        retried: The statuses of a server that is busy.
        timeout_seconds: The time limit of one attempt.
        patience_seconds: For how long a request is repeated.
    """

    def __init__(
        self, purpose: str, retried: Collection[int], *, timeout_seconds: float, patience_seconds: float
    ) -> None:
        self._purpose = purpose
        self._retried = frozenset(retried)
        self._timeout = timeout_seconds
        self._patience = patience_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        try:
            import aiohttp
        except ImportError:
            raise MissingExtraError(self._purpose, "otel") from None
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        agent = {"User-Agent": f"fairtrial/{__version__}"}
        self._session = aiohttp.ClientSession(timeout=timeout, headers=agent)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, what: str, url: str, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        """Return the server's answer, whatever its status. Raises `TraceSendError` if it stays busy or away.

        Args:
            what: What is sent, in the plural, for error messages.
            url: Where to.
            body: The body of the request.
            headers: Its headers.
        """
        deadline = time.monotonic() + self._patience
        attempts = pauses = 0
        while True:
            attempts += 1
            wanted: float | None = None
            outcome = await self._attempt(url, body, headers)
            if isinstance(outcome, str):
                problem = outcome
            else:
                status, content, wanted = outcome
                answer = HttpAnswer(status, content, attempts)
                if status not in self._retried:
                    return answer
                problem = str(answer)
            if wanted is None:
                pauses += 1
                wanted = backoff(pauses, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)
            if time.monotonic() + wanted > deadline:
                raise TraceSendError(f"{what} could not be sent within {self._patience:g} s: {problem}")
            await asyncio.sleep(wanted)

    async def _attempt(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes, float | None] | str:
        """Send once; return status, body and the pause that the server asks for, or why there is no answer."""
        import aiohttp

        if self._session is None:
            raise RuntimeError("the poster must be entered before it is used")
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                content = await _read(response.content)
                return response.status, content, _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{type(error).__name__}: {error}".rstrip(": ")


async def _read(stream: aiohttp.StreamReader) -> bytes:
    """Return the start of an answer, up to the limit."""
    found = b""
    while len(found) < _MAX_ANSWER and (part := await stream.read(_MAX_ANSWER - len(found))):
        found += part
    return found


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None  # A date, which is rare.
