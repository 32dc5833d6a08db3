from fairtrial.errors import SandboxError as SandboxError, SandboxUnavailableError as SandboxUnavailableError
from fairtrial.integrations.sandbox.environment import Sandbox as Sandbox
from fairtrial.integrations.sandbox.run_tests import extract_code as extract_code, runs_tests as runs_tests
from fairtrial.integrations.sandbox.settings import (
    ExecResult as ExecResult,
    SandboxLimits as SandboxLimits,
    SandboxSettings as SandboxSettings,
)

__all__: list[str]
