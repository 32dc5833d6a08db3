"""Reinforcement learning: any run is a batch of rollouts, any evaluator is a reward. No trainer is imported."""

from fairtrial.rl.advantages import advantages
from fairtrial.rl.buffer import DataBuffer
from fairtrial.rl.export import ExportCounts, export
from fairtrial.rl.groups import Group, Rollout, best_at_k, groups
from fairtrial.rl.loop import TrainConfig, TrainingBackend, train
from fairtrial.rl.metric_log import MetricLog
from fairtrial.rl.prompts import write_prompts
from fairtrial.rl.reward import RewardFunction, reward
from fairtrial.rl.sampling import generate_rollouts, rollout
from fairtrial.rl.tokens import TokenRow, stitch

__all__ = [
    "DataBuffer",
    "ExportCounts",
    "Group",
    "MetricLog",
    "RewardFunction",
    "Rollout",
    "TokenRow",
    "TrainConfig",
    "TrainingBackend",
    "advantages",
    "best_at_k",
    "export",
    "generate_rollouts",
    "groups",
    "reward",
    "rollout",
    "stitch",
    "train",
    "write_prompts",
]
