"""What every test may use."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Async tests marked `anyio` run on both event loops."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the caches and stores of the person who runs it."""
    monkeypatch.setenv("FAIRTRIAL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("FAIRTRIAL_STORE", raising=False)
