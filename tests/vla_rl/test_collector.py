"""Rollouts in an environment where every value is known exactly."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from episodes.schema import HUMAN, POLICY
from policies.gaussian import DrawnAction, GaussianPolicy, GaussianPolicyConfig, StateContext
from policies.policy import ActionSample, RobotSpec
from sims.errors import UserError
from sims.starts import start_state
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, StartState, Step
from tests.worlds import ChainEnv
from vla_rl.algorithms.ppo import TimeLimit, with_advantages
from vla_rl.critics.value import CriticConfig, ValueCritic
from vla_rl.rollouts.collector import Collector
from vla_rl.runners.evaluate import PolicyActor, run_episodes

GAMMA = 0.9
LENGTH = 10
HORIZON = 4


class Walker(GaussianPolicy):
    """Always moves right; value features are the state."""

    def sample(self, context: StateContext, generator: torch.Generator) -> ActionSample:
        action = torch.ones(len(context), HORIZON, 1)
        return ActionSample(action=action, trace=DrawnAction(x=action), log_prob=torch.zeros_like(action)[:, None])

    def act_from_noise(self, context: StateContext, noise: Tensor, *rest: Tensor | None) -> Tensor:
        return torch.ones_like(noise)


class ExactCritic(ValueCritic):
    """V of the walker where time never runs out: gamma ** (steps to the goal - 1)."""

    def __init__(self) -> None:
        super().__init__(CriticConfig(), 2)

    def predict(self, features: Tensor) -> Tensor:
        return GAMMA ** (LENGTH - 2 - features[:, 0])


def walker(env: ChainEnv) -> Walker:
    return Walker(GaussianPolicyConfig(action_horizon=HORIZON), RobotSpec.of(env.spec))


def collector(env: ChainEnv, policy: GaussianPolicy | None = None) -> Collector:
    return Collector(
        env,
        policy or walker(env),
        critic=ExactCritic(),
        gamma=GAMMA,
        failure_weight=0.0,
        seed=1,
    )


def test_exact_values_leave_no_advantage_through_ends_of_every_kind() -> None:
    """Successes inside chunks, time-outs inside chunks, restarts and the rollout's own end: all advantages are 0."""
    env = ChainEnv(num_envs=7, length=LENGTH, max_steps=7)
    rollout = collector(env).collect(9)
    ended = rollout.done
    assert (rollout.terminated & (rollout.num_executed < HORIZON)).any()
    assert (rollout.truncated & (rollout.num_executed < HORIZON)).any()
    assert (ended[:-1]).any() and not ended.all()
    for gae_lambda in (0.0, 0.95, 1.0):
        batch = with_advantages(rollout, gamma=GAMMA, gae_lambda=gae_lambda)
        torch.testing.assert_close(batch.advantage, torch.zeros(len(batch)), atol=1e-6, rtol=0)
    failed = with_advantages(rollout, gamma=GAMMA, gae_lambda=0.0, time_limit="failure")
    lost = GAMMA**rollout.num_executed * rollout.next_value * (rollout.truncated & ~rollout.terminated)
    torch.testing.assert_close(failed.advantage, -lost.flatten(), atol=1e-6, rtol=0)
    assert (lost > 0.01).any()


def test_a_continued_rollout_does_not_observe_twice() -> None:
    env = ChainEnv(num_envs=3, length=300, max_steps=1000)
    runner = collector(env)
    runner.collect(2)
    runner.collect(2)
    assert env.observed == [3] * 5


def test_what_was_seen_before_an_update_is_not_acted_on_where_time_goes_on() -> None:
    """On a robot the arm has come to rest elsewhere, or things were moved, until the learner has learned."""
    env = ChainEnv(num_envs=2, length=300, max_steps=1000, can_capture=False)
    runner = collector(env)
    runner.collect(2)
    env.cell += 5
    expected = env.observe().state
    inputs = runner.collect(1).inputs
    assert isinstance(inputs, StateContext)
    assert torch.equal(inputs.state[0], expected)


def test_episodes_run_once_in_each_environment_and_observe_only_running_ones() -> None:
    env = ChainEnv(num_envs=3, length=LENGTH, max_steps=100)
    rollout = collector(env).episodes([StartState(task=1, seed=cell) for cell in (8, 3, 0)])
    assert env.observed == [3, 2, 1]
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
    """Environment 1 fails once, at its third step, as a dead worker is reported."""

    failed = False

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        if self.failed or self.elapsed[1] != 3:
            return step
        self.failed = True
        valid = torch.ones_like(step.terminated)
        valid[1] = False
        self.finished[1] = True
        return replace(step, valid=valid, truncated=step.truncated | ~valid, reward=step.reward * valid)


@pytest.mark.parametrize(("time_limit", "max_steps"), [("bootstrap", 7), ("failure", 100)])
def test_a_failed_environment_leaves_no_data_and_no_advantage(time_limit: TimeLimit, max_steps: int) -> None:
    """Also where reaching the time limit, which an environment that fails has not, counts as a failure."""
    env = FailingChain(num_envs=3, length=LENGTH, max_steps=max_steps)
    runner = collector(env)
    runner.start([StartState(task=0, seed=0)] * 3)
    rollout = runner.collect(6)
    assert rollout.valid.sum() == 17
    assert not rollout.valid[0, 1]
    assert rollout.num_executed[0, 1] == 0
    batch = with_advantages(rollout, gamma=GAMMA, gae_lambda=0.95, time_limit=time_limit)
    assert len(batch) == 17
    torch.testing.assert_close(batch.advantage, torch.zeros(17), atol=1e-6, rtol=0)


def test_an_episode_whose_environment_fails_is_run_again() -> None:
    starts = [StartState(task=0, seed=cell) for cell in (4, 2, 5)]
    rollout = collector(FailingChain(num_envs=3, length=LENGTH, max_steps=100)).episodes(starts)
    assert torch.where(rollout.valid, rollout.num_executed, 0).sum(0).tolist() == [5, 7, 4]
    assert rollout.success.any(0).all()
    env = FailingChain(num_envs=3, length=LENGTH, max_steps=100)
    results = run_episodes(env, PolicyActor(walker(env), 3, torch.Generator(), stochastic=False), starts)
    assert results.steps.tolist() == [5, 7, 4]
    assert results.success.all()


def test_a_success_that_a_failed_environment_reports_does_not_count() -> None:
    class Deceiving(FailingChain):
        """Values of a step that is not valid are undefined."""

        def step(self, action: Tensor) -> Step:
            step = super().step(action)
            return replace(step, success=step.success | ~step.valid)

    env = Deceiving(num_envs=3, length=LENGTH, max_steps=4)
    starts = [StartState(task=0, seed=cell) for cell in (6, 2, 5)]
    results = run_episodes(env, PolicyActor(walker(env), 3, torch.Generator(), stochastic=False), starts)
    assert env.failed
    assert results.success.tolist() == [True, False, True]


class CrashingChain(ChainEnv):
    """The simulator fails in every episode of seed 2."""

    begun = 0

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        self.begun += sum(one.seed == 2 for one in start)
        assert self.begun < 20, "it is begun again and again"
        super().reset(env_ids, start=start)

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        valid = torch.tensor([start.seed != 2 for start in self.starts])
        return replace(step, valid=valid, truncated=step.truncated | ~valid, terminated=step.terminated & valid)


def test_an_episode_that_always_fails_ends_a_rollout_as_it_ends_an_evaluation() -> None:
    starts = [StartState(task=0, seed=cell) for cell in (4, 2, 5)]
    env = CrashingChain(num_envs=3, length=LENGTH, max_steps=100)
    rollouts = collector(env)
    message = "failed 4 times in the episode of task 0 with seed 2"
    for group in (starts, [starts[1]] * 3):
        env.begun = 0
        with pytest.raises(UserError, match=message):
            rollouts.episodes(group)
        assert env.begun == 4 * group.count(starts[1])
    env.begun = 0
    with pytest.raises(UserError, match=message):
        rollouts.complete_groups(lambda count: starts[:count], size=1, share=1.0)
    env.begun = 0
    with pytest.raises(UserError, match=message):
        run_episodes(env, PolicyActor(walker(env), 3, torch.Generator(), stochastic=False), starts)


def test_every_chunk_says_which_version_and_who_acted() -> None:
    class Intervened(ChainEnv):
        def step(self, action: Tensor) -> Step:
            return replace(super().step(action), intervened=torch.tensor([False, True, False]))

    runner = collector(Intervened(num_envs=3, length=300, max_steps=1000))
    first = runner.collect(2)
    runner.publish(7, {})
    second = runner.collect(1)
    assert first.policy_version.unique().tolist() == [0]
    assert second.policy_version.unique().tolist() == [7]
    assert first.actor.tolist() == [[POLICY, HUMAN, POLICY]] * 2


def test_newer_weights_are_taken_before_a_rollout() -> None:
    env = ChainEnv(num_envs=2, length=LENGTH)
    runner = collector(env)
    weights = {name: torch.full_like(value, 0.5) for name, value in runner.policy.named_parameters()}
    runner.publish(3, weights)
    runner.collect(1)
    assert runner.policy_version == 3
    assert all((parameter == 0.5).all() for parameter in runner.policy.parameters())


@dataclass(frozen=True, kw_only=True)
class Count(TensorDataclass):
    """Observations since the episode began."""

    seen: Tensor


class Counter(Walker):
    """A walker with memory: its state counts the observations of each episode."""

    def initial_state(self, num_envs: int) -> TensorDataclass:
        return Count(seen=torch.zeros(num_envs))

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[StateContext, TensorDataclass]:
        assert isinstance(state, Count)
        self.last = state.seen + 1
        return StateContext(state=torch.stack([obs.state[:, 0], state.seen], -1)), Count(seen=state.seen + 1)


def counter(env: ChainEnv) -> Counter:
    return Counter(GaussianPolicyConfig(action_horizon=HORIZON), RobotSpec.of(env.spec))


def test_a_policys_memory_begins_anew_with_each_episode() -> None:
    env = ChainEnv(num_envs=3, length=LENGTH, max_steps=7)
    rollout = collector(env, counter(env)).collect(9)
    inputs = rollout.inputs
    assert isinstance(inputs, StateContext)
    expected = torch.zeros(3)
    for t in range(9):
        assert torch.equal(inputs.state[t, :, 1], expected)
        expected = torch.where(rollout.done[t], 0.0, expected + 1)


def test_memory_goes_on_after_validation_and_a_checkpoint() -> None:
    """Suspended in the middle, and saved and loaded, the rollout is the same as undisturbed."""
    rollouts = []
    for disturbed in (False, True):
        env = ChainEnv(num_envs=3, length=LENGTH, max_steps=30)
        runner = collector(env, counter(env))
        runner.collect(1)
        if disturbed:
            with runner.suspended():
                actor = PolicyActor(counter(env), 3, torch.Generator(), stochastic=True)
                run_episodes(env, actor, [StartState(task=0, seed=4)] * 3)
            state = runner.state_dict()
            env = ChainEnv(num_envs=3, length=LENGTH, max_steps=30)
            runner = collector(env, counter(env))
            runner.load_state_dict(state)
        rollouts.append(runner.collect(3))
    for one, other in zip(rollouts[0].tensors(), rollouts[1].tensors(), strict=True):
        assert torch.equal(one, other)


def test_episodes_restart_where_the_environment_cannot_capture() -> None:
    env = ChainEnv(num_envs=3, length=300, max_steps=1000, can_capture=False)
    runner = collector(env, counter(env))
    runner.collect(2)
    with runner.suspended():
        pass
    assert env.elapsed.tolist() == [0, 0, 0]
    runner.collect(2)
    state = runner.state_dict()
    assert state["episodes"] is None
    env = ChainEnv(num_envs=3, length=300, max_steps=1000, can_capture=False)
    resumed = collector(env, counter(env))
    resumed.load_state_dict(state)
    assert resumed.starts.next_index == runner.starts.next_index + 3
    inputs = resumed.collect(1).inputs
    assert isinstance(inputs, StateContext)
    assert (inputs.state[..., 1] == 0).all()
