"""The off-policy learner: targets, exact resume, numbers that are not finite, learning, every configuration of it."""

import dataclasses
import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from episodes.recorder import RecordedEnv
from episodes.store import EpisodeStore
from policies.bundle import save_bundle
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from policies.pretrained.storage import GB, StorageConfig
from policies.registry import build_policy
from policies.residual.best_of import BestOfPolicy, best_of
from policies.residual.ensemble import CACHED_ROWS, EnsembleConfig, QEnsemble, follow
from policies.residual.histogram import HistogramConfig
from policies.residual.policy import FixedNoiseConfig, ResidualConfig, ResidualPolicy, SquashedNoiseConfig, residual_on
from sims.errors import UserError
from sims.numbers.finite import NotFinite
from sims.vector_env import Observation, StartState, Step
from tests.family_learning import clone, success
from tests.policies.small_configs import CONFIGS, ENCODER
from tests.reach_env import ReachEnv
from tests.rewards.small_classifier import NEVER, untrained
from tests.worlds import ChainEnv, PointEnv
from vla_rl.algorithms.grpo import GRPOConfig, GRPOUpdateConfig
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.off_policy_critics import Proposals
from vla_rl.algorithms.off_policy_settings import BestOfConfig, EntropyConfig, IQLConfig, OffPolicyConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.algorithms.td_target import td_target, temperature_loss
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, FromBundle
from vla_rl.config.loader import load_config
from vla_rl.rewards.bundle import CLASSIFIER, save_reward_model
from vla_rl.rewards.registry import ClassifierConfig, OutcomeConfig
from vla_rl.rewards.scorer import sensors_of
from vla_rl.rollouts.sharded import make_sharded
from vla_rl.runners.checks import check_experiment
from vla_rl.runners.iterations import algorithm_state, restore_algorithm
from vla_rl.runners.train import train
from vla_rl.runs.checkpoint import load_tree, save_tree

NAN = float("nan")
CONFIGURATIONS = Path(__file__).parents[2] / "configs" / "off_policy"
TD3 = ResidualConfig(action_horizon=2, hidden=(16,))
SAC = ResidualConfig(action_horizon=2, hidden=(16,), noise=SquashedNoiseConfig())
SMALL = OffPolicyConfig(
    chunks=4, warmup=8, critic_warmup=2, batch_size=16, n_step=2, critic=EnsembleConfig(hidden=(16,), members=3)
)


def learner(
    env: PointEnv, config: ResidualConfig, *, base: str = "gaussian", store: Path | None = None, **settings: Any
) -> OffPolicy:
    torch.manual_seed(0)
    policy = residual_on(build_policy(CONFIGS[base], RobotSpec.of(env.spec)), config)
    entropy = EntropyConfig() if policy.squashed else None
    share = 0.0 if store is None else 0.5
    chosen = dataclasses.replace(SMALL, **{"entropy": entropy, "demonstration_share": share} | settings)
    return OffPolicy(chosen.with_demonstrations([] if store is None else [store]), policy, env, seed=0)


def residual(made: OffPolicy) -> ResidualPolicy:
    assert isinstance(made.policy, ResidualPolicy)
    return made.policy


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes of the expert, observed at every second step."""
    path = tmp_path_factory.mktemp("store")
    env = PointEnv(num_envs=3)
    recorder = RecordedEnv(env, EpisodeStore(path, create=True), source="expert", split="train")
    expert = env.expert(noise=0.3, seed=0)
    recorder.reset(start=[StartState(task=task, seed=task) for task in range(3)])
    for step in range(40):
        if step % 2 == 0:
            recorder.observe()
        recorder.step(expert.act())
    recorder.commit()
    return path


# -- targets ----------------------------------------------------------------------------------------------------------


def test_a_target_by_hand() -> None:
    """Two steps of reward 1 and .5 at gamma .9, then min(2, 1); at a task's end nothing follows."""
    y = td_target(torch.tensor([1.45, 1.45]), torch.tensor([0.81, 0.0]), torch.tensor([[2.0, 9.0], [1.0, 9.0]]))
    torch.testing.assert_close(y, torch.tensor([1.45 + 0.81, 1.45]))


def test_soft_values_of_a_two_state_chain() -> None:
    """Iterating SAC's target gives the closed form to 1e-6.

    State 0: action 0 stays and gives 0, action 1 goes to state 1 and gives 1; state 1 returns to 0 whatever is done and
    gives 2. The policy takes action 1 with probability p. With u = gamma T H and H = -sum p log p, the soft values
    V0 = p Q(0, 1) + (1 - p) Q(0, 0) + T H and V1 = Q1 + T H solve a linear system.
    """
    gamma, temperature, p = 0.9, 0.2, 0.3
    probability = torch.tensor([[1 - p, p], [1 - p, p]], dtype=torch.float64)
    reward = torch.tensor([[0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    following = torch.tensor([[0, 1], [0, 0]])
    q = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(300):
        target = torch.zeros_like(q)
        for action in (0, 1):  # what follows s, a is sampled from the policy: the mean over its actions
            next_q = q[following, action] - temperature * probability[following, action].log()
            y = td_target(reward.flatten(), torch.full((4,), gamma, dtype=torch.float64), next_q.flatten()[None])
            target += probability[following, action] * y.view(2, 2)
        q = target
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    matrix = np.array([[1 - (1 - p) * gamma, -p * gamma], [-gamma, 1.0]])
    soft = np.linalg.solve(matrix, np.array([p * 1 + temperature * entropy, 2 + temperature * entropy]))
    exact = reward.numpy() + gamma * soft[following.numpy()]
    np.testing.assert_allclose(q.numpy(), exact, atol=1e-6)


@pytest.mark.parametrize("backup", [True, False])
def test_the_learner_s_target_is_that_target(backup: bool) -> None:
    made = learner(PointEnv(num_envs=4), SAC, chunks=6)
    made.iterate()
    made.actor.config = dataclasses.replace(made.config, entropy=EntropyConfig(backup=backup))
    policy = residual(made)
    with torch.no_grad():
        made.actor.log_temperature.fill_(math.log(0.3))
        for parameter in made.critics.target.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        policy.normalizer.action_scale.fill_(0.5)  # the critic reads actions in this unit
        batch, state = made._draw(16), made.generator.get_state()
        context, following = policy.restore(batch.inputs), policy.restore(batch.next_inputs)
        proposals = made.actor.propose(context, following, batch, made.critics, made.generator, compare=False)
        y = made.critics.target_value(following, batch, proposals, made.generator)
        again = torch.Generator().set_state(state)
        action, log_prob = (drawn[0] for drawn in policy.rsample(following, again))
        q = made.critics.target(policy.critic_features(following), action / 0.5)
        least = q[torch.randperm(3, generator=again)[:2]].amin(0)
        expected = batch.reward + batch.discount * (least - backup * 0.3 * log_prob.sum((1, 2)))
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


def test_the_target_of_q_chunking_is_the_value_of_the_best_sample() -> None:
    """The newest critic chooses among the samples, its slow copy says what the chosen one is worth."""
    env = PointEnv(num_envs=4)
    torch.manual_seed(0)
    config = dataclasses.replace(
        SMALL, entropy=None, demonstration_share=0.0, best_of=BestOfConfig(samples=6), n_step=1, frozen=("encoder",)
    )
    made = OffPolicy(config, build_policy(CONFIGS["denoising"], RobotSpec.of(env.spec)), env, seed=0)
    made.iterate()
    policy, critics = made.policy, made.critics
    assert isinstance(policy, BestOfPolicy) and policy.critic is critics.q
    with torch.no_grad():
        for parameter in [*critics.q.parameters(), *critics.target.parameters()]:
            parameter += 0.1 * torch.randn_like(parameter)
        batch, state = made._draw(16), made.generator.get_state()
        context, following = policy.restore(batch.inputs), policy.restore(batch.next_inputs)
        proposals = made.actor.propose(context, following, batch, critics, made.generator, compare=False)
        y = critics.target_value(following, batch, proposals, made.generator)
        again = torch.Generator().set_state(state)
        noise = torch.randn(16, *policy.spec.noise_shape, generator=again).unflatten(1, (6, -1))
        samples = torch.stack([policy.base.act_from_noise(following, noise[:, i]) for i in range(6)])
        features, units = policy.value_features(following), policy.normalizer.normalize_action(samples)
        best = critics.q(features, units).mean(0).argmax(0)
        least = critics.target(features, units)[torch.randperm(3, generator=again)[:2]].amin(0)
        expected = batch.reward + batch.discount * least.gather(0, best[None])[0]
    assert len(best.unique()) > 1
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", ["mean", "least"])
def test_the_actor_maximizes_the_mean_or_the_least_of_the_members(value: Literal["mean", "least"]) -> None:
    made = learner(PointEnv(num_envs=4), TD3, chunks=6, actor_value=value)
    made.iterate()
    policy, critics = residual(made), made.critics
    with torch.no_grad():
        for parameter in critics.q.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    batch = made._draw(16)
    context = policy.restore(batch.inputs)
    action = policy.mean_action(context)
    q = critics.members(critics.q, critics.features(context), action)
    assert len(q.argmin(0).unique()) > 1  # no member is the least everywhere
    expected = {"mean": q.mean(0), "least": q.amin(0)}[value].mean()
    gradient = torch.autograd.grad(-expected, list(policy.head.parameters()))
    found = made.actor.gradients(context, batch, Proposals(), critics, made.generator)
    torch.testing.assert_close(found["actor_q"], expected)
    largest = max(part.abs().max().item() for part in gradient)
    assert largest > 0
    for parameter, part in zip(policy.head.parameters(), gradient, strict=True):
        torch.testing.assert_close(parameter.grad, part, rtol=1e-5, atol=1e-6 * largest)


def test_the_temperature_rises_while_the_entropy_is_below_its_target() -> None:
    for log_prob, sign in ((3.0, -1), (-3.0, 1)):
        log_temperature = torch.zeros((), requires_grad=True)
        temperature_loss(log_temperature, torch.tensor([log_prob]), -1.0).backward()
        assert log_temperature.grad is not None and sign * log_temperature.grad > 0


def test_many_actions_are_valued_as_few_are() -> None:
    """In parts that fit a processor's cache: the same values and gradients."""
    torch.manual_seed(0)
    critic = QEnsemble(EnsembleConfig(hidden=(8,), members=3), feature_dim=3, action_numbers=2)
    with torch.no_grad():
        list(critic.parameters())[-2].normal_()  # the last layer starts at zero
    features, action = torch.randn(CACHED_ROWS // 2, 3), torch.randn(5, CACHED_ROWS // 2, 2, 1)
    together = critic(features, action)
    separately = torch.stack([critic(features, one) for one in action], dim=1)
    torch.testing.assert_close(together, separately)
    parameters = list(critic.parameters())
    found, expected = (torch.autograd.grad(q.logsumexp(1).mean(), parameters) for q in (together, separately))
    torch.testing.assert_close(found, expected)


def test_members_are_independent_and_the_target_follows() -> None:
    torch.manual_seed(0)
    config = EnsembleConfig(hidden=(8, 8), members=4)
    critic, target = (QEnsemble(config, feature_dim=3, action_numbers=2) for _ in range(2))
    assert critic(torch.randn(5, 3), torch.randn(5, 1, 2)).abs().max() == 0
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    features, action = torch.randn(5, 3), torch.randn(5, 1, 2)
    together = critic(features, action)
    x = torch.cat([critic.trunk(features), action.flatten(1)], dim=-1)
    for member in range(4):
        own = x
        for layer in critic.members:
            if hasattr(layer, "weight"):
                own = own @ layer.weight[member] + layer.bias[member]
            elif hasattr(layer, "gain"):
                own = torch.nn.functional.layer_norm(own, own.shape[-1:]) * layer.gain[member] + layer.bias[member]
            else:
                own = layer(own)
        torch.testing.assert_close(own.squeeze(-1), together[member], atol=1e-6, rtol=1e-5)
    before = [parameter.clone() for parameter in target.parameters()]
    follow(list(target.parameters()), list(critic.parameters()), 0.25)
    for old, new, source in zip(before, target.parameters(), critic.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), 0.75 * old.detach() + 0.25 * source.detach())


# -- the learner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "base"),
    [(TD3, "denoising"), (SAC, "categorical"), (dataclasses.replace(TD3, encoder=ENCODER), "denoising")],
)
def test_a_resumed_run_is_the_same_run(kind: ResidualConfig, base: str, store: Path, tmp_path: Path) -> None:
    """Through a checkpoint in the middle of episodes and of the base's chunks; everything that is learned moved."""
    whole = learner(PointEnv(num_envs=3), kind, base=base, store=store, warmup_noise=0.1)
    before = {name: value.clone() for name, value in whole.policy.state_dict().items()}
    whole.iterate()
    save_tree(tmp_path / "state.safetensors", algorithm_state(whole))
    first = whole.iterate()
    resumed = learner(PointEnv(num_envs=3), kind, base=base, store=store, warmup_noise=0.1)
    restore_algorithm(resumed, load_tree(tmp_path / "state.safetensors"))
    second = resumed.iterate()
    timed = {name for name in first if name.startswith("time/")}
    assert {k: v for k, v in first.items() if k not in timed and k != "success"} == {
        k: v for k, v in second.items() if k not in timed and k != "success"
    }
    pairs: list[tuple[torch.nn.Module, torch.nn.Module]] = [
        (whole.policy, resumed.policy),
        (whole.critics.q, resumed.critics.q),
        (whole.critics.target, resumed.critics.target),
    ]
    for one, two in pairs:
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    moved = {name for name, value in whole.policy.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all(not name.startswith("base.") for name in moved)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("interruption", ["validation", "resume"])
@pytest.mark.parametrize("can_capture", [True, False])
def test_no_window_joins_two_episodes(can_capture: bool, interruption: str, shards: int) -> None:
    """After an interruption environments that cannot be captured begin new episodes; state = [cell, elapsed]."""

    def made() -> OffPolicy:
        torch.manual_seed(0)
        env = ChainEnv(num_envs=2, length=40, max_steps=30, can_capture=can_capture)
        base = build_policy(GaussianPolicyConfig(action_horizon=2, hidden=(8,)), RobotSpec.of(env.spec))
        one = partial(ChainEnv, num_envs=2 // shards, length=40, max_steps=30, can_capture=can_capture)
        rollouts = {} if shards == 1 else {"make_rollouts": make_sharded(one, shards)}
        config = dataclasses.replace(SMALL, demonstration_share=0.0, rollout_shards=shards)
        return OffPolicy(config, residual_on(base, TD3), env, seed=0, **rollouts)

    algorithm = made()
    algorithm.iterate()
    if interruption == "validation":
        with algorithm.collector.suspended():
            pass
    else:
        state = algorithm_state(algorithm)
        algorithm = made()
        restore_algorithm(algorithm, state)
    algorithm.iterate()
    replay, joined = algorithm.replay, 0
    for entry in np.flatnonzero(replay.entries().num_executed.numpy() > 0):
        if entry % replay.length == 7:  # the newest of a stream, whose successor is not known
            continue
        window = replay.windows(np.array([entry]), chunks=1)
        joined += int((window.next_inputs.features[0] - window.inputs.features[0])[1] != 2)  # type: ignore[attr-defined]
    assert joined == 0
    resumes = interruption == "resume" or shards == 1
    assert len(replay) == (14 if can_capture or not resumes else 12)


def test_images_are_trained_by_the_critic_alone(store: Path) -> None:
    made = learner(PointEnv(num_envs=3), dataclasses.replace(SAC, encoder=ENCODER), store=store, shift=2)
    groups = made.policy.parameter_groups()
    before = {name: [value.detach().clone() for value in values] for name, values in groups.items()}
    made.iterate()
    assert made.updates > made.config.critic_warmup
    for name in ("residual", "encoder"):
        assert any(not torch.equal(a, b) for a, b in zip(before[name], groups[name], strict=True)), name


def test_features_are_standardized_once_before_the_first_update(store: Path) -> None:
    made = learner(PointEnv(num_envs=3), TD3, store=store)
    assert isinstance(made.policy, ResidualPolicy)
    made.iterate()
    mean = made.policy.feature_mean.clone()
    features = made._draw(4096).inputs.features  # type: ignore[attr-defined]
    scaled = (features - mean) / made.policy.feature_std
    assert scaled.mean(0).abs().max() < 0.3 and scaled.std(0).max() < 1.3
    made.iterate()
    torch.testing.assert_close(made.policy.feature_mean, mean, rtol=0, atol=0)


def test_half_of_a_batch_is_demonstrations(store: Path) -> None:
    made = learner(PointEnv(num_envs=3), TD3, store=store)
    made.iterate()
    assert made.demonstrations is not None
    recorded = made.demonstrations.entries().action
    batch = made._draw(made.config.batch_size)
    known = (batch.action[:, None] == recorded[None]).all(-1).all(-1).any(1)
    assert known.sum() == 8


def test_a_large_weight_of_corrections_keeps_the_policy_at_its_base() -> None:
    """Corrections that the critic's gradient makes; with a large weight none that is not undone by the next updates."""
    sizes = []
    for weight in (0.0, 100.0):
        made = learner(PointEnv(num_envs=4), TD3, correction_weight=weight, actor_learning_rate=0.01)
        with torch.no_grad():
            made.critics.q.members[-1].weight.fill_(1.0)  # type: ignore[operator]
        made.iterate()
        sizes.append(made.iterate()["correction"])
    assert sizes[0] > 0.1 and sizes[1] < 0.2 * sizes[0]


def test_updates_follow_the_ratio_after_the_warm_up() -> None:
    made = learner(PointEnv(num_envs=4), TD3, chunks=5, warmup=12, critic_warmup=7, utd_ratio=0.5)
    made.iterate()
    assert (made.chunks_acted, made.updates) == (20, 7 + (20 - 12) // 2)


@pytest.mark.parametrize(("place", "value", "named"), [
    ("critic", 1e30, r"critic weight members\.\S+ is"),
    ("residual", NAN, r"policy weight head\.\d+\.bias is nan \(it makes action nan, decision 0"),
    ("reward", NAN, r"reward is \S+ \(environment 3"),
    ("replay", 1e30, r"batch reward is|q_loss is"),
])  # fmt: skip
def test_a_number_that_is_not_finite_stops_it_with_its_name(place: str, value: float, named: str) -> None:
    env = PointEnv(num_envs=4)
    made = learner(env, TD3)
    made.iterate()
    weight = {"critic": made.critics.q.members[-1].bias, "residual": residual(made).head[-1].bias}
    if place in weight:
        weight[place].data.fill_(value)
    elif place == "replay":
        made.replay.entries().reward.fill_(value)
    else:
        step = env.step
        env.step = lambda action: dataclasses.replace(  # type: ignore[method-assign]
            taken := step(action), reward=torch.where(torch.arange(4) == 3, value, taken.reward)
        )
    with pytest.raises(NotFinite, match=named):
        made.iterate()


def test_around_noise_the_replay_holds_noise(store: Path) -> None:
    """Of a base of eight actions; what is executed is another thing, and recorded actions are refused."""
    chosen = dataclasses.replace(SAC, around="noise", scale=1.5, action_horizon=8)
    made = learner(PointEnv(num_envs=4), chosen, base="denoising")
    acted = made._act()
    held = made.replay.entries().action.unflatten(0, (4, -1))[:, 0]
    torch.testing.assert_close(held, residual(made).critic_action(acted.experience.trace, acted.action))
    assert not torch.allclose(held, acted.action)
    made.iterate()
    assert made.updates > made.config.critic_warmup
    with pytest.raises(UserError, match=r"around noise learns from what it acts itself"):
        learner(PointEnv(num_envs=4), chosen, base="denoising", store=store)


class PaidEnv(PointEnv):
    """Pays 1 at every step."""

    def step(self, action: torch.Tensor) -> Step:
        step = super().step(action)
        return dataclasses.replace(step, reward=torch.ones_like(step.reward))


def test_returns_of_the_policy_that_no_histogram_holds_are_refused() -> None:
    """With gamma .9 and episodes of 6 steps a return is 1 + .9 + ... + .9^5 = 4.69."""

    def made(**histogram: float) -> OffPolicy:
        critic = dataclasses.replace(SMALL.critic, histogram=HistogramConfig(**histogram))
        return learner(PaidEnv(num_envs=4, max_steps=6), TD3, gamma=0.9, critic=critic)

    refused = r"the policy's own returns are from 1.9 to 4.686 .* from 0 to 4: set critic.histogram.low and high"
    with pytest.raises(UserError, match=refused):
        made(high=4.0).iterate()
    for high, cut in ((4.7, True), (10.0, False)):  # behind the time limit values go on, to 1 / (1 - gamma)
        held = made(high=high)
        held.iterate()
        assert (held.iterate()["cut_targets"] > 0) == cut
    target = torch.tensor([-1.0, -0.1, 0.0, 4.7, 4.8, 6.0])
    assert HistogramConfig(high=4.7).beyond(target).tolist() == [True, False, False, False, False, True]


def test_targets_that_a_histogram_cuts_are_told() -> None:
    """A bonus of entropy is in no return."""
    critic = dataclasses.replace(SMALL.critic, histogram=HistogramConfig())
    entropy = EntropyConfig(backup=True, temperature=10.0)
    made = learner(PointEnv(num_envs=4), SAC, critic=critic, entropy=entropy)
    made.iterate()
    assert made.iterate()["cut_targets"] > 0.9


@pytest.mark.parametrize("base", ["denoising", "pi0", "pi05", "smolvla", "diffusion_policy"])
def test_ppo_and_grpo_learn_to_choose_the_noise_of_any_base(base: str) -> None:
    """Noise of 12 x 8 or 16 x 2 for an executed chunk of 8 x 2 among them."""
    env = PointEnv(num_envs=4, max_steps=24)
    chosen = dataclasses.replace(SAC, around="noise", scale=1.5, action_horizon=None)
    update = GRPOUpdateConfig(minibatch=8, micro_batch=8, epochs=1, entropy_weight=0.01)
    settings = (
        PPOConfig(chunks=2, critic_warmup=0, update=UpdateConfig(entropy_weight=0.01)),
        GRPOConfig(groups=2, group_size=2, min_success=0.0, max_success=1.0, update=update),
    )
    for config in settings:
        torch.manual_seed(0)
        policy = residual_on(build_policy(CONFIGS[base], RobotSpec.of(env.spec)), chosen)
        before = policy.head[-1].weight.clone()
        metrics = build_algorithm(config, policy, env, seed=0).iterate()
        assert all(math.isfinite(value) for name, value in metrics.items() if name != "success")
        assert config.name == "grpo" or not torch.equal(policy.head[-1].weight, before)


@pytest.mark.parametrize(
    ("family", "fit", "shards"), [("pi0", 1.01, 1), ("pi0", 0.9, 2), ("openvla", 1.01, 2), ("openvla", 0.9, 1)]
)
def test_prefixes_are_replayed_where_all_of_them_fit(family: str, fit: float, shards: int, store: Path) -> None:
    """``fit``: how many of the records of replay and demonstrations the host has room for; the device, whose room does
    not count, for all. Asking for whole episodes, which is another plan, changes nothing."""
    env = PointEnv(num_envs=4)
    robot, config = RobotSpec.of(env.spec), CONFIGS[family]
    config = dataclasses.replace(config, **({"chunk_size": 8} if family == "pi0" else {}))
    size, recorded = build_policy(config, robot).record_bytes, 16
    host_gb = fit * (64 + recorded) * size / GB
    config = dataclasses.replace(config, storage=StorageConfig(device_gb=1e3, host_gb=host_gb))
    made = OffPolicy(
        dataclasses.replace(SMALL, capacity=64, stores=(store,), iql=IQLConfig(), frozen=("encoder",)),
        build_policy(config, robot), env, seed=0,
        make_rollouts=make_sharded(lambda: PointEnv(num_envs=4 // shards), shards),
    )  # fmt: skip
    assert made.demonstrations is not None and len(made.demonstrations.entries()) == recorded
    made.collector.episodes([StartState(task=0, seed=seed) for seed in range(4)])
    assert math.isfinite(made.iterate()["actor_loss"])
    for replay in (made.replay, made.demonstrations):
        assert isinstance(replay.entries().inputs, Observation) == (fit < 1)


def test_a_run_that_ends_in_its_warm_up_is_refused(tmp_path: Path) -> None:
    env = PointEnv(num_envs=2)
    save_bundle(residual_on(build_policy(CONFIGS["gaussian"], RobotSpec.of(env.spec)), TD3), tmp_path)
    settings = dataclasses.replace(SMALL, stores=(), demonstration_share=0.0, iterations=3)
    wanted = [
        Experiment(start=FromBundle(path=tmp_path), algorithm=dataclasses.replace(settings, warmup=n)) for n in (23, 24)
    ]
    check_experiment(wanted[0], env)
    with pytest.raises(UserError, match=r"warmup must be below the 24 chunks that the run acts .* got 24"):
        check_experiment(wanted[1], env)


def test_updates_wait_for_the_first_transition() -> None:
    """A warm-up of one chunk of each environment holds none: the observations after them are missing."""
    made = learner(PointEnv(num_envs=4), TD3, warmup=4, critic_warmup=2)
    made.iterate()
    assert made.updates == 2 + (4 * made.config.chunks - 4)


def test_a_replay_of_one_chunk_of_each_environment_is_refused() -> None:
    """Nothing could be drawn from it, as the observation after the chunk is missing."""
    for capacity in (1, 4):
        with pytest.raises(ValueError, match=rf"capacity \({capacity}\) must be above sim.num_envs \(4\)"):
            dataclasses.replace(SMALL, capacity=capacity).check_num_envs(4, "sim.num_envs")
    made = learner(PointEnv(num_envs=4), TD3, capacity=5)
    made.config.check_num_envs(4, "sim.num_envs")
    made.iterate()
    assert made.updates > 0


def test_what_does_not_fit_is_refused(store: Path) -> None:
    env = PointEnv(num_envs=2)
    plain = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec))
    with pytest.raises(UserError, match=r"add start\.residual"):
        OffPolicy(SMALL, plain, env, seed=0)
    with pytest.raises(UserError, match=r"squashed noise needs entropy"):
        OffPolicy(SMALL, residual_on(plain, SAC), env, seed=0)
    with pytest.raises(UserError, match=r"give algorithm\.stores"):
        OffPolicy(SMALL.with_demonstrations([]), residual_on(plain, TD3), env, seed=0)
    without_noise = build_policy(dataclasses.replace(CONFIGS["denoising"], initial_noise=0.0), RobotSpec.of(env.spec))
    chosen = dataclasses.replace(SMALL, best_of=BestOfConfig(), demonstration_share=0.0)
    with pytest.raises(UserError, match=r"acts without noise.*initial_noise above 0"):
        OffPolicy(chosen, without_noise, env, seed=0)
    with_noise = build_policy(CONFIGS["denoising"], RobotSpec.of(env.spec))
    residual_with_encoder = residual_on(with_noise, dataclasses.replace(TD3, encoder=ENCODER))
    for policy, frozen, part in (
        (with_noise, ("encoder", "expert"), "actor"),
        (with_noise, ("critic",), "critic"),
        (residual_with_encoder, ("residual",), "actor"),
    ):
        one = BestOfConfig() if policy is with_noise else None
        with pytest.raises(UserError, match=f"frozen leaves the {part} nothing to train, got {', '.join(frozen)}"):
            OffPolicy(dataclasses.replace(chosen, best_of=one, frozen=frozen), policy, env, seed=0)
    with pytest.raises(UserError, match=r"best_of trains the policy itself: leave start.residual out"):
        OffPolicy(chosen, residual_on(plain, TD3), env, seed=0)
    with pytest.raises(UserError, match=r"set algorithm.best_of: {}"):
        OffPolicy(SMALL, best_of(plain, samples=2, critic=SMALL.critic), env, seed=0)
    with pytest.raises(ValueError, match=r"critic.least_of \(3\) must not be above critic.members \(2\)"):
        EnsembleConfig(members=2, least_of=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"control_hz": 50.0}, r"control_hz 50.0, not"),
        ({"state": np.zeros((21, 9), dtype=np.float32)}, r"state_dim 9, not"),
        ({"images": {}}, r"cameras \(\), not"),
    ],
)
def test_episodes_of_another_robot_are_refused_before_anything_is_made(
    tmp_path: Path, store: Path, change: dict[str, Any], message: str
) -> None:
    """Failures too, which the store may consist of."""
    env, other = PointEnv(num_envs=4), EpisodeStore(tmp_path / "store", create=True)
    with EpisodeStore(store) as recorded:
        given = recorded.read(recorded.select()[0].id)
    no = np.zeros(given.num_steps, dtype=bool)
    state = change.get("state", given.state)[:1].repeat(len(given.state), axis=0)
    other.add(dataclasses.replace(given, success=no, terminated=no, **(change | {"state": state})))
    algorithm = dataclasses.replace(SMALL, stores=(other.path,))
    torch.manual_seed(0)
    save_bundle(residual_on(build_policy(CONFIGS["gaussian"], RobotSpec.of(env.spec)), TD3), tmp_path / "bundle")
    experiment = Experiment(device="cpu", start=FromBundle(path=tmp_path / "bundle"), algorithm=algorithm)
    with pytest.raises(UserError, match=rf"'algorithm.stores': .*another robot or simulator: .*{message}"):
        check_experiment(experiment, env, start=tmp_path / "bundle")


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_a_learned_reward_is_refused_beside_demonstrations_that_it_does_not_pay(tmp_path: Path, store: Path) -> None:
    """Unless none are drawn, or all of them are labelled with their success, which a classifier pays alike."""
    env, labelled, bundle = PointEnv(num_envs=4), tmp_path / "store", tmp_path / "bundle"
    shutil.copytree(store, labelled)
    torch.manual_seed(0)
    save_bundle(residual_on(build_policy(CONFIGS["gaussian"], RobotSpec.of(env.spec)), TD3), bundle)
    model = untrained(sensors_of(env.spec), threshold=NEVER)
    save_reward_model(CLASSIFIER, model, tmp_path / "classifier", tasks=("go",))

    def check(reward: Any, **settings: Any) -> None:
        algorithm = dataclasses.replace(SMALL, **{"stores": (labelled,)} | settings)
        start = FromBundle(path=bundle)
        check_experiment(Experiment(device="cpu", start=start, reward=reward, algorithm=algorithm), env, start=bundle)

    classifier = ClassifierConfig(path=tmp_path / "classifier")
    check(OutcomeConfig())
    check(classifier, demonstration_share=0.0)
    for settings in ({}, {"demonstration_share": 0.0, "offline_iterations": 1}):
        with pytest.raises(UserError, match="'reward': classifier pays for what the policy does"):
            check(classifier, **settings)
    with EpisodeStore(labelled) as opened:
        for entry in opened.select():
            opened.label(entry.id, "success", entry.success, author="me")
    check(classifier)


SHAPED = {"reward": "shaped"}


@pytest.mark.parametrize(("recorded", "pays"), [({}, SHAPED), (SHAPED, {})])
def test_episodes_with_another_reward_than_the_simulators_are_refused(
    tmp_path: Path, store: Path, recorded: dict[str, str], pays: dict[str, str]
) -> None:
    """Unless none are drawn; a labelled episode has the sparse reward of its outcome, whatever was recorded."""
    env, bundle, other = PointEnv(num_envs=4), tmp_path / "bundle", EpisodeStore(tmp_path / "store", create=True)
    env.spec = dataclasses.replace(env.spec, fingerprint=pays)
    with EpisodeStore(store) as opened:
        given = opened.read(opened.select()[0].id)
    id = other.add(dataclasses.replace(given, fingerprint=recorded))
    torch.manual_seed(0)
    save_bundle(residual_on(build_policy(CONFIGS["gaussian"], RobotSpec.of(env.spec)), TD3), bundle)

    def check(**settings: Any) -> None:
        algorithm = dataclasses.replace(SMALL, stores=(other.path,), **settings)
        experiment = Experiment(device="cpu", start=FromBundle(path=bundle), algorithm=algorithm)
        check_experiment(experiment, env, start=bundle)

    said = "it is shaped, .* with sparse" if pays else "it is sparse, .* with shaped"
    with pytest.raises(UserError, match=f"'sim.reward': {said} rewards"):
        check()
    check(demonstration_share=0.0)
    other.label(id, "success", True, author="me")
    if pays:
        with pytest.raises(UserError, match=f"'sim.reward': {said} rewards"):
            check()
    else:
        check()


# -- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["fixed", "squashed"])
def test_a_cloned_policy_improves(noise: str) -> None:
    """From few noisy demonstrations in a small environment: 25 points and more."""
    torch.set_num_threads(1)
    base = clone(GaussianPolicyConfig(action_horizon=4), ReachEnv, episodes=6, steps=60, seed=0)
    spread = FixedNoiseConfig(std=0.2) if noise == "fixed" else SquashedNoiseConfig()
    torch.manual_seed(0)
    policy: ResidualPolicy = residual_on(base, ResidualConfig(scale=0.5, noise=spread, hidden=(64, 64)))
    kinds: dict[str, dict[str, Any]] = {
        "fixed": {"target_noise": 0.1},
        "squashed": {"entropy": EntropyConfig(temperature=0.01)},
    }
    config = OffPolicyConfig(
        chunks=40, warmup=300, warmup_noise=0.3, critic_warmup=200, batch_size=128, demonstration_share=0.0,
        utd_ratio=0.25, **kinds[noise],
        critic=EnsembleConfig(members=5, hidden=(64, 64), polyak_tau=0.01),
    )  # fmt: skip
    made = OffPolicy(config, policy, ReachEnv(num_envs=16), seed=0)
    before = success(made.deployed(), ReachEnv, episodes=100)
    for _ in range(15):
        made.iterate()
    assert success(made.deployed(), ReachEnv, episodes=100) > before + 0.25


# -- every configuration ----------------------------------------------------------------------------------------------

SMALLER = [  # resfit_lift is of robosuite, which has an interpreter of its own
    *("--sim", json.dumps({"name": "tabletop", "num_envs": 2, "max_steps": 16, "tasks": ["reach"]})),
    *("--algorithm.chunks", "6", "--algorithm.warmup", "8", "--algorithm.batch_size", "8"),
    *("--algorithm.offline_updates", "4"),
    *("--algorithm.critic_warmup", "1", "--algorithm.critic.hidden", "[16]", "--algorithm.utd_ratio", "1"),
    *("--evaluation.episodes", "2", "--evaluation.validation_episodes", "2", "--evaluation.videos_per_task", "0"),
]


@pytest.mark.parametrize("name", [path.stem for path in CONFIGURATIONS.glob("*.yaml")])
def test_a_configuration_runs_a_few_updates(name: str, tmp_path: Path) -> None:
    """With its own residual, replay and losses, from a bundle of a small policy and recorded demonstrations."""
    probe = load_config(Experiment, CONFIGURATIONS / f"{name}.yaml", SMALLER)
    env = make_env(probe.sim)
    torch.manual_seed(0)
    save_bundle(build_policy(CONFIGS["denoising"], RobotSpec.of(env.spec)), tmp_path / "bundle")
    recorder = RecordedEnv(env, EpisodeStore(tmp_path / "store", create=True), source="expert", split="train")  # type: ignore[arg-type]
    recorder.reset(start=[StartState(task=0, seed=seed) for seed in range(2)])
    for _ in range(17):
        recorder.observe()
        recorder.step(torch.zeros(2, 7))
    recorder.commit()
    env.close()
    residual = None if probe.start.residual is None else dataclasses.asdict(probe.start.residual)
    settings = probe.algorithm
    assert isinstance(settings, OffPolicyConfig)
    offline, acts = min(settings.offline_iterations, 1), settings.iterations > settings.offline_iterations
    stages = ["--algorithm.iterations", str(offline + acts), "--algorithm.offline_iterations", str(offline)]
    start = json.dumps({"name": "bundle", "path": str(tmp_path / "bundle"), "residual": _plain(residual)})
    stores = json.dumps([str(tmp_path / "store")])
    experiment = load_config(
        Experiment, CONFIGURATIONS / f"{name}.yaml", [*SMALLER, *stages, "--start", start, "--algorithm.stores", stores]
    )
    train(experiment, tmp_path / "run", resume=False, command="")
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["control_steps"] > 0 for row in written] == [False] * offline + [True] * acts
    assert written[-1]["updates"] >= 4 + 2 * offline * acts
    critic_loss = "value_loss" if name == "recap" else "q_loss"
    assert all({critic_loss, "actor_loss"} <= set(row) for row in written)


def _plain(tree: Any) -> Any:
    """As JSON has it; an encoder is replaced by a small one."""
    if isinstance(tree, dict):
        return {
            k: ({"width": 32, "text_width": 16, "image_widths": [8]} if k == "encoder" and v else _plain(v))
            for k, v in (tree | ({"hidden": [16]} if "hidden" in tree else {})).items()
        }
    return list(tree) if isinstance(tree, tuple) else tree
