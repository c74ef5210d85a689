"""DPPO's PPO for diffusion policies (Ren et al. 2024), from a checkout of irom-princeton/dppo."""

from __future__ import annotations

import importlib
from pathlib import Path

from benchmarks.peers.checkout import enter, instantiated, paced, settings, with_envs
from benchmarks.peers.pace import Pace
from benchmarks.peers.work import Work


def run(pace: Pace, work: Work, checkout: Path) -> None:
    folder = enter(checkout)
    config = settings(checkout / "cfg/gym/finetune/hopper-v2/ft_ppo_diffusion_mlp.yaml", folder, work)
    config.train.batch_size = work.minibatch * work.trained_steps  # (decision, denoising step) pairs
    with_envs(importlib.import_module("agent.finetune.train_agent"), work)
    agent = instantiated(config)
    paced(agent, pace, work)
    agent.run()
