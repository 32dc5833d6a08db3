"""The prompts of a training run: epochs, shuffling, and a state that can be saved."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairtrial.base.codec import canonical
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, ConfigurationError

_FORMAT = "fairtrial.data_buffer/1"


class DataBuffer[T]:
    """Gives out items in batches, epoch after epoch.

    The order of an epoch depends only on the seed and the number of the epoch, so the state is a few numbers.

    Args:
        items: Samples, or prompts of any kind that can be stored as JSON.
        shuffle: Give out the items of every epoch in another order.
        seed: The seed of the orders.
        epochs: How often each item is given out; None for no end.
    """

    def __init__(
        self, items: Dataset[Any, Any] | Iterable[T], *, shuffle: bool = True, seed: int = 0, epochs: int | None = None
    ) -> None:
        self._items: Sequence[Any] = items if isinstance(items, Dataset) else tuple(items)
        if not len(self._items):
            raise ConfigurationError("a DataBuffer must have at least one item (got none)")
        if epochs is not None and epochs < 1:
            raise ConfigurationError(f"epochs must be at least 1, or None for no end (got {epochs})")
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = epochs
        self._epoch = 0
        self._position = 0
        self._returned: deque[int] = deque()
        self._order: Sequence[int] = self._order_of(0)
        self._places: dict[int, int] | None = None

    @property
    def epoch(self) -> int:
        """The number of complete epochs that were given out."""
        return self._epoch + (self._position == len(self._order))

    def __len__(self) -> int:
        """The number of items in an epoch."""
        return len(self._items)

    def get_prompts(self, count: int) -> list[T]:
        """Return the next items: those that were given back first, then those of the epoch, then of the next one.

        Returns fewer, and at last none, when all epochs are over.
        """
        if count < 1:
            raise ConfigurationError(f"the number of prompts must be at least 1 (got {count})")
        taken: list[int] = []
        while len(taken) < count:
            if self._returned:
                taken.append(self._returned.popleft())
            elif self._position < len(self._order):
                taken.append(self._order[self._position])
                self._position += 1
            elif self._epochs is not None and self._epoch + 1 >= self._epochs:
                break
            else:
                self._start_epoch(self._epoch + 1)
        if self._position == len(self._order) and (self._epochs is None or self._epoch + 1 < self._epochs):
            self._start_epoch(self._epoch + 1)
        return [self._items[place] for place in taken]

    def give_back(self, items: Iterable[T]) -> None:
        """Take back items whose rollouts were aborted: they are the next to be given out, in this order."""
        places = [self._place(item) for item in items]
        self._returned.extendleft(reversed(places))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "format": _FORMAT,
            "items": self._identity(),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "returned": list(self._returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken. It must be of a buffer with the same items, seed and shuffling."""
        if state.get("format") != _FORMAT:
            raise ConfigurationError(f"the state must be one of a DataBuffer (got format {state.get('format')!r})")
        own = self.state_dict()
        for name in ("items", "seed", "shuffle"):
            if state.get(name) != own[name]:
                raise ConfigurationError(
                    f"the state must be of a buffer with the same {name} (got {state.get(name)!r} for {own[name]!r})\n"
                    "make the DataBuffer with the arguments it was saved with, or start without the state"
                )
        self._start_epoch(int(state["epoch"]))
        self._position = int(state["position"])
        self._returned = deque(int(place) for place in state["returned"])

    def save(self, path: Path | str) -> None:
        """Write the state to a file, which is replaced only when it is complete."""
        target = Path(path)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps(self.state_dict()), encoding="utf-8")
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)

    def load(self, path: Path | str) -> None:
        """Continue with the state of a file that `save` wrote."""
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{path} must be a file that DataBuffer.save wrote (got {error})") from None
        self.load_state_dict(state if isinstance(state, dict) else {})

    def _start_epoch(self, number: int) -> None:
        self._epoch, self._position = number, 0
        self._order = self._order_of(number)

    def _order_of(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._items)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)  # noqa: S311 - an order, not a secret
        return order

    def _place(self, item: T) -> int:
        if self._places is None:
            self._places = {}
            for place, known in enumerate(self._items):
                self._places.setdefault(_digest(known), place)
        found = self._places.get(_digest(item))
        if found is None:
            raise ConfigurationError(f"only items of the buffer can be given back (got {item!r:.80})")
        return found

    def _identity(self) -> str:
        if isinstance(self._items, Dataset):
            return f"{self._items.fingerprint}/{self._items.order}"
        whole = hashlib.sha256(b"".join(_digest(item).to_bytes(16) for item in self._items))
        return whole.hexdigest()[:32]

    def __repr__(self) -> str:
        return f"<DataBuffer: {len(self):,} items, epoch {self._epoch}, {self._position:,} given out>"


def _digest(item: Any) -> int:
    content = ["sample", item.id] if isinstance(item, Sample) else ["item", item]
    try:
        return int.from_bytes(hashlib.blake2b(canonical(content), digest_size=16).digest())
    except CodecError as error:
        raise ConfigurationError(f"items of a DataBuffer must be JSON values or samples: {error}") from None
