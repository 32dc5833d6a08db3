"""A mapping that keeps only what was used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class LruCache[K, V]:
    """The `limit` entries used last. Not thread-safe; callers that share one must lock it."""

    __slots__ = ("_entries", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """The value of a key, which counts as used; None if there is none."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Store a value and evict the least recently used one."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def items(self) -> list[tuple[K, V]]:
        """Every entry, the one used longest ago first."""
        return list(self._entries.items())

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
