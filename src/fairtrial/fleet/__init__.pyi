from fairtrial.fleet.client.collect import (
    collect_results as collect_results,
    collect_results_sync as collect_results_sync,
    submit_dataset as submit_dataset,
    submit_dataset_sync as submit_dataset_sync,
)
from fairtrial.fleet.limits.quota import FleetLimiter as FleetLimiter, FleetSpending as FleetSpending
from fairtrial.fleet.messages import (
    EvalReply as EvalReply,
    EvalRequest as EvalRequest,
    MainLoopRequest as MainLoopRequest,
    MainLoopResult as MainLoopResult,
)
from fairtrial.fleet.ops.group import LoopGroup as LoopGroup
from fairtrial.fleet.ops.supervise import RestartPolicy as RestartPolicy
from fairtrial.fleet.queues import (
    Broker as Broker,
    MemoryBroker as MemoryBroker,
    PostgresBroker as PostgresBroker,
    RedisBroker as RedisBroker,
    SqsBroker as SqsBroker,
    connect_broker as connect_broker,
)
from fairtrial.fleet.worker.config import (
    EvalLoopConfig as EvalLoopConfig,
    LoopConfig as LoopConfig,
    LoopCounters as LoopCounters,
    MainLoopConfig as MainLoopConfig,
)
from fairtrial.fleet.worker.eval_loop import EvalLoop as EvalLoop
from fairtrial.fleet.worker.main_loop import MainLoop as MainLoop
from fairtrial.fleet.worker.sessions import (
    FolderSessionStore as FolderSessionStore,
    InMemorySessionStore as InMemorySessionStore,
    RedisSessionStore as RedisSessionStore,
    SessionStore as SessionStore,
    StoreSessionStore as StoreSessionStore,
)

__all__: list[str]
