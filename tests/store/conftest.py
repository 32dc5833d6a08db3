from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairtrial.store import RunRecord, RunStore, open_store
from tests.store.build import run_record


@pytest.fixture(params=["memory", "sqlite", "segments", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty store, of each kind: with segments, its transcripts are in a folder."""
    if request.param == "segments":
        monkeypatch.setenv("FAIRTRIAL_TRANSCRIPTS", str(tmp_path / "transcripts"))
    if request.param == "memory":
        return "memory:"
    if request.param in ("sqlite", "segments"):
        return f"sqlite:///{tmp_path / 'runs.db'}"
    return str(request.getfixturevalue("pg_url"))


@pytest.fixture
def opened() -> Iterator[Callable[[str], RunStore]]:
    """Opens stores that are closed when the test ends."""
    stores: list[RunStore] = []

    def open_one(where: str) -> RunStore:
        stores.append(open_store(where))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(url: str, opened: Callable[[str], RunStore]) -> RunStore:
    return opened(url)


@pytest.fixture
def run(store: RunStore) -> RunRecord:
    return store.create_run(run_record())
