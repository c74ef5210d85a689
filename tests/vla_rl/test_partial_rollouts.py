"""Rollouts that end before their last episodes: these go on in the next one, and nothing is lost or used twice."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from policies.gaussian import GaussianPolicy, GaussianPolicyConfig, StateContext
from policies.policy import RobotSpec
from sims.vector_env import StartState, Step
from tests.worlds import ChainEnv
from vla_rl.algorithms.grpo import GRPO, GRPOConfig, GRPOUpdateConfig
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.weights import load_weights, named_weights
from vla_rl.runs.checkpoint import load_tree, save_tree

LENGTH = 8
WALK = GaussianPolicyConfig(action_horizon=2, hidden=(8,), initial_std=5.0)  # at random: episodes differ in length


class CountedChain(ChainEnv):
    steps = 0

    def step(self, action: torch.Tensor) -> Step:
        self.steps += int((~self.finished).sum())
        return super().step(action)


def collector() -> Collector:
    env = CountedChain(num_envs=8, length=LENGTH, max_steps=20)
    torch.manual_seed(0)
    policy = GaussianPolicy(WALK, RobotSpec.of(env.spec))
    return Collector(env, policy, critic=None, gamma=1.0, failure_weight=0.0, seed=1)


def states(rollout: Experience) -> torch.Tensor:
    """[T, N, 2]: cell and elapsed steps, as the policy saw them."""
    assert isinstance(rollout.inputs, StateContext)
    return rollout.inputs.state


def test_no_transition_is_lost_or_used_twice() -> None:
    rollouts, taken = collector(), list[StartState]()

    def take(count: int) -> Sequence[StartState]:
        taken.extend(fresh := rollouts.starts.take(count))
        return fresh

    parts = [rollouts.complete_groups(take, size=2, share=0.5) for _ in range(8)]
    assert min(part.valid.shape[1] for part in parts) < 8, "some episodes went on"
    parts.append(rollouts.complete_groups(take, size=2, share=1.0))
    starts: Counter[int] = Counter()
    for part in parts:
        for env_id in range(part.valid.shape[1]):
            valid = part.valid[:, env_id]
            seen, executed = states(part)[valid, env_id], part.num_executed[valid, env_id]
            assert seen[:, 1].tolist() == (executed.cumsum(0) - executed).tolist(), (
                "an episode from its start, in order"
            )
            assert part.done[valid, env_id].tolist() == [False] * (len(seen) - 1) + [True]
            starts[int(seen[0, 0])] += 1
    assert starts == Counter(cell for start in taken for cell in [start.seed % (LENGTH - 1)] * 2)
    assert isinstance(rollouts.env, CountedChain)
    assert sum(part.control_steps() for part in parts) == rollouts.env.steps


def test_each_chunk_has_the_log_prob_of_the_weights_that_acted() -> None:
    rollouts = collector()
    policy, versions, parts = rollouts.policy, [], []
    for version in range(1, 5):
        weights = {
            name: tensor.detach() + 0.05 * torch.randn_like(tensor)
            for name, tensor in named_weights(policy, None).items()
        }
        versions.append(weights)
        rollouts.publish(version, weights)
        parts.append(rollouts.complete_groups(rollouts.starts.take, size=2, share=0.25))
    mixed = [part.policy_version.where(part.valid, part.policy_version[part.valid].max()) for part in parts]
    assert any((version != version[-1]).any() for version in mixed), "episodes of more than one version"
    batch = Experience.cat([part.valid_chunks() for part in parts])
    for version, weights in enumerate(versions, start=1):
        load_weights(policy, None, weights)
        own = batch[batch.policy_version == version]
        assert len(own)
        torch.testing.assert_close(policy.log_prob(policy.restore(own.inputs), own.trace), own.log_prob)


def test_episodes_under_way_go_on_from_a_saved_state(tmp_path: Path) -> None:
    one, other = collector(), collector()
    for _ in range(3):
        one.complete_groups(one.starts.take, size=2, share=0.5)
    save_tree(tmp_path / "state", one.state_dict())
    other.load_state_dict(load_tree(tmp_path / "state"))
    save_tree(tmp_path / "again", other.state_dict())
    for _ in range(2):
        expected, found = (each.complete_groups(each.starts.take, size=2, share=0.5) for each in (one, other))
        for a, b in zip(expected.tensors(), found.tensors(), strict=True):
            assert torch.equal(a, b)
    other.load_state_dict(load_tree(tmp_path / "again"))
    assert other.complete_groups(other.starts.take, size=2, share=1.0).valid.shape[1] == 8


def test_grpo_learns_from_episodes_of_older_weights() -> None:
    env = ChainEnv(num_envs=16, length=LENGTH, max_steps=20)
    torch.manual_seed(0)
    policy = GaussianPolicy(WALK, RobotSpec.of(env.spec))
    update = GRPOUpdateConfig(minibatch=64, micro_batch=64, epochs=1, learning_rate=1e-3, target_kl=None)
    config = GRPOConfig(groups=1, group_size=2, complete_share=0.25, update=update)
    grpo = GRPO(config, policy, env, seed=0)
    metrics = [grpo.iterate() for _ in range(5)]
    assert metrics[0]["age_max"] == 0 and "effective_share" not in metrics[0]
    older = [one for one in metrics if one["age_max"] > 0]
    assert older and all(0.9 < one["effective_share"] <= 1 and one["behavior_kl"] > 0 for one in older)


def test_a_state_copies_no_chunks() -> None:
    """It is asked for before every iteration, and few are written."""
    one = collector()
    one.complete_groups(one.starts.take, size=2, share=0.25)
    under_way = one._under_way
    held = {tensor.data_ptr() for chunk in under_way._chunks for tensor in chunk.tensors()}
    chunks = one.state_dict()["under_way"]["chunks"]
    assert held and {tensor.data_ptr() for chunk in chunks for tensor in chunk} == held


def test_adaptive_groups_wait_for_their_episodes() -> None:
    with pytest.raises(ValueError, match="complete_share below 1 needs start_rounds 1, got 2"):
        replace(GRPOConfig(complete_share=0.5), start_rounds=2)
