"""Distributed runs: clients that submit trials to mailboxes, and workers that execute them.

`client` submits the trials of a run and collects their results, `worker` executes and scores them, `limits` holds the
quotas and budgets that workers share, and `ops` keeps worker processes running and observable. None of the four imports
another: they exchange the types in `messages` through the mailboxes in `queues`. The whole package requires asyncio.

Exported names are imported lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.base.lazy import lazy_names

if TYPE_CHECKING:
    from fairtrial.fleet.client.collect import (
        collect_results,
        collect_results_sync,
        submit_dataset,
        submit_dataset_sync,
    )
    from fairtrial.fleet.limits.quota import FleetLimiter, FleetSpending
    from fairtrial.fleet.messages import EvalReply, EvalRequest, MainLoopRequest, MainLoopResult
    from fairtrial.fleet.ops.group import LoopGroup
    from fairtrial.fleet.ops.supervise import RestartPolicy
    from fairtrial.fleet.queues import Broker, MemoryBroker, PostgresBroker, RedisBroker, SqsBroker, connect_broker
    from fairtrial.fleet.worker.config import EvalLoopConfig, LoopConfig, LoopCounters, MainLoopConfig
    from fairtrial.fleet.worker.eval_loop import EvalLoop
    from fairtrial.fleet.worker.main_loop import MainLoop
    from fairtrial.fleet.worker.sessions import (
        FolderSessionStore,
        InMemorySessionStore,
        RedisSessionStore,
        SessionStore,
        StoreSessionStore,
    )

_WHERE = {
    "Broker": "queues",
    "EvalLoop": "worker.eval_loop",
    "EvalLoopConfig": "worker.config",
    "EvalReply": "messages",
    "EvalRequest": "messages",
    "FleetLimiter": "limits.quota",
    "FleetSpending": "limits.quota",
    "FolderSessionStore": "worker.sessions",
    "InMemorySessionStore": "worker.sessions",
    "LoopConfig": "worker.config",
    "LoopCounters": "worker.config",
    "LoopGroup": "ops.group",
    "MainLoop": "worker.main_loop",
    "MainLoopConfig": "worker.config",
    "MainLoopRequest": "messages",
    "MainLoopResult": "messages",
    "MemoryBroker": "queues",
    "PostgresBroker": "queues",
    "RedisBroker": "queues",
    "SqsBroker": "queues",
    "RedisSessionStore": "worker.sessions",
    "RestartPolicy": "ops.supervise",
    "SessionStore": "worker.sessions",
    "StoreSessionStore": "worker.sessions",
    "collect_results": "client.collect",
    "collect_results_sync": "client.collect",
    "connect_broker": "queues",
    "submit_dataset": "client.collect",
    "submit_dataset_sync": "client.collect",
}

__all__ = [
    "Broker",
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
    "MemoryBroker",
    "PostgresBroker",
    "RedisBroker",
    "SqsBroker",
    "RedisSessionStore",
    "RestartPolicy",
    "SessionStore",
    "StoreSessionStore",
    "collect_results",
    "collect_results_sync",
    "connect_broker",
    "submit_dataset",
    "submit_dataset_sync",
]


if not TYPE_CHECKING:  # A type checker would take this to mean that every name exists.
    __getattr__, __dir__ = lazy_names(__name__, _WHERE)
