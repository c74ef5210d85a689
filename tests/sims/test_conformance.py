"""The contract of VectorEnv, tested for one environment of every simulator."""

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
from tests.worlds import WithoutAdvance

FLAGS = ("terminated", "truncated", "success", "intervened", "valid")
CASES = [
    pytest.param(name, marks=pytest.mark.skipif(not env.available, reason=f"vla-rl sims install {env.needs}"))
    for name, env in ENVIRONMENTS.items()
]


@pytest.fixture(scope="module", params=CASES)
def env(request: Any) -> Iterator[VectorEnv]:
    """With a time limit of MAX_STEPS, so short that random actions never succeed."""
    env = ENVIRONMENTS[request.param].make(MAX_STEPS)
    yield env
    env.close()


def starts(env: VectorEnv, *seeds: int) -> list[StartState]:
    return [StartState(task=seed % len(env.spec.tasks), seed=seed) for seed in seeds]


def actions(env: VectorEnv, horizon: int, seed: int = 0) -> torch.Tensor:
    """The same for every environment, [N, horizon, A]."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.rand(1, horizon, env.spec.action_dim, generator=generator) * 2 - 1
    return one.expand(env.spec.num_envs, -1, -1).to(env.spec.device)


def same(a: Any, b: Any, env_ids: Any = slice(None)) -> None:
    for name in (field.name for field in dataclasses.fields(a)):
        torch.testing.assert_close(getattr(a, name)[env_ids], getattr(b, name)[env_ids], rtol=0, atol=0, msg=name)


def test_shapes_types_and_devices(env: VectorEnv) -> None:
    spec, n = env.spec, env.spec.num_envs
    env.reset(start=starts(env, *range(n)))
    obs = env.observe()
    assert obs.images.shape == (n, len(spec.cameras), *spec.image_size, 3)
    assert obs.images.dtype == torch.uint8
    assert obs.state.shape == (n, spec.state_dim)
    assert obs.state.dtype == torch.float32
    assert obs.instruction.shape == (n, MIN_INSTRUCTION_BYTES)
    assert all(decode_instructions(obs.instruction))
    assert env.observe([1]).state.shape == (1, spec.state_dim)
    step = env.step(actions(env, 1)[:, 0])
    for name, dtype in (("reward", torch.float32), *((flag, torch.bool) for flag in FLAGS)):
        value = getattr(step, name)
        assert (value.shape, value.dtype, value.device.type) == ((n,), dtype, spec.device.type), name
    assert torch.isfinite(obs.state).all()
    assert step.valid.all()


def test_observing_does_not_change_the_state(env: VectorEnv) -> None:
    env.reset(start=starts(env, 1, 2, 3))
    env.step(actions(env, 1)[:, 0])
    same(env.observe(), env.observe())


def test_observations_are_copies(env: VectorEnv) -> None:
    env.reset(start=starts(env, 1, 2, 3))
    before = env.observe()
    kept = before.map(torch.clone)
    step_chunk(env, actions(env, 5), 1.0)
    env.observe()
    same(before, kept)


def test_time_limit_truncates_and_the_state_stays(env: VectorEnv) -> None:
    env.reset(start=starts(env, 4, 5, 6))
    for i, action in enumerate(actions(env, MAX_STEPS).unbind(1)):
        step = env.step(action)
        assert step.truncated.tolist() == [i == MAX_STEPS - 1] * env.spec.num_envs
        assert not step.terminated.any()
    before = env.observe()
    again = env.step(actions(env, 1, seed=1)[:, 0])
    assert (again.reward == 0).all()
    assert again.truncated.all()
    same(before, env.observe())


def test_same_start_gives_the_same_episode_after_any_history(env: VectorEnv) -> None:
    env.reset(start=starts(env, 7, 8, 9))
    step_chunk(env, actions(env, 6, seed=3), 1.0)
    env.observe()
    env.reset(start=starts(env, 11, 11, 11))
    first = env.observe()
    chunk = step_chunk(env, actions(env, 5), 0.9)
    last = env.observe()
    for env_id in (1, 2):
        for record in (first, chunk, last):
            same(record[[0]], record[[env_id]])
    env.reset([2], start=starts(env, 12))
    other = env.observe([2])
    assert not torch.equal(other.state, first.state[[2]])


def test_partial_reset_does_not_change_the_others(env: VectorEnv) -> None:
    env.reset(start=starts(env, 1, 2, 3))
    step_chunk(env, actions(env, 4), 1.0)
    before = env.observe()
    env.reset([1], start=starts(env, 5))
    same(before, env.observe(), env_ids=[0, 2])
    chunk = step_chunk(env, actions(env, MAX_STEPS - 4), 1.0)
    assert chunk.truncated.tolist() == [True, False, True]


def test_chunk_equals_its_steps_and_ends_at_the_true_successor(env: VectorEnv) -> None:
    """Two of three environments reach the time limit in the middle of the chunk and are observed where they stopped."""
    results: list[tuple[ChunkStep, Any]] = []
    for stepped in (env, WithoutAdvance(env)):
        env.reset(start=starts(env, 1, 2, 3))
        step_chunk(env, actions(env, 8, seed=1), 1.0)
        env.reset([1], start=starts(env, 4))
        chunk = step_chunk(stepped, actions(env, 6, seed=2), 0.9)
        results.append((chunk, env.observe()))
    assert results[0][0].num_executed.tolist() == [MAX_STEPS - 8, 6, MAX_STEPS - 8]
    assert results[0][0].truncated.tolist() == [True, False, True]
    torch.testing.assert_close(results[0][0].reward, results[1][0].reward)
    for name in ("num_executed", *FLAGS):
        assert torch.equal(getattr(results[0][0], name), getattr(results[1][0], name)), name
    same(results[0][1], results[1][1])
    env.reset(start=starts(env, 1, 2, 3))
    step_chunk(env, actions(env, 8, seed=1), 1.0)
    step_chunk(env, actions(env, 6, seed=2)[:, : MAX_STEPS - 8], 1.0)
    same(env.observe(), results[0][1], env_ids=[0, 2])


def test_capture_restores_a_state(env: VectorEnv) -> None:
    if not env.spec.can_capture:
        with pytest.raises(CannotCapture):
            env.capture()
        return
    env.reset(start=starts(env, 1, 2, 3))
    step_chunk(env, actions(env, 5), 1.0)
    (captured,) = env.capture([1])
    before = env.observe([1])
    chunk = step_chunk(env, actions(env, 4, seed=5), 0.9)
    after = env.observe([1])
    env.reset([2], start=[captured])
    same(env.observe([2]), before)
    again = step_chunk(env, actions(env, 4, seed=5), 0.9)
    assert again.reward[2] == chunk.reward[1]
    same(env.observe([2]), after)
    assert step_chunk(env, actions(env, 9), 1.0).num_executed[2] == MAX_STEPS - 9


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=c.marks) for c in CASES if ENVIRONMENTS[n := str(c.values[0])].solved_within is not None],
)
def test_success_ends_the_episode_and_persists(name: str) -> None:
    within = ENVIRONMENTS[name].solved_within
    assert within is not None
    env = ENVIRONMENTS[name].make(within)
    try:
        assert isinstance(env, DemonstratedEnv)
        env.reset(start=starts(env, 0, 1, 2))
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
