"""Random-looking numbers that depend only on what they are drawn for."""

from __future__ import annotations

from hashlib import blake2b

_SCALE = 2.0**-53


def draw(*parts: object) -> float:
    """A number in [0, 1) that is a pure function of `parts`.

    A hash rather than a generator: the draw for request 17 must not depend on how many draws
    other requests have made before it, or concurrency would change the outcome.
    """
    digest = blake2b("\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * _SCALE
