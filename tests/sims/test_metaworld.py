"""Meta-World's first observation of an episode is of that episode."""

from __future__ import annotations

import pytest
import torch

from sims.adapters.metaworld import Metaworld, MetaworldConfig
from sims.examples import is_installed
from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import StartState

OBJECT = slice(4, 7)  # its position in the full state [m]


@pytest.mark.skipif(not is_installed("metaworld"), reason="Meta-World is not installed")
def test_the_first_observation_shows_the_object_where_it_is() -> None:
    tasks = ("drawer-open", "window-open", "dial-turn")
    config = MetaworldConfig(tasks=tasks, state="full", num_envs=3, image_size=(64, 64))
    env = SubprocVectorEnv(config, Metaworld)
    try:
        env.reset(start=[StartState(task=i, seed=5) for i in range(3)])
        first = env.observe()
        assert torch.equal(first.state[:, 18:36], first.state[:, :18])  # the one before
        env.step(torch.zeros(3, 4))
        then = env.observe()
        moved = (then.state - first.state)[:, OBJECT].norm(dim=1)
        assert (moved < 0.002).all(), moved
        changed = ((then.images.int() - first.images.int()).abs().amax(-1) > 40).flatten(1).sum(1)
        assert (changed < 20).all(), changed
    finally:
        env.close()
