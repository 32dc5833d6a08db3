"""Reinforcement learning: any run is a batch of rollouts, any evaluator is a reward. No trainer is imported."""

from fairtrial.rl.advantages import advantages
from fairtrial.rl.diagnose import Curve, Diagnosis, HackingCheck, curve, diagnose, hacking
from fairtrial.rl.episode import EpisodeResult, TrainerEpisode, episode
from fairtrial.rl.export import ExportCounts, export, write_prompts
from fairtrial.rl.fork import Checkpoint, TurnValue, checkpoints, fork, turn_values
from fairtrial.rl.groups import Group, Rollout, TokenRow, best_at_k, generate_rollouts, groups, rollout, stitch
from fairtrial.rl.local_model import with_adapter
from fairtrial.rl.loop import DataBuffer, MetricLog, TrainConfig, TrainingBackend, train
from fairtrial.rl.reward import RewardFunction, reward
from fairtrial.rl.trainers import VerlReward, openenv_sessions, skyrl_env, verifiers_taskset, verl_reward
from fairtrial.rl.trl import TrlTraining, trl

__all__ = [
    "Checkpoint",
    "Curve",
    "DataBuffer",
    "Diagnosis",
    "EpisodeResult",
    "ExportCounts",
    "Group",
    "HackingCheck",
    "MetricLog",
    "RewardFunction",
    "Rollout",
    "TokenRow",
    "TrainConfig",
    "TrainerEpisode",
    "TrainingBackend",
    "TrlTraining",
    "TurnValue",
    "VerlReward",
    "advantages",
    "best_at_k",
    "checkpoints",
    "curve",
    "diagnose",
    "episode",
    "export",
    "fork",
    "generate_rollouts",
    "groups",
    "hacking",
    "openenv_sessions",
    "reward",
    "rollout",
    "skyrl_env",
    "stitch",
    "train",
    "trl",
    "turn_values",
    "verifiers_taskset",
    "verl_reward",
    "with_adapter",
    "write_prompts",
]
