"""The contract of VectorEnv as checks of any environment, for ``vla-rl sims verify NAME`` and for the tests.

Each check takes NUM_ENVS environments whose time limit, MAX_STEPS, is so short that random actions never succeed, and
raises AssertionError where the environment breaks the contract.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sims.chunk import ChunkStep, step_chunk
from sims.vector_env import (
    INSTRUCTION_BYTES_STEP,
    MIN_INSTRUCTION_BYTES,
    CannotCapture,
    StartState,
    VectorEnv,
    decode_instructions,
)

NUM_ENVS, MAX_STEPS = 3, 12
FLAGS = ("terminated", "truncated", "success", "intervened", "valid")


class WithoutAdvance:
    """An environment's step and observe alone, so that a chunk is taken step by step."""

    def __init__(self, env: VectorEnv) -> None:
        self._env, self.spec = env, env.spec
        self.step, self.observe, self.reset = env.step, env.observe, env.reset
        self.capture, self.close = env.capture, env.close


def starts(env: VectorEnv, *seeds: int) -> list[StartState]:
    return [StartState(task=seed % len(env.spec.tasks), seed=seed) for seed in seeds]


def actions(env: VectorEnv, horizon: int, seed: int = 0) -> torch.Tensor:
    """The same for every environment, [N, horizon, A]."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.rand(1, horizon, env.spec.action_dim, generator=generator) * 2 - 1
    return one.expand(env.spec.num_envs, -1, -1).to(env.spec.device)


def same(a: Any, b: Any, env_ids: Any = slice(None)) -> None:
    for name in (field.name for field in dataclasses.fields(a)):
        one, other = getattr(a, name), getattr(b, name)
        if one is None and other is None:
            continue
        torch.testing.assert_close(one[env_ids], other[env_ids], rtol=0, atol=0, msg=name)


def check_shapes_types_and_devices(env: VectorEnv) -> None:
    spec, n = env.spec, env.spec.num_envs
    env.reset(start=starts(env, *range(n)))
    obs = env.observe()
    assert obs.images.shape == (n, len(spec.cameras), *spec.image_size, 3)
    assert obs.images.dtype == torch.uint8
    assert obs.state.shape == (n, spec.state_dim)
    assert obs.state.dtype == torch.float32
    width = obs.instruction.shape[1]
    assert obs.instruction.shape == (n, width)
    assert width >= MIN_INSTRUCTION_BYTES and width % INSTRUCTION_BYTES_STEP == 0
    assert all(decode_instructions(obs.instruction))
    assert env.observe([1]).state.shape == (1, spec.state_dim)
    step = env.step(actions(env, 1)[:, 0])
    for name, dtype in (("reward", torch.float32), *((flag, torch.bool) for flag in FLAGS)):
        value = getattr(step, name)
        assert (value.shape, value.dtype, value.device.type) == ((n,), dtype, spec.device.type), name
    assert torch.isfinite(obs.state).all()
    assert step.valid.all()


def check_observing_does_not_change_the_state(env: VectorEnv) -> None:
    env.reset(start=starts(env, 1, 2, 3))
    env.step(actions(env, 1)[:, 0])
    same(env.observe(), env.observe())


def check_observations_are_copies(env: VectorEnv) -> None:
    env.reset(start=starts(env, 1, 2, 3))
    before = env.observe()
    kept = before.map(torch.clone)
    step_chunk(env, actions(env, 5), 1.0)
    env.observe()
    same(before, kept)


def check_time_limit_truncates_and_the_state_stays(env: VectorEnv) -> None:
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


def check_same_start_gives_the_same_episode_after_any_history(env: VectorEnv) -> None:
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
    alike = torch.equal(other.state, first.state[[2]]) and torch.equal(other.images, first.images[[2]])
    assert not alike, "another start must be another state or image"


def check_partial_reset_does_not_change_the_others(env: VectorEnv) -> None:
    env.reset(start=starts(env, 1, 2, 3))
    step_chunk(env, actions(env, 4), 1.0)
    before = env.observe()
    env.reset([1], start=starts(env, 5))
    same(before, env.observe(), env_ids=[0, 2])
    chunk = step_chunk(env, actions(env, MAX_STEPS - 4), 1.0)
    assert chunk.truncated.tolist() == [True, False, True]


def check_chunk_equals_its_steps_and_ends_at_the_true_successor(env: VectorEnv) -> None:
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


def check_capture_restores_a_state(env: VectorEnv) -> None:
    if not env.spec.can_capture:
        try:
            env.capture()
        except CannotCapture:
            return
        raise AssertionError("spec.can_capture is False, but capture did not raise CannotCapture")
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
    ended = step_chunk(env, actions(env, 9), 1.0)
    assert ended.num_executed[2] == MAX_STEPS - 9
    (captured,) = env.capture([2])  # at its end, which is restored too
    env.reset([0], start=[captured])
    over = env.step(actions(env, 1)[:, 0])
    assert over.reward[0] == 0 and all(getattr(over, flag)[0] == getattr(ended, flag)[2] for flag in FLAGS)


def check_without_success_no_behavior_is_paid(env: VectorEnv) -> None:
    """Lingering, oscillating, ending early: nothing pays more than success, which pays 1 and ends the episode."""
    action = actions(env, 1, seed=4)[:, 0]
    for sign in (0.0, -1.0, 1.0):
        env.reset(start=starts(env, 1, 2, 3))
        total = torch.zeros(env.spec.num_envs, device=env.spec.device)
        for i in range(MAX_STEPS + 2):
            step = env.step(action * sign**i if sign else torch.zeros_like(action))
            total += step.reward
        assert torch.equal(total, step.success.float())
        assert step.done.all()


CHECKS: Mapping[str, Callable[[VectorEnv], None]] = {
    check.__name__.removeprefix("check_").replace("_", " "): check
    for check in (
        check_shapes_types_and_devices,
        check_observing_does_not_change_the_state,
        check_observations_are_copies,
        check_time_limit_truncates_and_the_state_stays,
        check_same_start_gives_the_same_episode_after_any_history,
        check_partial_reset_does_not_change_the_others,
        check_chunk_equals_its_steps_and_ends_at_the_true_successor,
        check_capture_restores_a_state,
        check_without_success_no_behavior_is_paid,
    )
}
