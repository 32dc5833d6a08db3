from fairtrial.rl.advantages import advantages as advantages
from fairtrial.rl.diagnose import (
    Curve as Curve,
    Diagnosis as Diagnosis,
    HackingCheck as HackingCheck,
    curve as curve,
    diagnose as diagnose,
    hacking as hacking,
)
from fairtrial.rl.episode import EpisodeResult as EpisodeResult, TrainerEpisode as TrainerEpisode, episode as episode
from fairtrial.rl.export import ExportCounts as ExportCounts, export as export, write_prompts as write_prompts
from fairtrial.rl.fork import (
    Checkpoint as Checkpoint,
    TurnValue as TurnValue,
    checkpoints as checkpoints,
    fork as fork,
    turn_values as turn_values,
)
from fairtrial.rl.groups import (
    Group as Group,
    Rollout as Rollout,
    TokenRow as TokenRow,
    best_at_k as best_at_k,
    generate_rollouts as generate_rollouts,
    groups as groups,
    rollout as rollout,
    stitch as stitch,
)
from fairtrial.rl.local_model import with_adapter as with_adapter
from fairtrial.rl.loop import (
    DataBuffer as DataBuffer,
    MetricLog as MetricLog,
    TrainConfig as TrainConfig,
    TrainingBackend as TrainingBackend,
    train as train,
)
from fairtrial.rl.reward import RewardFunction as RewardFunction, reward as reward
from fairtrial.rl.trainers import (
    VerlReward as VerlReward,
    openenv_sessions as openenv_sessions,
    skyrl_env as skyrl_env,
    verifiers_taskset as verifiers_taskset,
    verl_reward as verl_reward,
)
from fairtrial.rl.trl import TrlTraining as TrlTraining, trl as trl

__all__: list[str]
