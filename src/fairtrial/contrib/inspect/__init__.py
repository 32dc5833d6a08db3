"""Tasks and logs of Inspect: `suite` runs a task here, `write_log` writes a run for `inspect view`."""

from __future__ import annotations

from fairtrial.contrib.inspect.log_export import write_log

__all__ = ["write_log"]
