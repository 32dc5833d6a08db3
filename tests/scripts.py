"""The programs in `scripts/`, which have no suffix, as modules."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_script(name: str) -> ModuleType:
    """Import a script without running it."""
    loader = importlib.machinery.SourceFileLoader(f"{name}_script", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, loader.name, module)  # Dataclasses look their module up by name.
        loader.exec_module(module)
    return module
