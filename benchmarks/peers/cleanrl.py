"""CleanRL's ``ppo_continuous_action.py``, run as it is from a checkout, at the size of a ``Work``.

Its running normalization of observations and rewards is left out, which no other contender has, and one wrapper gets
the argument that it has needed since Gymnasium 1.0. Networks: its own, (64, 64).
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch.utils.tensorboard

from benchmarks.peers.pace import Pace
from benchmarks.peers.work import Work


def run(pace: Pace, work: Work, checkout: Path) -> None:
    script = checkout / "cleanrl" / "ppo_continuous_action.py"
    assert work.hidden == work.critic_hidden == (64, 64)
    settings = {
        "env-id": work.env_id, "num-envs": work.num_envs, "num-steps": work.decisions, "update-epochs": work.epochs,
        "num-minibatches": work.batch // work.minibatch, "total-timesteps": 1_000_000 * work.batch,
    }  # fmt: skip
    wrappers: Any = gymnasium.wrappers
    transform = wrappers.TransformObservation
    wrappers.TransformObservation = lambda env, change: transform(env, change, env.observation_space)
    wrappers.NormalizeObservation = lambda env: env
    wrappers.NormalizeReward = lambda env, gamma: env
    gymnasium.vector.SyncVectorEnv = _paced_envs(pace, work)  # type: ignore[misc, assignment]
    torch.utils.tensorboard.SummaryWriter = _paced_writer(pace)  # type: ignore[misc, assignment]
    torch.optim.Adam = _counted_adam(pace)  # type: ignore[misc, assignment]
    sys.argv = [str(script), "--no-cuda", *(f"--{name}={value}" for name, value in settings.items())]
    os.chdir(tempfile.mkdtemp())
    runpy.run_path(str(script), run_name="__main__")


def _paced_envs(pace: Pace, work: Work) -> type:
    class Paced(gymnasium.vector.SyncVectorEnv):
        taken = 0

        def reset(self, **settings: Any) -> Any:
            found = super().reset(**settings)
            pace.begin()
            return found

        def step(self, actions: Any) -> Any:
            found = super().step(actions)
            self.taken += 1
            if self.taken % work.decisions == 0:
                pace.rolled_out()
            return found

    return Paced


def _paced_writer(pace: Pace) -> type:
    class Paced(torch.utils.tensorboard.SummaryWriter):
        def add_scalar(self, tag: str, *given: Any, **settings: Any) -> None:
            super().add_scalar(tag, *given, **settings)
            if tag == "charts/SPS":  # the last line of an iteration
                pace.begin()

    return Paced


def _counted_adam(pace: Pace) -> Callable[..., torch.optim.Adam]:
    adam = torch.optim.Adam

    def make(*given: Any, **settings: Any) -> torch.optim.Adam:
        optimizer = adam(*given, **settings)
        pace.count(optimizer)
        return optimizer

    return make
