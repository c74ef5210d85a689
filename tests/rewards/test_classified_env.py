"""The reward of a success classifier around environments: when it ends an episode, and exact continuation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from policies.device import Device
from sims.chunk import step_chunk
from sims.vector_env import StartState, VectorEnv
from sims.verification.conformance import CHECKS, MAX_STEPS, same, starts
from tests.rewards.continuation import check_episodes_continue
from tests.rewards.small_classifier import ALWAYS, NEVER, untrained
from tests.sims.environments_to_check import ENVIRONMENTS
from tests.worlds import ChainEnv, PointEnv
from vla_rl.rewards.bundle import CLASSIFIER, save_reward_model
from vla_rl.rewards.classified_env import ClassifiedEnv
from vla_rl.rewards.registry import ClassifierConfig, with_reward
from vla_rl.rewards.scorer import RewardModelError, sensors_of


def classified(env: VectorEnv, threshold: float, *, every: int = 1, consecutive: int = 1) -> ClassifiedEnv:
    model = untrained(sensors_of(env.spec), threshold=threshold, every=every, consecutive=consecutive)
    return ClassifiedEnv(env, model)


@pytest.fixture(scope="module", params=["chain", "chain without capture", "counting", "imagined"])
def unimpressed(request: pytest.FixtureRequest):
    """A classifier that never declares success, around environments of several kinds."""
    env = classified(ENVIRONMENTS[request.param].make(MAX_STEPS), NEVER, every=2)
    yield env
    env.close()


@pytest.mark.parametrize("check", CHECKS)
def test_contract(unimpressed: ClassifiedEnv, check: str) -> None:
    CHECKS[check](unimpressed)


def right(env: VectorEnv) -> torch.Tensor:
    return torch.ones(env.spec.num_envs, env.spec.action_dim)


def test_success_is_declared_after_observations_in_a_row_and_nothing_changes_afterwards() -> None:
    inner = ChainEnv(num_envs=3, length=60, max_steps=20)
    env = classified(inner, ALWAYS, every=3, consecutive=2)
    env.reset(start=starts(env, 0, 1, 2))
    for number in range(1, 8):
        step = env.step(right(env))
        assert step.success.tolist() == [number >= 6] * 3
        assert step.terminated.tolist() == [number >= 6] * 3
        assert step.reward.tolist() == [float(number == 6)] * 3
        assert step.true_success is not None
        assert not step.true_success.any()
        if number == 6:
            shown = env.observe()
    assert inner.cell.tolist() == [7, 8, 9]  # it moves on within its chunk
    assert shown.state[:, 0].tolist() == [6, 7, 8]
    same(env.observe(), shown)
    env.reset([1], start=starts(env, 5))
    assert env.observe([1]).state[0, 0] == 5
    assert env.step(right(env)).terminated.tolist() == [True, False, True]


def test_a_chunk_is_paid_once_and_observed_where_it_must() -> None:
    inner = ChainEnv(num_envs=2, length=60, max_steps=20)
    env = classified(inner, ALWAYS, every=3, consecutive=2)
    env.reset(start=starts(env, 0, 1))
    inner.observed.clear()
    chunk = step_chunk(env, right(env)[:, None].expand(-1, 8, -1), 0.5)
    assert chunk.num_executed.tolist() == [6, 6]
    assert chunk.reward.tolist() == [0.5**5] * 2
    assert inner.observed == [2, 2]  # after steps 3 and 6
    env.observe()
    assert inner.observed == [2, 2]  # what was seen is not rendered again


@pytest.mark.parametrize(("threshold", "declared"), [(ALWAYS, True), (NEVER, False)])
def test_where_the_environment_ends_an_episode_its_last_observation_decides(threshold: float, declared: bool) -> None:
    env = classified(ChainEnv(num_envs=1, length=4, max_steps=20), threshold, every=10, consecutive=5)
    env.reset(start=[StartState(task=0, seed=1)])
    env.step(right(env))
    step = env.step(right(env))
    assert step.terminated.tolist() == [True]
    assert step.true_success is not None
    assert step.true_success.tolist() == [True]
    assert step.success.tolist() == [declared]
    assert step.reward.tolist() == [float(declared)]


def test_the_time_limit_is_not_success() -> None:
    env = classified(ChainEnv(num_envs=1, length=60, max_steps=5), ALWAYS, every=3, consecutive=3)
    env.reset(start=[StartState(task=0, seed=1)])
    steps = [env.step(right(env)) for _ in range(5)]
    assert steps[-1].truncated.tolist() == [True]
    assert not steps[-1].success.any()  # classified twice, after steps 3 and 5


def test_a_success_that_comes_after_it_was_declared_is_too_late() -> None:
    env = classified(ChainEnv(num_envs=1, length=10, max_steps=20), ALWAYS, every=3, consecutive=2)
    env.reset(start=[StartState(task=0, seed=2)])  # seven steps to the last cell
    for _ in range(8):
        step = env.step(right(env))
    assert step.success.tolist() == [True]
    assert step.true_success is not None
    assert step.true_success.tolist() == [False]


@pytest.mark.parametrize("before", [0, 2, 4, 7])
def test_captured_episodes_continue_exactly(before: int) -> None:
    """Before the first classified observation, between two, and after success was declared; in another environment."""
    first, second = (classified(PointEnv(num_envs=2), ALWAYS, every=3, consecutive=2) for _ in range(2))
    check_episodes_continue((first, second), torch.full((2, 2), 0.3), before=before, after=4)


def test_another_camera_or_size_is_one_clear_error() -> None:
    env = PointEnv(num_envs=1)
    sensors = sensors_of(env.spec)
    for changes, message in (
        ({"cameras": ("wrist",)}, "needs camera 'wrist', which point does not have; it has top"),
        ({"image_size": (8, 8)}, "fitted to images of 8 x 8 pixels, those of point have 32 x 32"),
    ):
        with pytest.raises(RewardModelError, match=message):
            ClassifiedEnv(env, untrained(dataclasses.replace(sensors, **changes), threshold=0.5))


def test_a_classifier_that_does_not_read_the_state_works_where_it_has_another_length() -> None:
    env = PointEnv(num_envs=2)
    longer = dataclasses.replace(sensors_of(env.spec), state_dim=env.spec.state_dim + 1)
    rewarded = ClassifiedEnv(env, untrained(longer, threshold=ALWAYS))
    rewarded.reset(start=starts(env, 0, 1))
    assert rewarded.step(torch.zeros(2, env.spec.action_dim)).success.all()


def test_a_run_in_bfloat16_classifies_in_float32(tmp_path: Path) -> None:
    """As its threshold was chosen."""
    env = PointEnv(num_envs=4)
    env.reset(start=starts(env, 0, 1, 2, 3))
    model = untrained(sensors_of(env.spec), threshold=NEVER)
    save_reward_model(CLASSIFIER, model, tmp_path, tasks=env.spec.tasks)
    device = Device(device=torch.device("cpu"), precision="bfloat16")
    rewarded = with_reward(ClassifierConfig(path=tmp_path), env, device)
    assert isinstance(rewarded, ClassifiedEnv)
    assert torch.equal(rewarded.detector.classifier.logit(env.observe()), model.logit(env.observe()))
