"""Sandboxes: run code that a model wrote, isolated from this machine and with limits."""

from fairtrial.errors import SandboxError, SandboxUnavailableError
from fairtrial.sandbox.environment import Sandbox
from fairtrial.sandbox.run_tests import extract_code, runs_tests
from fairtrial.sandbox.settings import ExecResult, SandboxLimits, SandboxSettings

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
