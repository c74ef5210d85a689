"""ReinFlow's PPO for flow policies (Zhang et al. 2025), from a checkout of ReinFlow/ReinFlow.

With ``repeat_samples: false``: their setting true repeats each decision ten times in an epoch, which is no additional
data. Their check that the first ratio is 1 is off: as we read it, they sample on another time grid
(``linspace(0, 1, K)``) than they score on.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from benchmarks.peers.checkout import enter, instantiated, paced, settings, with_envs
from benchmarks.peers.pace import Pace
from benchmarks.peers.work import Work


def run(pace: Pace, work: Work, checkout: Path) -> None:
    folder = enter(checkout)
    config = settings(checkout / "cfg/gym/finetune/hopper-v2/ft_ppo_reflow_mlp.yaml", folder, work)
    config.train.batch_size, config.train.repeat_samples, config.train.target_kl = work.minibatch, False, None
    with_envs(importlib.import_module("agent.finetune.reinflow.train_agent"), work)
    agent = instantiated(config)
    agent.initial_ratio_error_threshold = float("inf")
    paced(agent, pace, work)
    agent.run()
