"""Message queues with leases: the protocol and its implementations.

Exported names are imported lazily, so that a process imports only the client of the server that it uses.
"""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
