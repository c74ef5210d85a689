"""The reward for progress around environments: what an episode is paid in all, and exact continuation."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from sims.vector_env import Observation, StartState, VectorEnv
from sims.verification.conformance import CHECKS, MAX_STEPS, same, starts
from tests.rewards.continuation import check_episodes_continue
from tests.sims.environments_to_check import ENVIRONMENTS
from tests.worlds import ChainEnv, PointEnv
from vla_rl.rewards.progress.env import PaidProgressConfig, ProgressEnv
from vla_rl.rewards.scorer import Sensors

WEIGHT = 0.5


class CellProgress:
    """The share of the chain that lies behind: the first number of the state, 0 to ``length - 1``."""

    device = torch.device("cpu")

    def __init__(self, length: int) -> None:
        self.length = length

    def cameras_among(self, sensors: Sensors, where: str) -> list[int]:
        return [0]

    def progress(self, obs: Observation) -> Float[Tensor, " B"]:
        return (obs.state[:, 0] / (self.length - 1)).clamp(0, 1)


def paying(env: VectorEnv, *, length: int = 10, every: int = 1) -> ProgressEnv:
    return ProgressEnv(env, CellProgress(length), PaidProgressConfig(weight=WEIGHT, every=every))


@pytest.fixture(scope="module", params=["chain", "chain without capture", "counting", "imagined"])
def wrapped(request: pytest.FixtureRequest):
    env = paying(ENVIRONMENTS[request.param].make(MAX_STEPS), every=2)
    yield env
    env.close()


PAYS = "without success no behavior is paid"  # progress is; the tests below say how much


@pytest.mark.parametrize("check", [name for name in CHECKS if name != PAYS])
def test_contract(wrapped: ProgressEnv, check: str) -> None:
    CHECKS[check](wrapped)


def paid(env: ProgressEnv, seed: int, moves: list[int]) -> float:
    """Of an episode of the first environment, in all."""
    env.reset(start=[StartState(task=0, seed=seed)])
    return sum(float(env.step(torch.full((1, 1), float(move))).reward[0]) for move in moves)


@pytest.mark.parametrize("every", [1, 3, 50])
def test_success_is_paid_what_was_missing_and_nothing_pays_as_much(every: int) -> None:
    env = paying(ChainEnv(num_envs=1, length=10, max_steps=20), every=every)
    success = paid(env, 3, [1] * 6)
    assert success == pytest.approx(1 + WEIGHT * (1 - 3 / 9))
    forth_and_back = paid(env, 3, [1, -1] * 10)
    to_the_end_and_wait = paid(env, 3, [1] * 5 + [-1, 1] * 7 + [-1])
    assert forth_and_back == pytest.approx(0, abs=1e-6)
    assert to_the_end_and_wait == pytest.approx(WEIGHT * (7 - 3) / 9)
    assert to_the_end_and_wait < success


def test_an_ended_episode_is_paid_nothing_more() -> None:
    env = paying(ChainEnv(num_envs=2, length=10, max_steps=20))
    env.reset(start=starts(env, 7, 0))
    rewards = torch.stack([env.step(torch.ones(2, 1)).reward for _ in range(6)])
    assert rewards[:2, 0].sum() == pytest.approx(1 + WEIGHT * 2 / 9)
    assert rewards[2:, 0].tolist() == [0.0] * 4
    torch.testing.assert_close(rewards[:, 1], torch.full((6,), WEIGHT / 9))


def test_small_changes_are_paid_once_they_add_up() -> None:
    """Cells are ninths: two of them make .2, and one back is not enough; success is paid what was missing."""
    config = PaidProgressConfig(weight=WEIGHT, every=1, min_change=0.2)
    env = ProgressEnv(ChainEnv(num_envs=1, length=10, max_steps=20), CellProgress(10), config)
    env.reset(start=[StartState(task=0, seed=3)])
    rewards = [float(env.step(torch.full((1, 1), float(move))).reward[0]) for move in [1, 1, -1, 1, 1, 1, 1, 1]]
    step = WEIGHT * 2 / 9
    assert rewards == pytest.approx([0, step, 0, 0, 0, step, 0, 1 + WEIGHT * 2 / 9])


def test_what_was_observed_is_not_rendered_again() -> None:
    inner = ChainEnv(num_envs=2, length=60, max_steps=20)
    env = paying(inner, length=60, every=3)
    env.reset(start=starts(env, 0, 1))
    assert inner.observed == [2]
    env.observe()
    assert inner.observed == [2]
    for _ in range(3):
        env.step(torch.ones(2, 1))
    same(env.observe(), inner.observe())
    assert inner.observed == [2, 2, 2]  # at the start, after three steps, and in the line above


@pytest.mark.parametrize("before", [0, 2, 3, 7])
def test_captured_episodes_continue_exactly(before: int) -> None:
    first, second = (paying(PointEnv(num_envs=2), every=3) for _ in range(2))
    check_episodes_continue((first, second), torch.full((2, 2), 0.3), before=before, after=7)
