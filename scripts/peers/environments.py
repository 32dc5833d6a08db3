"""Virtual environments of other tools."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path


def python_environment(folder: Path, *packages: str) -> Path:
    """Create an environment with these packages, if it does not exist; returns its interpreter."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "installed").touch()
    return python
