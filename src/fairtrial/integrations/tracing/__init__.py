"""OpenTelemetry: trials as traces for other tools, and the traces of applications as sessions of trials.

The extra `otel` installs what it needs. docs/how-to/traces.md shows both directions.
"""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
