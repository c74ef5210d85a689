"""The clipped update of PPO and GRPO on batches of a small policy."""

import dataclasses

import pytest
import torch

from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from tests.reach_env import ReachEnv
from vla_rl.algorithms.ppo import PPO, ClippedUpdate, PPOConfig, UpdateConfig, with_advantages
from vla_rl.rollouts.experience import Experience

UPDATE = UpdateConfig(learning_rate=1e-3, minibatch=16, micro_batch=16, epochs=2, target_kl=None)


def learner(**changes: object) -> PPO:
    env = ReachEnv(num_envs=8)
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec))
    config = PPOConfig(chunks=4, critic_warmup=0, update=dataclasses.replace(UPDATE, **changes))
    return PPO(config, policy, env, seed=0)


def batch(ppo: PPO) -> Experience:
    """Of random advantages: rewards are rare."""
    rollout = with_advantages(ppo.collector.collect(4), gamma=0.99, gae_lambda=0.95)
    return dataclasses.replace(rollout, advantage=torch.randn(len(rollout), generator=torch.Generator().manual_seed(0)))


def weights(update: ClippedUpdate) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in update.parameters])


def test_micro_batches_give_the_gradient_of_the_minibatch() -> None:
    results = []
    for micro_batch in (16, 4):
        ppo = learner(micro_batch=micro_batch)
        metrics = ppo.update.run(batch(ppo))
        results.append((weights(ppo.update), metrics))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-4)
    for name in ("kl", "policy_loss", "value_loss", "grad_norm"):
        assert results[0][1][name] == pytest.approx(results[1][1][name], abs=1e-4)


def test_the_ratio_before_the_first_step_is_one() -> None:
    ppo = learner(epochs=1, minibatch=64, micro_batch=64)
    metrics = ppo.update.run(batch(ppo))
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["clip_fraction"] == 0
    assert metrics["policy_steps"] == 1


def test_warm_up_trains_the_critic_alone() -> None:
    ppo = learner()
    before = weights(ppo.update)
    assert ppo.update.critic is not None
    critic = [parameter.clone() for parameter in ppo.update.critic.parameters()]
    metrics = ppo.update.run(batch(ppo), train_policy=False)
    assert torch.equal(weights(ppo.update), before)
    assert any(not torch.equal(a, b) for a, b in zip(critic, ppo.update.critic.parameters(), strict=True))
    assert "kl" not in metrics and metrics["policy_steps"] == 0


def test_beyond_the_target_kl_only_the_critic_goes_on() -> None:
    ppo = learner(learning_rate=0.1, target_kl=0.01, epochs=4)
    assert ppo.update.critic is not None
    metrics = ppo.update.run(batch(ppo))
    assert metrics["kl_last"] > 0.01
    assert 1 <= metrics["policy_steps"] < 8
    stopped = weights(ppo.update)
    critic_steps = ppo.update.critic_optimizer.state_dict()["state"][0]["step"]  # type: ignore[union-attr]
    assert critic_steps == 8
    assert torch.isfinite(stopped).all()


def test_frozen_groups_do_not_move() -> None:
    ppo = learner(frozen=("noise",))
    policy = ppo.policy
    assert isinstance(policy, GaussianPolicy)
    noise, mean = policy.log_std.clone(), [parameter.clone() for parameter in policy.mean.parameters()]
    ppo.update.run(batch(ppo))
    assert torch.equal(policy.log_std, noise)
    assert any(not torch.equal(a, b) for a, b in zip(mean, policy.mean.parameters(), strict=True))


def test_the_average_follows_and_shares_what_is_frozen() -> None:
    ppo = learner(average=0.9, frozen=("noise",))
    shipped = ppo.deployed()
    assert shipped is not ppo.policy
    ppo.update.run(batch(ppo))
    assert isinstance(shipped, GaussianPolicy) and isinstance(ppo.policy, GaussianPolicy)
    assert shipped.log_std is ppo.policy.log_std
    for averaged, newest in zip(shipped.mean.parameters(), ppo.policy.mean.parameters(), strict=True):
        assert not torch.equal(averaged, newest)
        assert (averaged - newest).abs().max() < 0.1


def test_a_reference_holds_the_policy_back() -> None:
    moved = []
    for reference_weight in (0.0, 100.0):
        ppo = learner(reference_weight=reference_weight, epochs=8, learning_rate=3e-3)
        before = weights(ppo.update)
        ppo.update.run(batch(ppo))
        moved.append((weights(ppo.update) - before).norm())
    assert moved[1] < moved[0]


def test_state_is_exact() -> None:
    runs = []
    for interrupted in (False, True):
        ppo = learner(average=0.9, reference_weight=0.1)
        ppo.iterate()
        if interrupted:
            state, ppo = ppo.state_dict(), learner(average=0.9, reference_weight=0.1)
            ppo.load_state_dict(state)
        ppo.iterate()
        runs.append(weights(ppo.update))
    assert torch.equal(*runs)
