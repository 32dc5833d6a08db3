"""Pseudo-random numbers that depend only on the given parts."""

from __future__ import annotations

from hashlib import blake2b

_SCALE = 2.0**-53


def draw(*parts: object) -> float:
    """Return a number in [0, 1) that is a pure function of `parts`.

    It is a hash: with a generator, the number for request 17 would depend on how many numbers other requests have
    drawn before, and so on their timing.
    """
    digest = blake2b("\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * _SCALE
