"""The kind "unsafe-local": commands run as this user, with a directory of their own and a time limit; nothing else."""

from __future__ import annotations

import os
import shutil
import tempfile

from fairtrial.errors import ConfigurationError
from fairtrial.integrations.sandbox.processes import run_process
from fairtrial.integrations.sandbox.settings import RawResult, SandboxCommand, SandboxSettings


class LocalBackend:
    """Commands without isolation, for code that you trust. Memory, processes, disk and network are not limited."""

    enforcement = "none"

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self.work = ""

    @property
    def path(self) -> str:
        """The PATH of commands."""
        return os.environ.get("PATH", os.defpath)

    async def start(self) -> None:
        """Make the working directory."""
        self.work = tempfile.mkdtemp(prefix="fairtrial-unsafe-local-")

    async def run(self, command: SandboxCommand) -> RawResult:
        """Run a command as this user."""
        if command.user is not None:
            raise ConfigurationError(f"an unsafe-local sandbox cannot change the user (got user={command.user!r})")
        return await run_process(command.argv, command.input, command.limits, env=command.env, cwd=command.cwd)

    async def close(self) -> None:
        """Delete the working directory."""
        if self.work:
            shutil.rmtree(self.work, ignore_errors=True)
