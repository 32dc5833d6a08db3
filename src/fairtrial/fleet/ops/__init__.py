"""Worker processes in operation: supervision, watchdogs, probes and metrics."""
