"""Sandboxes: run code that a model wrote, isolated from this machine and with limits."""

from fairtrial.errors import SandboxError, SandboxUnavailableError
from fairtrial.integrations.sandbox.environment import Sandbox
from fairtrial.integrations.sandbox.run_tests import extract_code, runs_tests
from fairtrial.integrations.sandbox.settings import ExecResult, SandboxLimits, SandboxSettings

__all__ = [
    "ExecResult",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxSettings",
    "SandboxUnavailableError",
    "extract_code",
    "runs_tests",
]
