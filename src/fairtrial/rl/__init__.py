"""Reinforcement learning: any run is a batch of rollouts, any evaluator is a reward. No trainer is imported."""

from fairtrial.rl.advantages import advantages
from fairtrial.rl.buffer import DataBuffer
from fairtrial.rl.curve import Curve, curve
from fairtrial.rl.diagnose import Diagnosis, diagnose
from fairtrial.rl.episode import EpisodeResult, TrainerEpisode, episode
from fairtrial.rl.export import ExportCounts, export
from fairtrial.rl.fork import Checkpoint, TurnValue, checkpoints, fork, turn_values
from fairtrial.rl.groups import Group, Rollout, best_at_k, groups
from fairtrial.rl.hacking import HackingCheck, hacking
from fairtrial.rl.loop import TrainConfig, TrainingBackend, train
from fairtrial.rl.metric_log import MetricLog
from fairtrial.rl.openenv_sessions import openenv_sessions
from fairtrial.rl.policy import with_adapter
from fairtrial.rl.prompts import write_prompts
from fairtrial.rl.reward import RewardFunction, reward
from fairtrial.rl.sampling import generate_rollouts, rollout
from fairtrial.rl.skyrl_env import skyrl_env
from fairtrial.rl.tokens import TokenRow, stitch
from fairtrial.rl.trl_training import TrlTraining, trl
from fairtrial.rl.verifiers_taskset import verifiers_taskset
from fairtrial.rl.verl_reward import VerlReward, verl_reward

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
