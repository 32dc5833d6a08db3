"""A mapping that keeps only what was used last."""

from __future__ import annotations

from fairtrial.base.frozen import LruCache


def test_the_entry_used_longest_ago_gives_way() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.items(), len(cache), list(cache)) == ([("a", 1), ("c", 3)], 2, ["a", "c"])
    assert cache.get("b") is None


def test_a_value_that_is_put_again_counts_as_used() -> None:
    cache: LruCache[str, int] = LruCache(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        cache.put(key, value)
    assert cache.items() == [("a", 3), ("c", 4)]
    cache.clear()
    assert len(cache) == 0
