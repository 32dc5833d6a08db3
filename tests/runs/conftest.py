from __future__ import annotations

from collections.abc import Iterator

import pytest

from fairtrial.store import RunStore, open_store


@pytest.fixture
def store() -> Iterator[RunStore]:
    """An empty store in memory."""
    opened = open_store("memory:")
    yield opened
    opened.close()
