"""The contract of VectorEnv, tested for one environment of every simulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import DemonstratedEnv, Step, VectorEnv
from sims.verification.conformance import CHECKS, MAX_STEPS, NUM_ENVS, starts
from tests.sims.counting import Counting, CountingConfig
from tests.sims.environments_to_check import ENVIRONMENTS

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


@pytest.mark.parametrize("check", CHECKS)
def test_contract(env: VectorEnv, check: str) -> None:
    CHECKS[check](env)


def test_long_instructions_are_within_the_contract() -> None:
    long = "put the red cube on the blue plate and then the green bowl on top of it, gently, without moving the plate"
    env = SubprocVectorEnv(CountingConfig(num_envs=NUM_ENVS, max_steps=MAX_STEPS, instructions=(long, "up")), Counting)
    try:
        CHECKS["shapes types and devices"](env)
        assert env.observe().instruction.shape == (NUM_ENVS, 128)
    finally:
        env.close()


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
        paid = torch.zeros(env.spec.num_envs)
        step: Step | None = None
        for _ in range(within):
            step = env.step(expert.act())
            paid += step.reward
            won |= step.success
            assert torch.equal(step.success, won)
            assert torch.equal(step.terminated, won)
        assert step is not None
        assert won.all()
        assert not step.truncated.any()
        assert torch.equal(paid, torch.ones(env.spec.num_envs))
    finally:
        env.close()
