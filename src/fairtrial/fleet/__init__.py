"""Workers, and those who give them work: trials over mailboxes, on one machine or many.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairtrial.fleet.collect import collect_results, collect_results_sync
    from fairtrial.fleet.config import EvalLoopConfig, LoopConfig, MainLoopConfig
    from fairtrial.fleet.counters import LoopCounters
    from fairtrial.fleet.eval_loop import EvalLoop
    from fairtrial.fleet.group import LoopGroup
    from fairtrial.fleet.limits import FleetLimiter
    from fairtrial.fleet.main_loop import MainLoop
    from fairtrial.fleet.post import MemoryPostOffice, PostOffice, RedisPostOffice, open_post_office
    from fairtrial.fleet.sessions import FolderSessionStore, InMemorySessionStore, RedisSessionStore, SessionStore
    from fairtrial.fleet.spending import FleetSpending
    from fairtrial.fleet.submit import submit_dataset, submit_dataset_sync
    from fairtrial.fleet.supervise import RestartPolicy
    from fairtrial.fleet.wire import EvalReply, EvalRequest, MainLoopRequest, MainLoopResult

_WHERE = {
    "EvalLoop": "eval_loop",
    "EvalLoopConfig": "config",
    "EvalReply": "wire",
    "EvalRequest": "wire",
    "FleetLimiter": "limits",
    "FleetSpending": "spending",
    "FolderSessionStore": "sessions",
    "InMemorySessionStore": "sessions",
    "LoopConfig": "config",
    "LoopCounters": "counters",
    "LoopGroup": "group",
    "MainLoop": "main_loop",
    "MainLoopConfig": "config",
    "MainLoopRequest": "wire",
    "MainLoopResult": "wire",
    "MemoryPostOffice": "post",
    "PostOffice": "post",
    "RedisPostOffice": "post",
    "RedisSessionStore": "sessions",
    "RestartPolicy": "supervise",
    "SessionStore": "sessions",
    "collect_results": "collect",
    "collect_results_sync": "collect",
    "open_post_office": "post",
    "submit_dataset": "submit",
    "submit_dataset_sync": "submit",
}

__all__ = [
    "EvalLoop",
    "EvalLoopConfig",
    "EvalReply",
    "EvalRequest",
    "FleetLimiter",
    "FleetSpending",
    "FolderSessionStore",
    "InMemorySessionStore",
    "LoopConfig",
    "LoopCounters",
    "LoopGroup",
    "MainLoop",
    "MainLoopConfig",
    "MainLoopRequest",
    "MainLoopResult",
    "MemoryPostOffice",
    "PostOffice",
    "RedisPostOffice",
    "RedisSessionStore",
    "RestartPolicy",
    "SessionStore",
    "collect_results",
    "collect_results_sync",
    "open_post_office",
    "submit_dataset",
    "submit_dataset_sync",
]


if not TYPE_CHECKING:  # A type checker would take this to mean that every name exists.

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
