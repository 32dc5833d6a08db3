"""The kinds "inspect:NAME": a sandbox provider of Inspect, such as docker, k8s or one of your own."""

from __future__ import annotations

from typing import Any

from fairtrial.errors import SandboxError, SandboxUnavailableError
from fairtrial.integrations.sandbox.settings import RawResult, SandboxCommand, SandboxSettings

_TASK = "fairtrial"


def find_provider(name: str) -> Any:
    """Return the class of a provider that Inspect knows by this name."""
    try:
        from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
    except ImportError as error:
        raise SandboxUnavailableError(
            f"sandbox inspect:{name} needs inspect-ai: pip install inspect-ai ({error})"
        ) from None
    try:
        return registry_find_sandboxenv(name)
    except ValueError as error:
        raise SandboxUnavailableError(f"Inspect has no sandbox provider {name!r}: {error}") from None


class InspectBackend:
    """One sample of a provider of Inspect. Its own limits apply; ours of time and output are added."""

    work = ""
    path = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    enforcement = "provider"

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._name = settings.kind.partition(":")[2]
        self._provider: Any = None
        self._environments: dict[str, Any] = {}

    async def start(self) -> None:
        """Start the provider's environments for one sample."""
        self._provider = find_provider(self._name)
        await self._provider.task_init(_TASK, None)
        self._environments = await self._provider.sample_init(_TASK, None, {})

    async def run(self, command: SandboxCommand) -> RawResult:
        """Run a command in the default environment."""
        limits = command.limits
        environment = self._environments.get("default") or next(iter(self._environments.values()))
        try:
            result = await environment.exec(
                list(command.argv),
                input=command.input,
                cwd=command.cwd or None,
                env=dict(command.env),
                user=command.user,
                timeout=max(1, round(limits.seconds)),
            )
        except TimeoutError:
            return RawResult(-9, b"", b"", "time")
        except UnicodeDecodeError:
            raise SandboxError(
                f"Inspect's provider {self._name!r} returns text only, and {command.argv[0]!r} wrote other bytes"
            ) from None
        except (OSError, ValueError) as error:
            status = 127 if isinstance(error, FileNotFoundError) else 126
            return RawResult(status, b"", f"{command.argv[0]}: {error}\n".encode("utf-8", "replace"))
        except Exception as error:
            written = getattr(error, "truncated_output", None)  # OutputLimitExceededError of Inspect.
            if written is None:
                raise
            return RawResult(-9, written.encode("utf-8", "replace")[: limits.output], b"", None, True)
        stdout, stderr = result.stdout.encode("utf-8", "replace"), result.stderr.encode("utf-8", "replace")
        truncated = len(stdout) > limits.output or len(stderr) > limits.output
        return RawResult(result.returncode, stdout[: limits.output], stderr[: limits.output], None, truncated)

    async def close(self) -> None:
        """Clean up what the provider made."""
        if self._provider is not None:
            await self._provider.sample_cleanup(_TASK, None, self._environments, False)
            await self._provider.task_cleanup(_TASK, None, True)
            self._provider = None
