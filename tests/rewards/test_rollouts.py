"""What a learned reward makes of rollouts: rewards, starts, and the counts of its errors."""

from __future__ import annotations

import math

import pytest
import torch

from sims.vector_env import StartState
from tests.rewards.small_classifier import ALWAYS, NEVER, untrained
from tests.vla_rl.test_collector import GAMMA, HORIZON, collector, walker
from tests.worlds import ChainEnv
from vla_rl.rewards.classified_env import ClassifiedEnv
from vla_rl.rewards.scorer import sensors_of
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.experience import RewardCounts, reward_errors
from vla_rl.runners.evaluate import PolicyActor, run_episodes
from vla_rl.runners.reward import WatchedEnv


def rollouts_of(threshold: float) -> Collector:
    """The chain of ten cells, whose walker moves right; an observation is classified after every third step."""
    env = ChainEnv(num_envs=9, length=10, max_steps=20)
    model = untrained(sensors_of(env.spec), threshold=threshold, every=3, consecutive=2)
    return Collector(ClassifiedEnv(env, model), walker(env), critic=None, gamma=GAMMA, failure_weight=0.5, seed=1)


def test_every_episode_is_declared_after_six_steps_or_at_its_true_end() -> None:
    rollouts = rollouts_of(ALWAYS)
    env = rollouts.env
    assert isinstance(env, ClassifiedEnv)
    assert isinstance(env.env, ChainEnv)
    needed = [9 - int(cell) for cell in env.env.cell]  # steps to the last cell
    rollout = rollouts.collect(2)  # eight steps: every first episode has ended
    first = rollout.done.int().argmax(0)
    for i, steps in enumerate(needed):
        at = int(first[i])
        end = min(steps, 6)
        executed = rollout.num_executed[: at + 1, i].sum()
        assert executed == end
        assert rollout.reward[at, i] == pytest.approx(GAMMA ** ((end - 1) % HORIZON))
        assert rollout.success[at, i]
        assert rollout.true_success is not None
        assert bool(rollout.true_success[at, i]) == (steps <= 6)
    assert len({steps <= 6 for steps in needed}) == 2  # both kinds occurred
    assert rollout.success_rate() == 1.0
    assert rollouts.starts.success.max() > 0  # starts follow what was declared


def test_a_reward_that_never_declares_pays_nothing_and_misses_everything() -> None:
    rollout = rollouts_of(NEVER).collect(6)
    assert not rollout.reward.any()
    counts = rollout.reward_counts()
    assert counts is not None
    assert counts.declared == 0
    assert counts.true == counts.missed > 0
    errors = reward_errors([counts])
    assert math.isnan(errors["reward_false_positives"])
    assert errors["reward_false_negatives"] == 1.0


def test_a_watched_environment_goes_on_to_its_true_end() -> None:
    env = ChainEnv(num_envs=2, length=10, max_steps=8)
    model = untrained(sensors_of(env.spec), threshold=ALWAYS, every=3, consecutive=2)
    watched = WatchedEnv(env, model)
    starts = [StartState(task=0, seed=seed) for seed in (0, 1, 2, 5)]  # 9, 8, 7 and 4 steps to the last cell
    policy = walker(env)
    actor = PolicyActor(policy, 2, torch.Generator(), stochastic=False)
    results = run_episodes(watched, actor, starts)
    assert results.success.tolist() == [False, True, True, True]
    assert results.steps.tolist() == [8, 8, 7, 4]
    assert [watched.declared[0, start.seed] for start in starts] == [6, 6, 6, 4]


def test_errors_of_several_rollouts_by_hand() -> None:
    parts = [RewardCounts(3, 1, 4, 2), None, RewardCounts(1, 1, 0, 0)]
    assert reward_errors(parts) == {"reward_false_positives": 2 / 4, "reward_false_negatives": 2 / 4}
    assert reward_errors([None]) == {}


def test_where_the_environment_decides_there_is_nothing_to_count() -> None:
    rollout = collector(ChainEnv(num_envs=3, length=10)).collect(2)
    assert rollout.true_success is None
    assert rollout.reward_counts() is None
