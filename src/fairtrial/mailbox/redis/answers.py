"""Reads answers with many messages from Redis without waiting for each of their parts."""

from __future__ import annotations

from typing import Any

import redis.asyncio.connection
from redis._parsers import _AsyncRESP2Parser, _AsyncRESPBase
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

_CHUNK = 1 << 20
_BULK, _ARRAY, _INTEGER, _STATUS, _ERROR = b"$*:+-"


class BulkParser(_AsyncRESP2Parser):
    """Parses what has arrived in one go: redis-py awaits every line, which takes four times the CPU time.

    For connections without `decode_responses`. The answers are those of redis-py's parser.
    """

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """Return one answer; an error of the server is returned, one of the connection raised."""
        if not self._connected:
            raise RedisConnectionError("the connection to Redis is closed")
        data, self._buffer = self._buffer, b""
        at = 0
        parse_error: Any = self.parse_error
        outer: list[tuple[list[Any], int]] = []
        items: list[Any] = []
        missing = 1  # Items of the innermost array that are still to be read.
        while True:
            if (end := data.find(b"\r\n", at)) < 0:
                data, at = data[at:] + await self._received(), 0
                continue
            kind, head = data[at], data[at + 1 : end]
            at = end + 2
            value: Any
            if kind == _BULK:
                if (size := int(head)) < 0:
                    value = None
                else:
                    if (lacking := at + size + 2 - len(data)) > 0:
                        data, at = data[at:] + await self._received(lacking), 0
                    value = data[at : at + size]
                    at += size + 2
            elif kind == _ARRAY:
                if (count := int(head)) > 0:
                    outer.append((items, missing))
                    items, missing = [], count
                    continue
                value = None if count < 0 else []
            elif kind == _INTEGER:
                value = int(head)
            elif kind == _STATUS:
                value = head
            elif kind == _ERROR:
                value = parse_error(head.decode("utf-8", "replace"))
                if isinstance(value, RedisConnectionError):
                    raise value
            else:
                raise InvalidResponse(f"not an answer of Redis: {data[at - 2 - len(head) - 1 : at][:100]!r}")
            items.append(value)
            missing -= 1
            while not missing:
                if not outer:
                    self._buffer = data[at:]
                    return items[0]
                value = items
                items, missing = outer.pop()
                items.append(value)
                missing -= 1

    async def _received(self, count: int = 0) -> bytes:
        """Return what has arrived, or the next `count` bytes."""
        stream: Any = self._stream
        try:
            data: bytes = await (stream.readexactly(count) if count else stream.read(_CHUNK))
        except EOFError:
            data = b""
        if not data:
            raise RedisConnectionError("Redis has closed the connection")
        return data


def parser_options() -> dict[str, Any]:
    """Return the options of redis-py for connections that read many messages; none if hiredis is installed."""
    own = issubclass(redis.asyncio.connection.DefaultParser, _AsyncRESPBase)
    return {"parser_class": BulkParser} if own else {}
