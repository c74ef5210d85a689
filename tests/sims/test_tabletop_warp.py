"""The Warp backend on Warp's CPU device, compared with C MuJoCo and with the contract of VectorEnv."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
import torch

from sims.errors import UserError
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import StartState

# The first run on a machine compiles the kernels, up to minutes on a busy one; later runs find them in Warp's cache.
pytestmark = pytest.mark.timeout(1200)

TASKS = ("pick", "stack", "open_drawer", "insert_peg")
STARTS = [StartState(task=i, seed=10 + i) for i in range(4)]
MAX_STEPS = 24


def _open(backend: Literal["mujoco", "warp"]) -> TabletopEnv:
    return TabletopEnv(
        TabletopConfig(tasks=TASKS, num_envs=4, image_size=(32, 32), max_steps=MAX_STEPS, backend=backend, threads=1)
    )


@pytest.fixture(scope="module")
def opened() -> Iterator[TabletopEnv]:
    pytest.importorskip("mujoco_warp", reason="the warp extra is not installed: pip install 'vla-rl[warp]'")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the Warp backend runs on it; tests/gpu/test_tabletop_cuda.py has its tests")
    env = _open("warp")
    yield env
    env.close()


@pytest.fixture
def env(opened: TabletopEnv) -> TabletopEnv:
    opened.reset(start=STARTS)
    return opened


@pytest.fixture(scope="module")
def reference() -> Iterator[TabletopEnv]:
    env = _open("mujoco")
    yield env
    env.close()


def _actions(steps: int, *, seed: int = 0) -> torch.Tensor:
    """Smooth random motion [steps, 4, 7] that presses down on the objects below."""
    generator = torch.Generator().manual_seed(seed)
    steady = torch.rand(1, 4, 7, generator=generator) - 0.5
    actions = steady + 0.4 * torch.randn(steps, 4, 7, generator=generator)
    actions[..., 2] -= 0.4
    return actions.clamp(-1, 1)


def _play(env: TabletopEnv, actions: torch.Tensor) -> np.ndarray:
    """The physics state of every environment after each action, [steps, N, size]."""
    states = []
    for action in actions:
        env.step(action)
        states.append(env.backend.export()[0])
    return np.stack(states)


def _object_positions(env: TabletopEnv) -> torch.Tensor:
    """Positions of blocks, peg and drawers, [4, things, 3]."""
    scene = env.scene
    drawers = torch.nn.functional.pad(scene.drawers[..., None], (0, 2))
    return torch.cat([scene.blocks[..., :3], scene.peg[:, None, :3], drawers], dim=1)


def test_free_motion_agrees_with_c_mujoco(env: TabletopEnv, reference: TabletopEnv) -> None:
    reference.reset(start=STARTS)
    expert = reference.expert(noise=0.3, seed=0)
    for _ in range(5):
        action = expert.act()
        env.step(action)
        reference.step(action)
    assert (env.scene.end_effector - reference.scene.end_effector).abs().max() < 1e-5
    assert (env.scene.rotation - reference.scene.rotation).abs().max() < 1e-5
    np.testing.assert_allclose(env.backend.export()[0], reference.backend.export()[0], atol=3e-4)


def test_grasps_and_pulls_agree_with_c_mujoco(env: TabletopEnv, reference: TabletopEnv) -> None:
    reference.reset(start=STARTS)
    expert = reference.expert(noise=0.0, seed=0)
    start = _object_positions(reference)
    for _ in range(22):
        action = expert.act()
        ours, theirs = env.step(action), reference.step(action)
        assert torch.equal(ours.terminated, theirs.terminated)
    assert ((_object_positions(reference) - start).norm(dim=2).amax(1) > 0.01).all()
    assert (_object_positions(env) - _object_positions(reference)).norm(dim=2).max() < 5e-3
    assert (env.scene.end_effector - reference.scene.end_effector).norm(dim=1).max() < 2e-3


def test_images_are_similar_to_opengl(env: TabletopEnv, reference: TabletopEnv) -> None:
    """Environments differ in colors, light and camera poses, so that images in the wrong order are noticed."""
    reference.reset(start=STARTS)
    ours, theirs = env.observe(), reference.observe()
    assert ours.images.shape == theirs.images.shape == (4, 2, 32, 32, 3)
    assert ours.images.dtype == torch.uint8
    difference = (ours.images.float() - theirs.images.float()).abs().mean((2, 3, 4))
    assert difference.max() < 3.0
    between_rows = (theirs.images[:, None].float() - theirs.images[None].float()).abs().mean((3, 4, 5))
    assert between_rows[~torch.eye(4, dtype=torch.bool)].min() > 6.0
    assert torch.equal(ours.instruction, theirs.instruction)
    torch.testing.assert_close(ours.state, theirs.state, atol=1e-5, rtol=0.0)


def test_images_of_some_environments_equal_those_of_all(env: TabletopEnv) -> None:
    everything = env.observe().images
    assert torch.equal(env.observe([2, 0]).images, everything[[2, 0]])


def test_observation_shows_the_state_after_the_step_and_is_a_copy(env: TabletopEnv) -> None:
    before = env.observe().images
    kept = before.clone()
    env.step(torch.tensor([[0.0, 1.0, 0.5, 0.0, 0.0, 0.0, -1.0]] * 4))
    after = env.observe().images
    assert torch.equal(before, kept)
    assert (after != before).flatten(1).any(1).all()
    assert torch.equal(env.observe().images, after)


def test_same_starts_and_actions_give_the_same_bits(env: TabletopEnv) -> None:
    actions = _actions(12)
    first, image = _play(env, actions), env.observe().images
    env.reset(start=STARTS)
    np.testing.assert_array_equal(_play(env, actions), first)
    assert torch.equal(env.observe().images, image)


def test_environments_are_independent(env: TabletopEnv) -> None:
    actions = _actions(12)
    first = _play(env, actions)
    env.reset(start=STARTS[::-1])
    np.testing.assert_array_equal(_play(env, actions.flip(1))[:, ::-1], first)


def test_captured_states_continue_exactly_in_other_environments(env: TabletopEnv) -> None:
    actions = _actions(16)
    _play(env, actions[:8])
    captured, image = env.capture(), env.observe().images
    rest = _play(env, actions[8:])
    env.reset([3, 0, 1, 2], start=captured)
    order = [1, 2, 3, 0]  # row i goes on where row order[i] was
    assert torch.equal(env.observe().images[[3, 0, 1, 2]], image)
    shuffled = actions[8:, order]
    np.testing.assert_array_equal(_play(env, shuffled)[:, [3, 0, 1, 2]], rest)


def test_reset_of_one_environment_does_not_change_the_others(env: TabletopEnv) -> None:
    _play(env, _actions(4))
    before, images = env.backend.export()[0], env.observe().images
    fresh = StartState(task=1, seed=77)
    env.reset([2], start=[fresh])
    after, images_after = env.backend.export()[0], env.observe().images
    others = [0, 1, 3]
    np.testing.assert_array_equal(after[others], before[others])
    assert torch.equal(images_after[others], images[others])
    assert after[2, 0] == 0.0
    assert env.elapsed.tolist() == [4, 4, 0, 4]
    env.reset([0], start=[fresh])
    np.testing.assert_array_equal(env.backend.export()[0][0], after[2])
    assert torch.equal(env.observe().images[0], images_after[2])


def test_finished_environments_do_not_change(env: TabletopEnv) -> None:
    waiting = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.0, 0.0, -1.0]] * 4)
    for _ in range(6):
        env.step(waiting)
    env.reset([1], start=[STARTS[1]])
    for _ in range(MAX_STEPS - 6):
        last = env.step(waiting)
    assert last.truncated.tolist() == [True, False, True, True]
    before = env.backend.export()[0]
    step = env.step(torch.ones(4, 7))
    after = env.backend.export()[0]
    standing = [0, 2, 3]
    np.testing.assert_array_equal(after[standing], before[standing])
    assert np.abs(after[1] - before[1]).max() > 1e-3
    assert step.truncated.tolist() == [True, False, True, True]
    assert step.reward.tolist() == [0.0] * 4


def test_error_of_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    monkeypatch.delitem(sys.modules, "sims.tabletop.warp_backend", raising=False)
    with pytest.raises(UserError, match=r"pip install 'vla-rl\[warp\]'"):
        _open("warp")
