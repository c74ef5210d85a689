"""The clipped update of PPO and GRPO on batches of a small policy."""

import math
from dataclasses import replace

import pytest
import torch

from episodes.schema import HUMAN, POLICY
from policies.audit import LogProbMismatch
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.kernels import (
    DDIMConfig,
    DDPMConfig,
    FlowCPSConfig,
    FlowNoiseConfig,
    FlowSDEConfig,
    KernelConfig,
)
from policies.denoising.objectives import DiffusionConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from policies.registry import build_policy
from policies.residual.best_of import best_of
from policies.residual.ensemble import EnsembleConfig
from sims.errors import UserError
from sims.vector_env import Step
from tests.policies.pretrained.toy import OPENVLA_OFT
from tests.reach_env import CorrectedReach, ReachEnv
from tests.worlds import PointEnv
from vla_rl.algorithms.clipped_update import ClippedUpdate, update_of
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.ppo import PPO, PPOConfig, with_advantages
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.rollouts.ahead import make_ahead
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.experience import Experience
from vla_rl.runners.iterations import algorithm_state, restore_algorithm

UPDATE = UpdateConfig(learning_rate=1e-3, minibatch=16, micro_batch=16, epochs=2, target_kl=None)


FLOW = DenoisingPolicyConfig(
    action_horizon=2,
    encoder=CompactEncoderConfig(image_widths=(8,), width=16, text_width=8),
    expert=ActionExpertConfig(time_width=8, depth=1, action_patch=1),
)


def learner(**changes: object) -> PPO:
    env = ReachEnv(num_envs=8)
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec))
    config = PPOConfig(chunks=4, critic_warmup=0, update=replace(UPDATE, **changes))
    return PPO(config, policy, env, seed=0)


def batch(ppo: PPO) -> Experience:
    """Of random advantages: rewards are rare."""
    rollout = with_advantages(ppo.collector.collect(4), gamma=0.99, gae_lambda=0.95)
    return replace(rollout, advantage=torch.randn(len(rollout), generator=torch.Generator().manual_seed(0)))


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


def test_the_entropy_bonus_widens_what_is_executed_and_nothing_else() -> None:
    """Of chunks of two actions whose second is never executed."""
    ppo = learner(entropy_weight=0.1)
    rollout = batch(ppo)
    policy = ppo.update.policy
    assert isinstance(policy, GaussianPolicy)
    before = policy.log_std.detach().clone()
    num_executed = torch.ones_like(rollout.num_executed)
    metrics = ppo.update.run(replace(rollout, num_executed=num_executed, advantage=torch.zeros_like(rollout.weight)))
    assert (policy.log_std[0] > before[0]).all()
    assert torch.equal(policy.log_std[1], before[1])
    normal = 0.5 * math.log(2 * math.pi * math.e)
    assert metrics["entropy"] == pytest.approx(normal + policy.log_std[0].mean().item(), abs=0.05)


@pytest.mark.parametrize("explore", [FlowSDEConfig(), FlowCPSConfig(), DDIMConfig(eta=1.0), FlowNoiseConfig()])
def test_an_entropy_bonus_is_refused_where_the_spread_is_not_trained(explore: KernelConfig) -> None:
    env = PointEnv(num_envs=2)
    diffusion = {"objective": DiffusionConfig(), "act": DDIMConfig()} if explore.name == "ddim" else {}
    policy = build_policy(replace(FLOW, explore=explore, **diffusion), RobotSpec.of(env.spec))
    config = PPOConfig(critic_warmup=0, update=replace(UPDATE, entropy_weight=0.01))
    if explore.name == "flow_noise":
        PPO(config, policy, env, seed=0)
        return
    with pytest.raises(UserError, match=r"entropy_weight.*fixed.*flow_noise"):
        PPO(config, policy, env, seed=0)


def test_an_entropy_bonus_is_refused_where_the_spread_is_frozen() -> None:
    with pytest.raises(UserError, match=r"algorithm\.update\.entropy_weight.*frozen"):
        learner(entropy_weight=0.1, frozen=("noise",))


def test_an_algorithm_with_another_update_has_none_to_audit() -> None:
    class Other:
        def update(self) -> None: ...

    assert update_of(Other()) is None and update_of(object()) is None
    ppo = learner()
    assert update_of(ppo) is ppo.update


def corrected(person: list[int]) -> tuple[PPO, Experience]:
    """PPO whose weights have moved before, and a new batch of it."""
    env = CorrectedReach(person=person, max_steps=8)
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec))
    ppo = PPO(PPOConfig(chunks=4, critic_warmup=0, update=replace(UPDATE, epochs=1)), policy, env, seed=0)
    ppo.update.run(replace(batch(ppo), weight=torch.ones(4 * len(person))))
    return ppo, batch(ppo)


def test_chunks_that_a_person_acted_train_the_critic_alone() -> None:
    ppo, rollout = corrected([1] * 8)
    assert (rollout.actor == HUMAN).all() and rollout.weight is not None and (rollout.weight == 0).all()
    critic = ppo.update.critic
    assert critic is not None
    before, values = weights(ppo.update), [parameter.clone() for parameter in critic.parameters()]
    metrics = ppo.iterate()
    assert metrics["policy_steps"] == 0 and metrics["value_loss"] > 0
    assert torch.equal(weights(ppo.update), before)
    assert any(not torch.equal(a, b) for a, b in zip(values, critic.parameters(), strict=True))


def test_a_batch_with_chunks_of_a_person_trains_the_policy_as_its_own_chunks_do() -> None:
    """Weights and normalized advantages are those of the policy's own chunks; the person's are far from them."""
    results = []
    for alone in (False, True):
        ppo, rollout = corrected([0, 1, 0, -1])
        own = rollout.actor == POLICY
        assert own.sum() == 8 and len(rollout) == 16 and rollout.weight is not None and rollout.advantage is not None
        assert rollout.weight.mean() == 1
        if alone:
            rollout = replace(rollout[own], weight=torch.ones(8))
        else:
            rollout = replace(rollout, advantage=torch.where(own, rollout.advantage, 100.0))
        metrics = ppo.update.run(rollout)
        results.append((weights(ppo.update), metrics["policy_loss"]))
    torch.testing.assert_close(results[0], results[1])


class FailingReach(ReachEnv):
    """The simulator fails in the second chunk of two steps."""

    steps = 0

    def step(self, action: torch.Tensor) -> Step:
        step, self.steps = super().step(action), self.steps + 1
        failed = torch.full_like(step.truncated, self.steps == 4)
        return replace(step, valid=~failed, truncated=step.truncated | failed)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_rollout_in_which_the_simulator_always_failed_changes_nothing(staleness: int) -> None:
    env = FailingReach(num_envs=1)
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec))
    config = PPOConfig(chunks=1, critic_warmup=0, update=UPDATE, staleness=staleness)
    ppo = PPO(config, policy, env, seed=0, make_rollouts=make_ahead(Collector, staleness) if staleness else Collector)
    metrics = ppo.iterate()
    assert metrics["policy_steps"] == 2
    assert metrics["advantage_std"] == metrics["explained_variance"] == 0  # of one chunk
    before = weights(ppo.update)
    metrics = ppo.iterate()
    assert (metrics["policy_steps"], metrics["control_steps"]) == (0, 0)
    assert torch.equal(weights(ppo.update), before)
    assert ppo.iterate()["policy_steps"] == 2


def test_a_rollout_of_other_weights_stops_the_update() -> None:
    """The audit of the first minibatch, in a new run and after a resume."""
    ppo = learner()
    ppo.iterate()
    resumed = learner()
    resumed.load_state_dict(ppo.state_dict())
    for one in (learner(), resumed):
        rollout = batch(one)
        with torch.no_grad():
            one.update.parameters[-1] += 0.1
        before = weights(one.update)
        with pytest.raises(LogProbMismatch, match="recomputed log-prob differs"):
            one.update.run(rollout, train_policy=False)
        assert torch.equal(weights(one.update), before)


def test_a_rollout_of_older_weights_is_not_audited_where_the_policy_is_not_trained_on_it() -> None:
    """As after a resume with ``staleness``, where a person drove all of the first rollout."""
    ppo = learner()
    rollout = batch(ppo)
    with torch.no_grad():
        ppo.update.parameters[-1] += 0.1
    ppo.update.run(rollout, train_policy=False, version=int(rollout.policy_version.max()) + 1)
    assert not ppo.update.audited
    with pytest.raises(LogProbMismatch):
        ppo.update.run(rollout, train_policy=False, version=int(rollout.policy_version.max()))


def test_the_audit_reads_what_the_rollout_stored() -> None:
    """Inputs in the wrong order, as a faulty record would give them."""
    ppo = learner()
    rollout = batch(ppo)
    with pytest.raises(LogProbMismatch):
        ppo.update.run(replace(rollout, inputs=rollout.inputs[torch.arange(len(rollout)).flip(0)]))


def test_weighing_denoising_steps_needs_more_than_one() -> None:
    policy = DenoisingPolicy(
        replace(FLOW, explore=FlowSDEConfig(random_steps="one")), RobotSpec.of(PointEnv(num_envs=1).spec)
    )
    for setting in ({"denoising_discount": 0.9}, {"clip_first_step": 0.1}):
        config = UpdateConfig(reduction="step_sum", **setting)
        with pytest.raises(UserError, match=r"this policy scores one step per chunk.*random_steps: all"):
            ClippedUpdate(config, policy, seed=0)
        ClippedUpdate(config, DenoisingPolicy(FLOW, policy.spec.robot), seed=0)


@pytest.mark.parametrize("regresses", [True, False], ids=["openvla, head l1", "best of several samples"])
def test_a_policy_without_likelihood_is_refused_before_anything_is_recorded(regresses: bool) -> None:
    env = PointEnv(num_envs=2)
    robot = RobotSpec.of(env.spec)
    if regresses:
        policy = build_policy(replace(OPENVLA_OFT, head="l1"), robot)
    else:
        policy = best_of(build_policy(FLOW, robot), samples=2, critic=EnsembleConfig(hidden=(8,), members=2))
    for config in (PPOConfig(), GRPOConfig()):
        with pytest.raises(UserError, match=r"policy has no likelihood, .* policy.head tokens.* algorithm off_policy"):
            build_algorithm(config, policy, env, seed=0)


def test_dppo_freezes_the_weights_that_training_starts_from() -> None:
    env = PointEnv(num_envs=2)
    config = replace(
        FLOW, objective=DiffusionConfig(levels=20), act=DDIMConfig(steps=5), explore=DDPMConfig(steps=10, train_last=4)
    )
    policy = DenoisingPolicy(config, RobotSpec.of(env.spec))
    with torch.no_grad():
        for parameter in policy.expert.parameters():
            parameter += 0.1
    build_algorithm(PPOConfig(update=UPDATE), policy, env, seed=0)
    assert policy.frozen_expert is not None
    for frozen, cloned in zip(policy.frozen_expert.parameters(), policy.expert.parameters(), strict=True):
        assert torch.equal(frozen, cloned)


def test_random_streams_of_runs_do_not_coincide() -> None:
    states = []
    for seed in (0, 1):
        env = ReachEnv(num_envs=2)
        policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec))
        ppo = PPO(PPOConfig(update=UPDATE), policy, env, seed=seed)
        states += [ppo.update.generator.get_state(), ppo.collector.generator.get_state()]
    for i, first in enumerate(states):
        assert not any(torch.equal(first, other) for other in states[i + 1 :])


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


def test_an_adaptive_rate_follows_the_target_kl() -> None:
    """Down to a tenth where every update exceeds it, up to ten times where none does; a resumed run goes on with it."""
    for target, rates in ((1e-9, [1.0, 1 / 1.5, 1 / 2.25]), (1e9, [1.0, 1.2, 1.44])):
        ppo = learner(adaptive_rate=True, target_kl=target)
        found = [ppo.update.run(batch(ppo))["learning_rate"] / UPDATE.learning_rate for _ in range(3)]
        assert found == pytest.approx(rates)
        resumed = learner(adaptive_rate=True, target_kl=target)
        resumed.load_state_dict(ppo.state_dict())
        for _ in range(15):
            last = resumed.update.run(batch(resumed))["learning_rate"] / UPDATE.learning_rate
        assert last == pytest.approx(0.1 if target < 1 else 10)
    with pytest.raises(ValueError, match="adaptive_rate follows target_kl"):
        replace(UPDATE, adaptive_rate=True)
    with pytest.raises(ValueError, match="set epochs to 2 or more"):
        replace(UPDATE, adaptive_rate=True, target_kl=0.1, epochs=1)


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
            state, ppo = algorithm_state(ppo), learner(average=0.9, reference_weight=0.1)
            restore_algorithm(ppo, state)
        ppo.iterate()
        runs.append(weights(ppo.update))
    assert torch.equal(*runs)
