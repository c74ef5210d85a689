"""The batch adapter of ManiSkill: on a GPU if there is one, otherwise with one environment on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("mani_skill", reason="pip install mani_skill into the trainer's own interpreter")

from sims.adapters.maniskill import ManiSkillConfig
from sims.adapters.maniskill_gpu import ManiSkillGPU
from sims.chunk import step_chunk
from sims.vector_env import StartState

CUDA = torch.cuda.is_available()
CONFIG = ManiSkillConfig(
    task="PushCube-v1", image_size=(32, 48), max_steps=6, num_envs=3 if CUDA else 1,
    backend="physx_cuda" if CUDA else "physx_cpu",
)  # fmt: skip


def test_starts_ends_and_restoring() -> None:
    env = ManiSkillGPU(CONFIG)
    n = CONFIG.num_envs
    env.reset(start=[StartState(task=0, seed=5)] * n)
    first = env.observe()
    assert (first.state == first.state[:1]).all()
    assert first.images.float().std() > 5
    generator = torch.Generator().manual_seed(0)
    action = (torch.rand(1, 9, env.spec.action_dim, generator=generator) * 2 - 1).expand(n, -1, -1)
    step_chunk(env, action[:, :3], 1.0)
    captured, seen = env.capture(), env.observe()
    chunk = step_chunk(env, action[:, 3:], 1.0)
    assert chunk.truncated.all()
    last = env.observe()
    env.step(action[:, 0])
    assert torch.equal(env.observe().state, last.state)
    assert (env.step(action[:, 0]).reward == 0).all()
    env.reset(start=captured)
    torch.testing.assert_close(env.observe().state, seen.state, rtol=1e-4, atol=1e-4)
    assert step_chunk(env, action[:, 3:], 1.0).num_executed.max() == 3
    env.reset([0], start=[StartState(task=0, seed=5)])
    torch.testing.assert_close(env.observe([0]).state, first.state[[0]], rtol=1e-4, atol=1e-4)
    env.close()


def test_error_of_an_unknown_task_lists_the_known_ones() -> None:
    from sims.errors import UserError

    with pytest.raises(UserError, match="no 'PickMoon-v1'"):
        ManiSkillGPU(replace(CONFIG, task="PickMoon-v1"))
