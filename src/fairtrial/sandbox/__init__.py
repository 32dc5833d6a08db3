"""Sandboxes: run code that a model wrote, isolated from this machine and with limits."""

from fairtrial.sandbox.environment import Sandbox
from fairtrial.sandbox.settings import ExecResult, SandboxLimits, SandboxSettings

__all__ = ["ExecResult", "Sandbox", "SandboxLimits", "SandboxSettings"]
