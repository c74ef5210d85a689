"""Rollouts in a world where every value is known exactly."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.policy import ActionSample, DenoisingTrace
from sims.starts import start_state
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, StartState, Step
from tests.worlds import ChainEnv
from vla_rl.algorithms.ppo import ppo_batch
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.runners.evaluate import run_episodes
from vla_rl.runs.metrics import Timer

GAMMA = 0.9
LENGTH = 10
HORIZON = 4


@dataclass(frozen=True, kw_only=True)
class State(TensorDataclass):
    state: Tensor


class Walker:
    """Always walks right; its context is the state."""

    action_horizon, action_dim, value_dim = HORIZON, 1, 2

    def encode(self, obs: Observation) -> State:
        return State(state=obs.state)

    def sample(self, context: State, generator: torch.Generator) -> ActionSample:
        rows = len(context.state)
        path = DenoisingTrace(states=torch.zeros(rows, 2, HORIZON, 1), steps=torch.zeros(rows, 1, dtype=torch.int64))
        return ActionSample(action=torch.ones(rows, HORIZON, 1), path=path, log_prob=torch.zeros(rows, 1, HORIZON, 1))

    def value_features(self, context: State) -> Tensor:
        return context.state


class ExactCritic:
    """V of the walker where time never runs out: gamma ** (steps to the goal - 1)."""

    def predict(self, features: Tensor) -> Tensor:
        return GAMMA ** (LENGTH - 2 - features[:, 0])


def collector(env: ChainEnv) -> Collector:
    return Collector(
        env, Walker(), critic=ExactCritic(), gamma=GAMMA, keep_context=False,  # type: ignore[arg-type]
        generator=torch.Generator(), timer=Timer(),
    )  # fmt: skip


def test_exact_values_leave_no_advantage_through_ends_of_every_kind() -> None:
    """Successes inside chunks, time-outs inside chunks, restarts and the rollout's own end: all advantages are 0."""
    env = ChainEnv(num_envs=7, length=LENGTH, max_steps=7)
    runner = collector(env)
    starts = TrainingStarts(seed=1, num_tasks=2, failure_weight=0.0)
    runner.start(starts.take(7))
    rollout = runner.collect(9, starts)
    ended = rollout.done
    assert (rollout.terminated & (rollout.num_executed < HORIZON)).any()
    assert (rollout.truncated & (rollout.num_executed < HORIZON)).any()
    assert (ended[:-1]).any() and not ended.all()
    for gae_lambda in (0.0, 0.95, 1.0):
        batch = ppo_batch(rollout, gamma=GAMMA, gae_lambda=gae_lambda)
        torch.testing.assert_close(batch.advantage, torch.zeros(len(batch)), atol=1e-6, rtol=0)


def test_a_continued_collect_does_not_look_twice() -> None:
    env = ChainEnv(num_envs=3, length=1000, max_steps=1000)
    runner = collector(env)
    starts = TrainingStarts(seed=1, num_tasks=2, failure_weight=0.0)
    runner.start(starts.take(3))
    runner.collect(2, starts)
    runner.collect(2, starts)
    assert env.looks == [3] * 5


def test_episodes_run_each_row_once_and_look_only_at_the_living() -> None:
    env = ChainEnv(num_envs=3, length=LENGTH, max_steps=100)
    rollout = collector(env).episodes([StartState(task=1, seed=cell) for cell in (8, 3, 0)])
    assert env.looks == [3, 2, 1]
    assert rollout.valid.int().tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert rollout.num_executed.tolist() == [[1, 4, 4], [0, 2, 4], [0, 0, 1]]
    assert rollout.success.any(0).all()
    assert rollout.success_rate() == 1.0
    assert rollout.control_steps() == 16


def test_streams_never_share_a_start() -> None:
    kinds = ("demos", "train", "validation", "evaluation")
    seeds = {start_state(k, seed=s, index=i, num_tasks=3).seed for k in kinds for s in (0, 1) for i in range(50)}
    assert len(seeds) == 4 * 2 * 50
    assert [start_state("train", seed=0, index=i, num_tasks=3).task for i in range(4)] == [0, 1, 2, 0]


class FailingChain(ChainEnv):
    """Row 1's world breaks once, at its third step: as a dead worker would be reported."""

    broken = False

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        if self.broken or self.elapsed[1] != 3:
            return step
        self.broken = True
        valid = torch.ones_like(step.terminated)
        valid[1] = False
        self.standing[1] = True
        return replace(step, valid=valid, truncated=step.truncated | ~valid, reward=step.reward * valid)


def test_a_world_that_breaks_leaves_no_data_and_no_advantage() -> None:
    env = FailingChain(num_envs=3, length=LENGTH, max_steps=7)
    runner = collector(env)
    starts = TrainingStarts(seed=1, num_tasks=2, failure_weight=0.0)
    runner.start([StartState(task=0, seed=0)] * 3)
    rollout = runner.collect(6, starts)
    assert rollout.valid.sum() == 17
    assert not rollout.valid[0, 1]
    assert rollout.num_executed[0, 1] == 0
    batch = ppo_batch(rollout, gamma=GAMMA, gae_lambda=0.95)
    assert len(batch) == 17
    torch.testing.assert_close(batch.advantage, torch.zeros(17), atol=1e-6, rtol=0)


def test_an_episode_whose_world_breaks_is_run_again() -> None:
    starts = [StartState(task=0, seed=cell) for cell in (4, 2, 5)]
    rollout = collector(FailingChain(num_envs=3, length=LENGTH, max_steps=100)).episodes(starts)
    assert torch.where(rollout.valid, rollout.num_executed, 0).sum(0).tolist() == [5, 7, 4]
    assert rollout.success.any(0).all()
    act = lambda obs: torch.ones(len(obs.state), HORIZON, 1)  # noqa: E731
    outcome = run_episodes(FailingChain(num_envs=3, length=LENGTH, max_steps=100), act, starts)
    assert outcome.steps.tolist() == [5, 7, 4]
    assert outcome.success.all()
