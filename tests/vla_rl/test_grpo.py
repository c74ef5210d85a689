"""Groups of GRPO: which episodes are compared with each other."""

from pathlib import Path

import torch

from policies.gaussian import GaussianPolicy, GaussianPolicyConfig, StateContext
from policies.policy import RobotSpec
from sims.numbers.seeding import spawn_seed
from tests.reach_env import ReachEnv
from vla_rl.algorithms.grpo import GRPO, GRPOConfig, with_group_advantages
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.rollouts.experience import Experience

CONFIG = GRPOConfig(groups=4, group_size=4, max_rounds=20)


def learner() -> GRPO:
    env = ReachEnv(num_envs=16)
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=4), RobotSpec.of(env.spec))
    return GRPO(CONFIG, policy, env, seed=0)


def experience(reward: list[list[float]], *, valid: list[list[bool]]) -> Experience:
    """Chunks of two steps; ``inputs`` hold the number of the environment."""
    shape, none = (len(reward), len(reward[0])), torch.zeros(len(reward), len(reward[0]))
    number = torch.arange(shape[1], dtype=torch.float32).expand(shape)
    return Experience(
        inputs=StateContext(state=number[..., None]),
        trace=StateContext(state=number[..., None]),
        log_prob=torch.zeros(*shape, 1, 1, 1),
        value=none,
        next_value=none,
        reward=torch.tensor(reward),
        num_executed=torch.full(shape, 2),
        terminated=none.bool(),
        truncated=none.bool(),
        success=none.bool(),
        valid=torch.tensor(valid),
        task=none.long(),
        policy_version=none.long(),
        actor=none.long(),
    )


def test_advantages_are_relative_to_the_own_group() -> None:
    """Groups are neighbors: environments 0 and 1, 2 and 3. The last episode is one chunk long."""
    rollout = experience([[0.0, 1.0, 3.0, 5.0], [0.0, 1.0, 1.0, 9.0]], valid=[[True] * 4, [True, True, True, False]])
    config = GRPOConfig(group_size=2, gamma=1.0, scale_by_std=False)
    batch = with_group_advantages(rollout, config)
    # returns 0, 2 | 4, 5
    expected = {0: -1.0, 1: 1.0, 2: -0.5, 3: 0.5}
    assert isinstance(batch.inputs, StateContext) and batch.advantage is not None and batch.weight is not None
    numbers = batch.inputs.state[:, 0].int().tolist()
    assert numbers == [0, 1, 2, 3, 0, 1, 2]
    assert batch.advantage.tolist() == [expected[number] for number in numbers]
    assert batch.weight.tolist() == [0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5]


def test_returns_are_discounted_from_the_start() -> None:
    rollout = experience([[0.0, 0.0], [1.0, 2.0]], valid=[[True, True], [True, True]])
    batch = with_group_advantages(rollout, GRPOConfig(group_size=2, gamma=0.5, scale_by_std=False))
    assert batch.advantage is not None
    assert batch.advantage.tolist() == [-0.125, 0.125, -0.125, 0.125]  # 0.5^2 * (1, 2), relative to their mean


def test_the_episodes_of_a_group_share_their_start() -> None:
    grpo = learner()
    groups = grpo._collect_groups()
    assert groups.informative == sum(rollout.valid.shape[1] for rollout in groups.rollouts) // 4
    for rollout in groups.rollouts:
        assert isinstance(rollout.inputs, StateContext)
        first = rollout.inputs.state[0].reshape(-1, 4, 4)  # groups, episodes, state
        assert torch.equal(first, first[:, :1].expand_as(first))
        assert len({tuple(group[0].tolist()) for group in first}) == len(first)
        success = rollout.success.any(0).reshape(-1, 4).float().mean(1)
        assert (success >= CONFIG.min_success).all() and (success <= CONFIG.max_success).all()


def test_a_partial_section_keeps_the_defaults_of_grpo(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("algorithm: {name: grpo, update: {learning_rate: 0.5}}\n")
    update = load_config(Experiment, path).algorithm.update
    assert (update.learning_rate, update.clip_high, update.normalize_advantage) == (0.5, 0.28, False)


def test_the_stream_of_minibatches_is_that_of_the_seed() -> None:
    expected = torch.Generator().manual_seed(spawn_seed(0, "minibatches")).get_state()
    assert torch.equal(learner().update.generator.get_state(), expected)
