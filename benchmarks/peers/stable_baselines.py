"""Stable-Baselines3's PPO at the size of a ``Work``."""

from __future__ import annotations

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.peers.pace import Pace
from benchmarks.peers.work import Work


class _AfterRollout(BaseCallback):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.pace = pace

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.pace.rolled_out()


def run(pace: Pace, work: Work) -> None:
    """Its default vectorization: all environments in this process."""
    env = make_vec_env(work.env_id, n_envs=work.num_envs, seed=0, env_kwargs={"max_episode_steps": work.max_steps})
    widths = {"pi": list(work.hidden), "vf": list(work.critic_hidden)}
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=work.decisions,
        batch_size=work.minibatch,
        n_epochs=work.epochs,
        policy_kwargs={"net_arch": widths, "activation_fn": torch.nn.Tanh},
        device="cpu",
        seed=0,
    )
    pace.count(model.policy.optimizer)
    while True:
        pace.begin()
        model.learn(work.batch, callback=_AfterRollout(pace), reset_num_timesteps=False)
