"""What every world has to do, whoever simulates it: one world of each kind for all of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sims.chunk import ChunkStep, step_chunk
from sims.vector_env import (
    MIN_INSTRUCTION_BYTES,
    CannotCapture,
    DemonstratedEnv,
    StartState,
    Step,
    VectorEnv,
    decode_instructions,
)
from tests.sims.environments_to_check import ENVIRONMENTS, MAX_STEPS

FLAGS = ("terminated", "truncated", "success", "intervened", "valid")
CASES = [
    pytest.param(name, marks=pytest.mark.skipif(not world.available, reason=f"vla-rl sims install {world.needs}"))
    for name, world in ENVIRONMENTS.items()
]


@pytest.fixture(scope="module", params=CASES)
def world(request: Any) -> Iterator[VectorEnv]:
    """With a time limit of MAX_STEPS, so short that random actions never succeed."""
    env = ENVIRONMENTS[request.param].make(MAX_STEPS)
    yield env
    env.close()


def starts(env: VectorEnv, *seeds: int) -> list[StartState]:
    return [StartState(task=seed % len(env.spec.tasks), seed=seed) for seed in seeds]


def actions(env: VectorEnv, horizon: int, seed: int = 0) -> torch.Tensor:
    """The same for every row, [N, horizon, A]."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.rand(1, horizon, env.spec.action_dim, generator=generator) * 2 - 1
    return one.expand(env.spec.num_envs, -1, -1).to(env.spec.device)


def same(a: Any, b: Any, rows: Any = slice(None)) -> None:
    for name in (field.name for field in dataclasses.fields(a)):
        torch.testing.assert_close(getattr(a, name)[rows], getattr(b, name)[rows], rtol=0, atol=0, msg=name)


def test_shapes_types_and_devices(world: VectorEnv) -> None:
    spec, n = world.spec, world.spec.num_envs
    world.reset(start=starts(world, *range(n)))
    obs = world.observe()
    assert obs.images.shape == (n, len(spec.cameras), *spec.image_size, 3)
    assert obs.images.dtype == torch.uint8
    assert obs.state.shape == (n, spec.state_dim)
    assert obs.state.dtype == torch.float32
    assert obs.instruction.shape == (n, MIN_INSTRUCTION_BYTES)
    assert all(decode_instructions(obs.instruction))
    assert world.observe([1]).state.shape == (1, spec.state_dim)
    step = world.step(actions(world, 1)[:, 0])
    for name, dtype in (("reward", torch.float32), *((flag, torch.bool) for flag in FLAGS)):
        value = getattr(step, name)
        assert (value.shape, value.dtype, value.device.type) == ((n,), dtype, spec.device.type), name
    assert torch.isfinite(obs.state).all()
    assert step.valid.all()


def test_looking_changes_nothing(world: VectorEnv) -> None:
    world.reset(start=starts(world, 1, 2, 3))
    world.step(actions(world, 1)[:, 0])
    same(world.observe(), world.observe())


def test_observations_are_copies(world: VectorEnv) -> None:
    world.reset(start=starts(world, 1, 2, 3))
    before = world.observe()
    kept = before.map(torch.clone)
    step_chunk(world, actions(world, 5), 1.0)
    world.observe()
    same(before, kept)


def test_time_runs_out_and_the_row_stands_still(world: VectorEnv) -> None:
    world.reset(start=starts(world, 4, 5, 6))
    for i, action in enumerate(actions(world, MAX_STEPS).unbind(1)):
        step = world.step(action)
        assert step.truncated.tolist() == [i == MAX_STEPS - 1] * world.spec.num_envs
        assert not step.terminated.any()
    before = world.observe()
    again = world.step(actions(world, 1, seed=1)[:, 0])
    assert (again.reward == 0).all()
    assert again.truncated.all()
    same(before, world.observe())


def test_same_start_same_episode_whatever_came_before(world: VectorEnv) -> None:
    world.reset(start=starts(world, 7, 8, 9))
    step_chunk(world, actions(world, 6, seed=3), 1.0)
    world.observe()
    world.reset(start=starts(world, 11, 11, 11))
    first = world.observe()
    chunk = step_chunk(world, actions(world, 5), 0.9)
    last = world.observe()
    for row in (1, 2):
        for record in (first, chunk, last):
            same(record[[0]], record[[row]])
    world.reset([2], start=starts(world, 12))
    other = world.observe([2])
    assert not torch.equal(other.state, first.state[[2]])


def test_partial_reset_leaves_the_others(world: VectorEnv) -> None:
    world.reset(start=starts(world, 1, 2, 3))
    step_chunk(world, actions(world, 4), 1.0)
    before = world.observe()
    world.reset([1], start=starts(world, 5))
    same(before, world.observe(), rows=[0, 2])
    chunk = step_chunk(world, actions(world, MAX_STEPS - 4), 1.0)
    assert chunk.truncated.tolist() == [True, False, True]


class Stepped:
    """Hides what a world may offer beyond ``step``."""

    def __init__(self, env: VectorEnv) -> None:
        self.spec, self.step = env.spec, env.step


def test_a_chunk_is_its_steps_and_ends_at_the_true_successor(world: VectorEnv) -> None:
    """Two of three rows run out of time in mid-chunk; what is seen then is where they stopped."""
    ways: list[tuple[ChunkStep, Any]] = []
    for env in (world, Stepped(world)):
        world.reset(start=starts(world, 1, 2, 3))
        step_chunk(world, actions(world, 8, seed=1), 1.0)
        world.reset([1], start=starts(world, 4))
        chunk = step_chunk(env, actions(world, 6, seed=2), 0.9)  # type: ignore[arg-type]
        ways.append((chunk, world.observe()))
    assert ways[0][0].num_executed.tolist() == [MAX_STEPS - 8, 6, MAX_STEPS - 8]
    assert ways[0][0].truncated.tolist() == [True, False, True]
    torch.testing.assert_close(ways[0][0].reward, ways[1][0].reward)
    for name in ("num_executed", *FLAGS):
        assert torch.equal(getattr(ways[0][0], name), getattr(ways[1][0], name)), name
    same(ways[0][1], ways[1][1])
    world.reset(start=starts(world, 1, 2, 3))
    step_chunk(world, actions(world, 8, seed=1), 1.0)
    step_chunk(world, actions(world, 6, seed=2)[:, : MAX_STEPS - 8], 1.0)
    same(world.observe(), ways[0][1], rows=[0, 2])


def test_capture_brings_a_row_back(world: VectorEnv) -> None:
    if not world.spec.can_capture:
        with pytest.raises(CannotCapture):
            world.capture()
        return
    world.reset(start=starts(world, 1, 2, 3))
    step_chunk(world, actions(world, 5), 1.0)
    (captured,) = world.capture([1])
    seen = world.observe([1])
    chunk = step_chunk(world, actions(world, 4, seed=5), 0.9)
    after = world.observe([1])
    world.reset([2], start=[captured])
    same(world.observe([2]), seen)
    again = step_chunk(world, actions(world, 4, seed=5), 0.9)
    assert again.reward[2] == chunk.reward[1]
    same(world.observe([2]), after)
    assert step_chunk(world, actions(world, 9), 1.0).num_executed[2] == MAX_STEPS - 9


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=c.marks) for c in CASES if ENVIRONMENTS[n := str(c.values[0])].solved_within is not None],
)
def test_success_ends_the_episode_and_stays(name: str) -> None:
    within = ENVIRONMENTS[name].solved_within
    assert within is not None
    env = ENVIRONMENTS[name].make(within)
    try:
        assert isinstance(env, DemonstratedEnv)
        env.reset(start=starts(env, 0, 2, 4))
        expert = env.expert(noise=0.0, seed=0)
        won = torch.zeros(env.spec.num_envs, dtype=torch.bool)
        step: Step | None = None
        for _ in range(within):
            step = env.step(expert.act())
            won |= step.success
            assert torch.equal(step.success, won)
            assert torch.equal(step.terminated, won)
        assert step is not None
        assert won.all()
        assert not step.truncated.any()
        assert (step.reward == 0).all()
    finally:
        env.close()
