"""Tasks and logs of Inspect: `suite` runs a task here, `write_log` writes a run for `inspect view`."""

from __future__ import annotations

from fairtrial.integrations.inspect.log_export import write_log
from fairtrial.integrations.inspect.tasks import suite

__all__ = ["suite", "write_log"]
