"""Find texts that are nearly the same, by MinHash signatures of their runs of characters.

The similarity of two texts is the share of runs of five characters that they have in common (Jaccard). A signature
estimates it with a standard error of at most .045. Locality-sensitive hashing compares all but about 1 in 20,000 of the
pairs with a similarity of .8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fairtrial.base.codec import canonical

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    type Signatures = NDArray[np.uint32]

_RUN = 5  # Characters.
_BANDS, _ROWS = 25, 5
_HASHES = _BANDS * _ROWS
_CHUNK = 4096  # Runs that are hashed at once.


def _constants(name: str, count: int) -> list[int]:
    """Return odd 64-bit numbers that are the same in every version of every library."""
    made = (hashlib.sha256(f"{name}:{place}".encode()).digest()[:8] for place in range(count))
    return [int.from_bytes(one) | 1 for one in made]


def comparable_text(value: Any) -> str:
    """Return the text by which inputs are compared."""
    return value if isinstance(value, str) else canonical(value).decode("utf-8", "replace")


class TextIndex:
    """Texts in the order in which they were added. With `least` None, only equal texts are similar."""

    def __init__(self, least: float | None) -> None:
        self._least = least
        self._texts: list[bytes] = []  # Hashes, of texts without differences of case and space.
        self._rows: list[Signatures] = []
        self._table: Signatures | None = None

    def add(self, text: str) -> None:
        """Add the next text."""
        plain = " ".join(text.casefold().split())
        self._texts.append(hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=16).digest())
        if self._least is not None:
            self._rows.append(_signature(plain))

    def groups(self, links: Iterable[tuple[int, int]] = ()) -> list[list[int]]:
        """Return the texts that belong together, directly or through others: by these links, or because of similarity.

        Groups and their members are in the order in which texts were added.
        """
        parents = list(range(len(self._texts)))

        def root(place: int) -> int:
            while parents[place] != place:
                parents[place] = place = parents[parents[place]]
            return place

        def join(first: int, second: int) -> None:
            first, second = sorted((root(first), root(second)))
            parents[second] = first

        for link in links:
            join(*link)
        self.join_similar(root, join)
        groups: dict[int, list[int]] = {}
        for place in range(len(parents)):
            groups.setdefault(root(place), []).append(place)
        return list(groups.values())

    def join_similar(self, root: Callable[[int], int], join: Callable[[int, int], None]) -> None:
        """Call `join` with texts that are similar and not yet of one root."""
        first: dict[bytes, int] = {}
        for place, text in enumerate(self._texts):
            join(first.setdefault(text, place), place)
        if self._least is None:
            return
        signatures = self._signatures()
        for band in range(_BANDS):
            buckets: dict[bytes, list[int]] = {}
            for place, row in enumerate(signatures[:, band * _ROWS : (band + 1) * _ROWS]):
                buckets.setdefault(row.tobytes(), []).append(place)
            for bucket in buckets.values():
                self._join_bucket(bucket, root, join)

    def _join_bucket(self, bucket: list[int], root: Callable[[int], int], join: Callable[[int, int], None]) -> None:
        for start, place in enumerate(bucket[:-1]):
            others = bucket[start + 1 :]
            if start == 0 and len({root(other) for other in bucket}) == 1:
                return
            own = root(place)
            others = [other for other in others if root(other) != own]
            for other, similar in zip(others, self.are_similar(place, others), strict=True):
                if similar:
                    join(place, other)

    def are_similar(self, place: int, others: Sequence[int]) -> list[bool]:
        """Return whether each of the other texts is similar to one."""
        equal = [self._texts[other] == self._texts[place] for other in others]
        if self._least is None or not others:
            return equal
        signatures = self._signatures()
        agreement = (signatures[list(others)] == signatures[place]).mean(axis=1)
        return [bool(same or share >= self._least) for same, share in zip(equal, agreement, strict=True)]

    def _signatures(self) -> Signatures:
        import numpy as np

        if self._table is None or len(self._table) != len(self._rows):
            self._table = np.array(self._rows, dtype=np.uint32).reshape(-1, _HASHES)
        return self._table


def _signature(text: str) -> Signatures:
    """Return the least value of each hash over the runs of a text; a shorter text is one run."""
    import numpy as np

    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    letters = np.pad(letters, (0, max(0, _RUN - letters.size)))
    weights = np.array(_constants("letter", _RUN), dtype=np.uint64)
    factors = np.array(_constants("hash", _HASHES), dtype=np.uint64)[:, None]
    runs = np.lib.stride_tricks.sliding_window_view(letters, _RUN) @ weights
    runs = (runs ^ (runs >> np.uint64(29))) * weights[0]
    runs ^= runs >> np.uint64(32)
    least = np.full(_HASHES, np.iinfo(np.uint32).max, dtype=np.uint32)
    for start in range(0, runs.size, _CHUNK):
        hashed = (runs[start : start + _CHUNK] * factors) >> np.uint64(32)
        least = np.minimum(least, hashed.min(axis=1).astype(np.uint32))
    return least
