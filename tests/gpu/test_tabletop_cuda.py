"""The tabletop suite on a CUDA GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sims.tabletop import TabletopConfig, TabletopEnv
from sims.tabletop.layout import NQ
from sims.vector_env import StartState

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and torch built for CUDA"),
    pytest.mark.timeout(1200),  # the first run on a machine compiles the kernels
]

ROWS = 64
TASKS = ("pick", "stack", "open_drawer", "insert_peg")
STARTS = [StartState(task=i % 4, seed=i) for i in range(ROWS)]


@pytest.fixture(scope="module")
def opened() -> Iterator[TabletopEnv]:
    pytest.importorskip("mujoco_warp", reason="the warp extra is not installed: pip install 'vla-rl[warp]'")
    env = TabletopEnv(TabletopConfig(tasks=TASKS, num_envs=ROWS, image_size=(64, 64), backend="warp"))
    yield env
    env.close()


@pytest.fixture
def env(opened: TabletopEnv) -> TabletopEnv:
    opened.reset(start=STARTS)
    return opened


def _actions(steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(steps, ROWS, 7, generator=generator) * 2 - 1
    actions[..., 2] -= 0.4
    return actions.clamp(-1, 1).cuda()


def _play(env: TabletopEnv, actions: torch.Tensor) -> np.ndarray:
    states = []
    for action in actions:
        env.step(action)
        states.append(env.backend.export()[0])
    return np.stack(states)


def test_everything_is_on_the_gpu(env: TabletopEnv) -> None:
    assert env.spec.device.type == "cuda"
    step, obs = env.step(_actions(1)[0]), env.observe()
    for tensor in (step.reward, step.terminated, step.success, obs.images, obs.state, obs.instruction):
        assert tensor.is_cuda
    assert obs.images.shape == (ROWS, 2, 64, 64, 3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_never_waits_for_the_gpu(opened: TabletopEnv) -> None:
    """Of one task with the sparse reward; torch raises on any synchronizing call."""
    opened.reset(start=[StartState(task=0, seed=i) for i in range(ROWS)])
    action = _actions(1)[0]
    opened.step(action)
    try:
        torch.cuda.set_sync_debug_mode("error")
        opened.step(action)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_agrees_with_c_mujoco(env: TabletopEnv) -> None:
    reference = TabletopEnv(TabletopConfig(tasks=TASKS, num_envs=ROWS, image_size=(64, 64)))
    reference.reset(start=STARTS)
    difference = env.observe().images.cpu().float() - reference.observe().images.float()
    assert difference.abs().mean((2, 3, 4)).max() < 3.0
    expert = reference.expert(noise=0.0, seed=0)
    for _ in range(22):
        action = expert.act()
        env.step(action.cuda())
        reference.step(action)
    tool = (env.scene.end_effector.cpu() - reference.scene.end_effector).norm(dim=1)
    blocks = (env.scene.blocks.cpu() - reference.scene.blocks)[..., :3].norm(dim=-1)
    reference.close()
    # By now most rows touch something; in a few of them contacts have made much of a rounding error.
    assert tool.median() < 1e-4
    assert tool.quantile(0.9) < 5e-3
    assert blocks.median() < 1e-4


def test_same_starts_and_actions_agree(env: TabletopEnv) -> None:
    actions = _actions(12)
    first, image = _play(env, actions), env.observe().images
    env.reset(start=STARTS)
    _assert_close(_play(env, actions), first)
    assert (env.observe().images.float() - image.float()).abs().mean() < 0.5


def test_captured_rows_go_on(env: TabletopEnv) -> None:
    actions = _actions(12)
    _play(env, actions[:6])
    captured = env.capture()
    rest = _play(env, actions[6:])
    env.reset(list(range(ROWS))[::-1], start=captured)
    _assert_close(_play(env, actions[6:].flip(1))[:, ::-1], rest)


def test_works_on_another_stream(env: TabletopEnv) -> None:
    actions = _actions(6)
    first = _play(env, actions)
    env.reset(start=STARTS)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        _assert_close(_play(env, actions), first)


def _assert_close(states: np.ndarray, others: np.ndarray) -> None:
    """Sums of a GPU are in no fixed order, and contacts make much of a rounding error in a few rows."""
    positions = slice(1, 1 + NQ)
    difference = np.abs(states - others)[..., positions].max(2)
    assert difference[0].max() < 1e-4
    assert np.median(difference) < 1e-5
    assert np.quantile(difference[-1], 0.9) < 5e-3
