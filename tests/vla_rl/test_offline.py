"""Offline learning: exact values of small cases, every policy as IQL's actor, stages, the gate."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from episodes.recorder import RecordedEnv
from episodes.schema import HUMAN
from episodes.store import EpisodeStore
from policies.denoising.kernels import DDIMConfig
from policies.denoising.objectives import DiffusionConfig
from policies.policy import RobotSpec
from policies.pretrained.storage import StorageConfig
from policies.registry import build_policy
from policies.residual.conditioned import GOOD, NOT_GOOD, UNLABELED
from policies.residual.ensemble import EnsembleConfig
from policies.residual.histogram import HistogramConfig
from policies.residual.policy import ResidualConfig, ResidualPolicy, SquashedNoiseConfig, residual_on
from sims.errors import UserError
from sims.vector_env import Observation, StartState
from tests.policies.small_configs import CONFIGS, ENCODER
from tests.reach_env import ReachEnv
from tests.worlds import PointEnv
from vla_rl.algorithms.gate import Gate, GateConfig, paired_gain
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.off_policy_actor import chosen_by, distance_from_recorded
from vla_rl.algorithms.off_policy_critics import Proposals
from vla_rl.algorithms.off_policy_settings import (
    BestOfConfig,
    CalQLConfig,
    ConditionConfig,
    EntropyConfig,
    IQLConfig,
    OffPolicyConfig,
    RecapConfig,
    RecordedUpdatesConfig,
)
from vla_rl.algorithms.offline_losses import (
    cloning_weights,
    conservative_gap,
    drop_labels,
    expectile_loss,
    positive_labels,
)
from vla_rl.algorithms.td_target import td_target
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.weights import load_weights
from vla_rl.runners.iterations import algorithm_state, restore_algorithm
from vla_rl.runs.checkpoint import load_tree, save_tree

HORIZON = 2
SMALL = OffPolicyConfig(
    iterations=4, offline_iterations=2, offline_updates=6, chunks=4, warmup=8, critic_warmup=0, batch_size=16, n_step=1,
    actor_every=1, critic=EnsembleConfig(hidden=(16,), members=2),
)  # fmt: skip
SAC = ResidualConfig(action_horizon=HORIZON, hidden=(16,), scale=1.0, around="middle", noise=SquashedNoiseConfig())
TD3 = ResidualConfig(action_horizon=HORIZON, hidden=(16,), scale=1.0)
METHODS: dict[str, tuple[ResidualConfig | None, dict[str, Any]]] = {
    "iql": (None, {"iql": IQLConfig()}),
    "recap": (None, {"recap": RecapConfig()}),
    "recap_told": (None, {"recap": RecapConfig(condition=ConditionConfig(guidance=1.5)), "frozen": ("encoder",)}),
    "q_chunking": (None, {"best_of": BestOfConfig(samples=3)}),
    "td3_bc": (TD3, {"cloning_weight": 0.4}),
    "td3_bc_seeing": (dataclasses.replace(TD3, encoder=ENCODER), {"cloning_weight": 0.4}),
    "cal_ql": (SAC, {"cal_ql": CalQLConfig(draws=3), "entropy": EntropyConfig()}),
}


def record(
    path: Path, *, sign: float, episodes: int = 24, noise: float = 0.3, made_of: type[PointEnv] = ReachEnv
) -> Path:
    """Episodes of the expert; ``sign`` -1: of one that does the opposite of the expert."""
    env = made_of(num_envs=episodes)
    recorder = RecordedEnv(env, EpisodeStore(path, create=True), source="expert", split="train")
    expert = env.expert(noise=noise, seed=0)
    recorder.reset(start=[StartState(task=index % 3, seed=index) for index in range(episodes)])
    for _ in range(40):
        recorder.observe()
        recorder.step(sign * expert.act())
    recorder.commit()
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("offline") / "store", sign=1.0)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With images."""
    return record(tmp_path_factory.mktemp("offline") / "seen", sign=1.0, episodes=6, made_of=PointEnv)


def learner(method: str, store: Path, *, envs: int = 4, **settings: Any) -> OffPolicy:
    env = ReachEnv(num_envs=envs)
    residual, own = METHODS[method]
    torch.manual_seed(0)
    denoises = method in ("q_chunking", "recap_told")
    policy = build_policy(CONFIGS["denoising" if denoises else "gaussian"], RobotSpec.of(env.spec))
    if residual is not None:
        policy = residual_on(policy, residual)
    return OffPolicy(dataclasses.replace(SMALL, stores=(store,), **own | settings), policy, env, seed=0)


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    """Without durations, and without the success of no episode (NaN)."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/") and name != "success"}


# -- losses by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_the_expectile_of_a_uniform_distribution(expectile: float) -> None:
    """Of U[0, 1] it is m with e (1 - m)^2 = (1 - e) m^2; there the loss's slope is zero."""
    m = math.sqrt(expectile) / (math.sqrt(expectile) + math.sqrt(1 - expectile))
    values = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    point = torch.tensor(m, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(expectile_loss(values - point, expectile), point)
    assert abs(slope.item()) < 1e-9


def test_iql_of_a_two_state_chain() -> None:
    """State 0: an action stays and gives .1, another goes to state 1 and gives 0; state 1 returns and gives 1 or 2.

    Both actions of a state are equally frequent, and the e-expectile of two such values is (1 - e) least + e largest,
    so the values solve a linear system: V0 = (1 - e) g V0 + .1 (1 - e) + e g V1 and V1 = 1 + e + g V0.
    """
    expectile, gamma = 0.8, 0.9
    reward = torch.tensor([[0.1, 0.0], [1.0, 2.0]], dtype=torch.float64)
    following = torch.tensor([[0, 1], [0, 0]])
    value = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for _ in range(1500):
        discount = torch.full((4,), gamma, dtype=torch.float64)
        q = td_target(reward.flatten(), discount, value.detach()[following].flatten()[None]).view(2, 2)
        (slope,) = torch.autograd.grad(expectile_loss((q - value[:, None]).flatten(), expectile), value)
        value = (value - 2.0 * slope).detach().requires_grad_(True)
    matrix = np.array([[1 - (1 - expectile) * gamma, -expectile * gamma], [-gamma, 1.0]])
    exact = np.linalg.solve(matrix, np.array([0.1 * (1 - expectile), 1 + expectile]))
    np.testing.assert_allclose(value.detach().numpy(), exact, atol=1e-6)


def test_cloning_weights_are_exponential_and_limited() -> None:
    weights = cloning_weights(torch.tensor([-1.0, 0.0, 0.5, 9.0]), 3.0, 100.0)
    torch.testing.assert_close(weights, torch.tensor([math.exp(-3), 1.0, math.exp(1.5), 100.0]))


def test_the_largest_advantages_are_good() -> None:
    labels = positive_labels(
        torch.tensor([0.1, -0.2, 0.4, 0.0, 0.3, -1.0, 0.2, -0.1, -0.3, -0.4]), 0.3, torch.zeros(10, dtype=torch.bool)
    )
    assert labels.nonzero().flatten().tolist() == [2, 4, 6]
    none = torch.zeros(4, dtype=torch.bool)
    assert positive_labels(torch.zeros(4), 0.3, none).sum() == 4  # nothing is known to be better
    forced = torch.tensor([False, True, False, False, True])  # half of the other three is good
    labels = positive_labels(torch.tensor([0.1, -5.0, 0.3, 0.2, 9.0]), 0.5, forced)
    assert labels.tolist() == [0, 1, 1, 1, 1]
    assert positive_labels(torch.tensor([-1.0, -2.0]), 0.3, torch.ones(2, dtype=torch.bool)).tolist() == [1, 1]
    labels = positive_labels(torch.tensor([0.1, torch.nan, 0.3, 0.2, torch.nan]), 0.4, torch.zeros(5, dtype=torch.bool))
    assert labels.tolist() == [0, 0, 1, 0, 0], "the largest of three: NaN is none of them"


def test_recap_learns_returns_and_labels_by_their_difference(store: Path) -> None:
    critic = EnsembleConfig(hidden=(32,), members=2, learning_rate=1e-2)
    made = learner("recap", store, offline_updates=200, gamma=0.95, critic=critic)
    made.iterate()
    batch = made._draw(256)
    context, following = made.policy.restore(batch.inputs), made.policy.restore(batch.next_inputs)
    assert batch.return_to_go is not None
    with torch.no_grad():
        value = made.critics.state_value(made.critics.features(context))
        advantage = made.critics.advantage(context, batch, Proposals())
        after = made.critics.state_value(made.critics.features(following))
    torch.testing.assert_close(advantage, batch.reward + batch.discount * after - value)
    error = (value - batch.return_to_go).square().mean()
    assert error < 0.5 * batch.return_to_go.var()
    assert list(made.critics.networks) == ["value"]  # nothing that is not trained


def test_recap_learns_nothing_from_episodes_that_still_run(store: Path) -> None:
    made = learner("recap", store)
    batch = made._draw(8)
    running = dataclasses.replace(batch, return_to_go=torch.full((8,), -math.inf))
    context, following = made.policy.restore(batch.inputs), made.policy.restore(batch.next_inputs)
    before = {name: tensor.clone() for name, tensor in made.critics.networks["value"].state_dict().items()}
    found = made.critics.gradients(context, following, running, Proposals(), made.generator, conservative=0.0)
    made.critics.apply()
    assert {name: value.item() for name, value in found.items()} == {"critic_grad_norm": 0.0}
    after = made.critics.networks["value"].state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_nothing_follows_a_time_limit_in_recap_s_advantage(tmp_path: Path) -> None:
    """V there is of no recorded return: a failed episode's last chunks are worth -V, not V of what they led to."""
    horizon = CONFIGS["gaussian"].action_horizon
    env = ReachEnv(num_envs=3, max_steps=6 * horizon)
    recorder = RecordedEnv(env, EpisodeStore(tmp_path / "store", create=True), source="policy", split="train")
    recorder.reset(start=[StartState(task=index, seed=index) for index in range(3)])
    for step in range(6 * horizon):
        if step % horizon == 0:
            recorder.observe()
        recorder.step(torch.zeros(3, 2))
    recorder.observe()
    recorder.commit()
    made = learner("recap", tmp_path / "store", n_step=3)
    batch = made._draw(64)
    assert batch.return_to_go is not None and (batch.return_to_go == 0).all()
    ended = batch.discount == 0
    assert 0.3 < ended.float().mean() < 0.7  # of 6 chunks the last 3 reach the limit
    context = made.policy.restore(batch.inputs)
    with torch.no_grad():
        advantage = made.critics.advantage(context, batch, Proposals())
        value = made.critics.state_value(made.critics.features(context))
    torch.testing.assert_close(advantage[ended], -value[ended])
    assert (value > 0.1).all()  # before training: the middle of the histogram
    assert (learner("iql", tmp_path / "store", n_step=3)._draw(64).discount > 0).all()


def test_the_conservative_term_by_hand() -> None:
    """One uniform draw of Q 1 and density 1/2; one of the policy of Q 0, density 2 and return .5; Q of the data .2."""
    q, log_two = torch.tensor, math.log(2.0)
    for known, calibrated in ((0.5, 0.5), (-math.inf, 0.0)):
        gap = conservative_gap(
            q([[[1.0]]]), -log_two, q([[[0.0]]]), q([[log_two]]), q([[0.2]]), q([known])
        )  # fmt: skip
        assert gap.item() == pytest.approx(math.log(2 * math.e + math.exp(calibrated) / 2) - 0.2, rel=1e-6)


def test_the_learner_s_conservative_term_is_that_term(store: Path) -> None:
    """Each action valued alone, with its log density from the policy's own score."""
    made = learner("cal_ql", store)
    made.iterate()
    batch = made._draw(8)
    context, following = made.policy.restore(batch.inputs), made.policy.restore(batch.next_inputs)
    proposals = made.actor.propose(context, following, batch, made.critics, made.generator, compare=True)
    others, features = proposals.alternatives, made.critics.features(context)
    assert others is not None and batch.return_to_go is not None
    q = made.critics.members(made.critics.q, features, batch.action)
    found = made.critics._conservative_gap(features, others, q, batch)
    rows = []
    for action in others.uniform:
        assert action.abs().max() <= 1
        rows.append(made.critics.members(made.critics.q, features, action) - HORIZON * 2 * math.log(0.5))
    for action, density in zip(others.policy, others.policy_log_density, strict=True):
        rows.append(made.critics.members(made.critics.q, features, action).maximum(batch.return_to_go) - density)
    expected = (torch.stack(rows).exp().sum(0).log() - q).mean()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_weighted_cloning_is_the_weighted_mean_of_single_losses(store: Path) -> None:
    made = learner("iql", store)
    made.iterate()
    batch = made._draw(12)
    context = made.policy.restore(batch.inputs)
    proposals = made.actor.propose(context, context, batch, made.critics, made.generator, compare=False)
    loss, _ = made.actor._clone(context, batch, proposals, made.critics, made.generator)
    advantage = made.critics.advantage(context, batch, proposals)
    weights = cloning_weights(advantage, 3.0, 100.0)
    error = made.policy.act_from_noise(context, batch.action) - batch.action
    inside = torch.arange(made.policy.spec.action_horizon) < batch.num_executed[:, None]
    expected = (error.square().mean(-1) * inside * weights[:, None]).sum() / inside.sum()
    assert weights.std() > 0
    assert not inside.all()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)


def test_chunks_of_some_actors_are_good_and_cloned_whatever_the_critic_says(store: Path) -> None:
    """All of the store are an expert's."""
    shares = []
    for actors in (("human",), ("human", "expert")):
        made = learner("recap", store, recap=RecapConfig(positive=0.25, positive_actors=actors))
        shares.append([made._update()["cloning_weight"] for _ in range(4)])
    assert max(shares[0]) < 0.6 and shares[1] == [1.0] * 4
    batch = made._draw(32)
    batch = dataclasses.replace(batch, actor=torch.arange(32) % 5 - 1)  # several, expert, policy, human, hold
    error = torch.ones_like(batch.action) * (batch.actor + 2.0)[:, None, None]
    chosen = chosen_by(batch, ("human",))
    assert torch.equal(chosen, batch.actor == HUMAN)
    assert distance_from_recorded(error, batch, chosen).item() == pytest.approx((HUMAN + 2) ** 2)
    assert distance_from_recorded(error, batch, torch.zeros_like(chosen)).item() == 0
    assert chosen_by(batch, None).all()


def test_half_of_the_labels_is_dropped() -> None:
    good = (torch.arange(4000) % 4 == 0).float()
    label = drop_labels(good, 0.5, torch.Generator().manual_seed(0))
    kept = label != UNLABELED
    assert 0.45 < kept.float().mean() < 0.55
    assert torch.equal(label[kept], torch.where(good[kept] == 1, GOOD, NOT_GOOD))
    assert torch.equal(drop_labels(good, 0.0, torch.Generator()), good.long())


# -- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_offline_iterations_act_nothing_and_resume_exactly(method: str, store: Path, tmp_path: Path) -> None:
    """Two of them, then two that act; a checkpoint lies between each."""
    whole = learner(method, store)
    before = {name: value.clone() for name, value in whole.policy.state_dict().items()}
    found = []
    for iteration in range(4):
        save_tree(tmp_path / f"{iteration}.safetensors", algorithm_state(whole))
        found.append(whole.iterate())
    assert [metrics["control_steps"] > 0 for metrics in found] == [False, False, True, True]
    assert [metrics["updates"] for metrics in found[:2]] == [6.0, 12.0]
    moved = [name for name, value in whole.policy.state_dict().items() if not torch.equal(value, before[name])]
    assert moved and (METHODS[method][0] is None or not any(name.startswith("base.") for name in moved))
    for first in (1, 3):
        resumed = learner(method, store)
        restore_algorithm(resumed, load_tree(tmp_path / f"{first}.safetensors"))
        for iteration in range(first, 4):
            assert untimed(resumed.iterate()) == untimed(found[iteration])


@pytest.mark.parametrize("method", ["iql", "recap", "recap_told", "q_chunking"])
@pytest.mark.parametrize("base", ["pi0", "pi05", "smolvla", "diffusion_policy", "diffusion_transformer"])
def test_a_policy_that_predicts_more_than_it_executes_learns_offline(base: str, method: str, seen: Path) -> None:
    """It clones the actions of the chunks that follow as well; the critics value what is executed."""
    torch.manual_seed(0)
    env, own = PointEnv(num_envs=4), METHODS[method][1]
    policy = build_policy(CONFIGS[base], RobotSpec.of(env.spec))
    executed, cloned = policy.spec.action_horizon, policy.spec.cloned_horizon
    config = dataclasses.replace(SMALL, stores=(seen,), **own | {"frozen": ("encoder",), "offline_updates": 3})
    made = OffPolicy(config, policy, env, seed=0)
    batch = made._draw(128)
    assert batch.action.shape[1] == executed < cloned == batch.targets.action.shape[1]
    assert executed < int(batch.num_cloned.max()) <= cloned
    before = {name: value.clone() for name, value in made.policy.state_dict().items()}
    found = [made.iterate() for _ in range(3)]  # the last one acts
    assert all(math.isfinite(metrics["actor_loss"]) for metrics in found) and found[-1]["control_steps"] > 0
    assert any(not torch.equal(value, before[name]) for name, value in made.policy.state_dict().items())


def test_a_batch_of_which_nothing_may_be_cloned_moves_nothing(store: Path) -> None:
    for method in ("iql", "recap", "recap_told", "q_chunking"):
        made = learner(method, store)
        made._fit_features()
        batch = made._draw(8)
        batch = dataclasses.replace(batch, num_cloned=torch.zeros_like(batch.num_cloned))
        context, following = made.policy.restore(batch.inputs), made.policy.restore(batch.next_inputs)
        proposals = made.actor.propose(context, following, batch, made.critics, made.generator, compare=False)
        found = made.actor.gradients(context, batch, proposals, made.critics, made.generator)
        assert found["actor_loss"] == 0 and found["actor_grad_norm"] == 0, method


def test_a_run_does_not_go_on_with_other_recorded_episodes(tmp_path: Path) -> None:
    path = record(tmp_path / "store", sign=1.0, episodes=12)
    made = learner("iql", path)
    made.iterate()
    state = made.state_dict()
    learner("iql", path).load_state_dict(state)
    with EpisodeStore(path) as opened:
        id = next(entry.id for entry in opened.select() if entry.success)
        opened.label(id, "success", False, author="anna")
    with pytest.raises(UserError, match="labels or cuts are others than those that the run learned from before"):
        learner("iql", path).load_state_dict(state)
    with EpisodeStore(path) as opened:
        opened.label(id, "success", None, author="anna")
    learner("iql", path).load_state_dict(state)


def test_thrown_away_episodes_are_not_drawn_again(store: Path) -> None:
    made = learner("cal_ql", store, demonstration_share=0.0, cal_ql=CalQLConfig(draws=3, online_weight=0.0))
    found = [made.iterate() for _ in range(4)]
    assert made.demonstrations is not None
    recorded = made.demonstrations.entries().action
    known = (made._draw(32).action[:, None] == recorded[None]).all(-1).all(-1).any(1)
    assert not known.any()
    assert "conservative_gap" in found[0] and "conservative_gap" not in found[3]


def test_rewards_and_returns_are_scaled_alike(store: Path) -> None:
    plain, scaled = (learner("cal_ql", store, reward_scale=scale)._draw(64) for scale in (1.0, 10.0))
    assert plain.reward.any() and plain.return_to_go is not None and scaled.return_to_go is not None
    torch.testing.assert_close(scaled.reward, 10 * plain.reward)
    torch.testing.assert_close(scaled.return_to_go, 10 * plain.return_to_go)
    torch.testing.assert_close(scaled.discount, plain.discount)


@pytest.mark.parametrize(("method", "histogram"), [("recap", "recap.histogram"), ("cal_ql", "critic.histogram")])
def test_returns_that_no_histogram_holds_are_refused(method: str, histogram: str, store: Path) -> None:
    """What is paid is 1 at the success: with reward_scale 3 a return is up to 3."""
    support = HistogramConfig()

    def made(**settings: Any) -> OffPolicy:
        if method == "recap":
            return learner(method, store, recap=RecapConfig(histogram=support), **settings)
        return learner(method, store, critic=dataclasses.replace(SMALL.critic, histogram=support), **settings)

    made()
    refused = rf"from 0 to [23][\d.]* \(with reward_scale 3\), .*{histogram} from 0 to 1: set {histogram}.low and high"
    with pytest.raises(UserError, match=refused):
        made(reward_scale=3.0)
    support = HistogramConfig(high=3.0)
    made(reward_scale=3.0)


def test_td3_bc_with_a_large_weight_clones(store: Path) -> None:
    apart = []
    for weight in (0.01, 10.0):
        made = learner("td3_bc", store, cloning_weight=weight, actor_learning_rate=3e-3, offline_updates=100)
        made.iterate()
        apart.append(made.iterate()["distance"])
    assert apart[1] < 0.75 * apart[0]


def test_what_does_not_fit_is_refused(store: Path) -> None:
    with pytest.raises(ValueError, match=r"cal_ql draws actions .* needs algorithm.entropy"):
        OffPolicyConfig(cal_ql=CalQLConfig())
    with pytest.raises(ValueError, match=r"iql goes without algorithm.entropy"):
        OffPolicyConfig(iql=IQLConfig(), entropy=EntropyConfig())
    with pytest.raises(ValueError, match=r"recap goes without algorithm.best_of"):
        OffPolicyConfig(recap=RecapConfig(), best_of=BestOfConfig())
    with pytest.raises(ValueError, match=r"set algorithm.offline_iterations"):
        OffPolicyConfig(gate=GateConfig())
    never = r"critic_warmup must be below the {} updates of .* never trained .* got {}"
    with pytest.raises(ValueError, match=never.format(500, 500)):
        RecordedUpdatesConfig(steps=500)
    with pytest.raises(ValueError, match=never.format(501, 500)):  # the actor's turn is every second update
        RecordedUpdatesConfig(steps=501)
    assert RecordedUpdatesConfig(steps=502).critic_warmup == 500
    with pytest.raises(ValueError, match=never.format(12, 12)):
        dataclasses.replace(SMALL, iterations=2, critic_warmup=12)
    assert dataclasses.replace(SMALL, iterations=3, critic_warmup=12).all_offline_updates == 12
    made = learner("iql", store)
    with pytest.raises(UserError, match=r"offline_iterations is not 0.*give algorithm.stores"):
        OffPolicy(dataclasses.replace(made.config, stores=()), made.policy, ReachEnv(num_envs=2), seed=0)


UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "cloning_weight": ("with algorithm.iql", {"iql": IQLConfig(), "cloning_weight": 0.4}),
    "correction_weight": ("with algorithm.recap", {"recap": RecapConfig(), "correction_weight": 0.1}),
    "actor_value": ("with algorithm.best_of", {"best_of": BestOfConfig(), "actor_value": "least"}),
    "target_noise": ("with algorithm.entropy", {"entropy": EntropyConfig(), "target_noise": 0.2}),
    "cloned_actors": ("with cloning_weight 0", {"cloned_actors": ("human",)}),
}
CAL_QL: dict[str, Any] = {"entropy": EntropyConfig(), "iterations": 4}


@pytest.mark.parametrize("name", UNREAD)
def test_a_setting_that_the_method_does_not_read_is_refused(name: str) -> None:
    where, settings = UNREAD[name]
    for kind in (OffPolicyConfig, RecordedUpdatesConfig):
        if kind is OffPolicyConfig or "best_of" not in settings:
            with pytest.raises(ValueError, match=f"algorithm.{name} has no effect {where}: leave it at "):
                kind(**settings)


def test_what_a_critic_that_is_not_there_would_read_is_refused() -> None:
    """And a weight of Cal-QL for a stage that the run does not have."""
    critic = EnsembleConfig(histogram=HistogramConfig())
    with pytest.raises(ValueError, match=r"critic.histogram is of Q, and recap learns V alone: set recap.histogram"):
        OffPolicyConfig(recap=RecapConfig(), critic=critic)
    online, offline = CalQLConfig(online_weight=0.0), CalQLConfig(weight=1.0)
    with pytest.raises(ValueError, match=r"cal_ql.online_weight has no effect where all iterations are offline"):
        OffPolicyConfig(cal_ql=online, offline_iterations=4, **CAL_QL)
    with pytest.raises(ValueError, match=r"cal_ql.online_weight has no effect where nothing is acted"):
        RecordedUpdatesConfig(cal_ql=online, entropy=EntropyConfig())
    with pytest.raises(ValueError, match=r"cal_ql.weight has no effect with offline_iterations 0"):
        OffPolicyConfig(cal_ql=offline, **CAL_QL)
    for weights in (online, offline):
        OffPolicyConfig(cal_ql=weights, offline_iterations=2, **CAL_QL)


# -- the gate ---------------------------------------------------------------------------------------------------------


def test_the_gain_of_pairs_by_hand() -> None:
    """Of 10 pairs three gain and one loses: mean .2, variance (3 * .64 + 1.44 + 6 * .04) / 9."""
    before = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 0], dtype=torch.bool)
    after = torch.tensor([1, 1, 1, 0, 1, 1, 1, 0, 0, 0], dtype=torch.bool)
    gain, error = paired_gain(before, after)
    assert gain == pytest.approx(0.2)
    assert error == pytest.approx(math.sqrt((3 * 0.64 + 1.44 + 6 * 0.04) / 9 / 10))


@pytest.mark.parametrize("seed", range(3))
def test_equal_policies_seldom_pass(seed: int) -> None:
    """Independent outcomes of one success rate: about 2.3 % of the draws gain 2 standard errors."""
    rng = torch.Generator().manual_seed(seed)
    passed = 0
    for _ in range(300):
        gate = Gate(GateConfig(episodes=100))
        for _ in range(2):
            _, found = gate.accept(torch.rand(100, generator=rng) < 0.5, {})
        passed += int(found["gate_accepted"])
    assert passed <= 18  # 7 expected, and P(more than 18) is below 1e-3


def test_a_bad_update_is_taken_back_and_a_good_one_kept(store: Path, tmp_path: Path) -> None:
    """Cloning the expert passes; then the episodes of one that does the opposite, as its best, do not."""
    settings: dict[str, Any] = {"gate": GateConfig(episodes=60), "offline_updates": 150, "actor_learning_rate": 3e-3}
    good = learner("iql", store, envs=20, **settings)
    first = good.iterate()
    assert first["gate_accepted"] == 1 and first["gate_gain"] > 0.3
    assert first["success"] == first["gate_success"]
    bad = learner("iql", record(tmp_path / "bad", sign=-1.0), envs=20, **settings)
    bad.policy.load_state_dict(good.policy.state_dict())
    second = bad.iterate()
    assert second["gate_accepted"] == 0 and second["gate_gain"] < -0.3
    assert second["success"] == pytest.approx(second["gate_success"] - second["gate_gain"])  # of what is kept
    for name, value in good.policy.state_dict().items():
        assert torch.equal(bad.policy.state_dict()[name], value), name


def test_the_gate_s_control_steps_are_counted(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of environments whose episode has ended are not, as everywhere."""
    made, counted = learner("iql", store, gate=GateConfig(episodes=8)), list[float]()
    run = made.collector.episodes

    def count(starts: list[StartState]) -> Experience:
        rollout = run(starts)
        counted.append(float((rollout.num_executed * rollout.valid).sum()))
        return rollout

    monkeypatch.setattr(made.collector, "episodes", count)
    first, second = made.iterate()["control_steps"], made.iterate()["control_steps"]
    assert len(counted) == 6 and min(counted) > 0  # 4 environments: two rounds each, the first iteration's twice
    assert (first, second) == (sum(counted[:4]), sum(counted[4:]))


def test_the_gate_s_episodes_change_nothing_of_training_and_explore_alike(store: Path) -> None:
    """Neither the success rates by which tasks are drawn nor the draws of exploration: an equal policy gains 0."""
    trained: dict[str, Any] = {"offline_updates": 100, "actor_learning_rate": 3e-3}
    made = learner("iql", store, envs=20, gate=GateConfig(episodes=40), failure_weight=0.9, **trained)
    made.iterate()
    assert isinstance(made.collector, Collector)
    made.collector.starts.success[:] = 0.8
    draws = made.collector.generator.get_state()
    starts = copy.deepcopy(made.collector.starts.state_dict())
    outcomes = [made._outcomes(40)[0] for _ in range(2)]
    assert 0 < outcomes[0].float().mean() < 1 and torch.equal(*outcomes)
    assert torch.equal(made.collector.generator.get_state(), draws)
    assert made.collector.starts.next_index == starts["next_index"]
    assert (made.collector.starts.success == starts["success"]).all()


def test_a_gated_run_resumes_exactly(store: Path, tmp_path: Path) -> None:
    whole, found = learner("iql", store, gate=GateConfig(episodes=8), failure_weight=0.5), []
    for iteration in range(3):
        save_tree(tmp_path / f"{iteration}.safetensors", algorithm_state(whole))
        found.append(untimed(whole.iterate()))
    resumed = learner("iql", store, gate=GateConfig(episodes=8), failure_weight=0.5)
    restore_algorithm(resumed, load_tree(tmp_path / "1.safetensors"))
    assert [untimed(resumed.iterate()) for _ in range(2)] == found[1:]


def test_the_accepted_state_stays_as_it_was_whatever_is_done_with_what_was_handed_out() -> None:
    gate, weight = Gate(GateConfig(margin=1e9)), torch.zeros(1)
    outcomes = torch.tensor([False, True])
    for _ in range(3):
        kept, _ = gate.accept(outcomes, {"optimizer": {"moment": weight}})
        assert kept["optimizer"]["moment"] == 0
        kept["optimizer"]["moment"] += 1
        weight += 1


@pytest.mark.parametrize("method", ["iql", "cal_ql", "q_chunking", "td3_bc_seeing"])
def test_what_is_taken_back_belongs_together(method: str, store: Path) -> None:
    """The policy, its entropy's temperature and its optimizer; critics too where they train part of the policy."""
    made = learner(method, store, gate=GateConfig(episodes=4, margin=1e9))
    for _ in range(3):
        made._update()  # there are moments of optimizers

    def state() -> dict[str, Any]:
        found = copy.deepcopy(made.state_dict())
        moments = {name: found[name]["state"] for name in ("actor_optimizer", "critic_optimizer")}
        weights = {name: found[name] for name in ("policy", "log_temperature", "critic", "target")}
        return weights | moments

    before = state()
    for _ in range(2):
        assert made.iterate()["gate_accepted"] == 0
        after = state()
        of_critic = ("critic", "target", "critic_optimizer")
        if method in ("iql", "cal_ql"):  # theirs learn on
            for name in of_critic:
                with pytest.raises(AssertionError):
                    torch.testing.assert_close(after.pop(name), before[name], rtol=0, atol=0)
        torch.testing.assert_close(after, {name: before[name] for name in after}, rtol=0, atol=0)


def test_a_policy_that_is_taken_back_keeps_the_scale_of_features_that_its_critic_learned_with(store: Path) -> None:
    made = learner("td3_bc", store, gate=GateConfig(episodes=4, margin=1e9))
    assert made.iterate()["gate_accepted"] == 0
    assert isinstance(made.policy, ResidualPolicy) and not made.policy.features_are_unscaled()


@pytest.mark.parametrize("method", ["td3_bc", "q_chunking"])
def test_a_policy_that_was_trained_before_keeps_its_scale_of_features(method: str, store: Path, tmp_path: Path) -> None:
    made = learner(method, store)
    made.iterate()
    trained = next(module for module in made.policy.modules() if hasattr(module, "feature_mean"))
    scale = trained.feature_mean.clone()
    other = record(tmp_path / "other", sign=-1.0)
    again = OffPolicy(
        dataclasses.replace(made.config, stores=(other,)), made.policy, ReachEnv(num_envs=4), seed=1
    )  # fmt: skip
    again.iterate()
    assert again.policy is made.policy and torch.equal(trained.feature_mean, scale)


DDIM = {
    "objective": DiffusionConfig(),
    "act": DDIMConfig(steps=4),
    "explore": DDIMConfig(steps=4, eta=1.0, train_last=1),
}


@pytest.mark.parametrize("offline", [0, 1])
def test_cloning_renews_the_copy_that_takes_the_steps_explore_does_not_train(store: Path, offline: int) -> None:
    """Also that of whoever acts with published weights in another process."""
    env = ReachEnv(num_envs=4)
    config = dataclasses.replace(CONFIGS["denoising"], **DDIM)
    policy, elsewhere = (build_policy(config, RobotSpec.of(env.spec)) for _ in range(2))
    settings = dataclasses.replace(SMALL, stores=(store,), offline_iterations=offline, iql=IQLConfig())
    made = OffPolicy(settings, policy, env, seed=0)
    published = list[dict[str, torch.Tensor]]()
    made.collector.publish = lambda version, tensors: published.append(dict(tensors))  # type: ignore[method-assign]
    before = copy.deepcopy(policy.expert)
    made.iterate()
    load_weights(elsewhere, None, published[-1])
    for acting in (policy, elsewhere):
        parts = zip(acting.expert.parameters(), acting.frozen_expert.parameters(), before.parameters(), strict=True)
        same = [(torch.equal(one, copied), torch.equal(one, old)) for one, copied, old in parts]
        assert all(renewed for renewed, _ in same) and not all(unchanged for _, unchanged in same)


def test_where_a_frozen_encoder_s_prefixes_lie_does_not_change_what_is_learned(seen: Path) -> None:
    """Images that are encoded again for want of room are not shifted."""
    losses = []
    for where in ("host", "recompute"):
        env = PointEnv(num_envs=4)
        torch.manual_seed(0)
        config = dataclasses.replace(CONFIGS["pi0"], storage=StorageConfig(where=where))
        policy = build_policy(config, RobotSpec.of(env.spec))
        chosen = {"stores": (seen,), "frozen": ("encoder",), "recap": RecapConfig()}
        made = OffPolicy(dataclasses.replace(SMALL, **chosen), policy, env, seed=0)
        assert made.demonstrations is not None and made.config.shift > 0
        assert isinstance(made.demonstrations.entries().inputs, Observation) == (where == "recompute")
        losses.append(made.iterate()["actor_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
