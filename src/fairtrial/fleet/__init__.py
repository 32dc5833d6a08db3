"""Workers, and those who give them work: trials over mailboxes, on one machine or many.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairtrial.fleet.wire import EvalReply, EvalRequest, MainLoopRequest, MainLoopResult, suite_fingerprint

_WHERE = {
    "EvalReply": "wire",
    "EvalRequest": "wire",
    "MainLoopRequest": "wire",
    "MainLoopResult": "wire",
    "suite_fingerprint": "wire",
}

__all__ = [
    "EvalReply",
    "EvalRequest",
    "MainLoopRequest",
    "MainLoopResult",
    "suite_fingerprint",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
