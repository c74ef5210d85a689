"""Groups of GRPO: which episodes are compared with each other."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from policies.gaussian import GaussianPolicy, GaussianPolicyConfig, StateContext
from policies.policy import RobotSpec
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from tests.reach_env import CorrectedReach, ReachEnv
from vla_rl.algorithms.group_sampling import AdaptiveGroups, balanced_choice
from vla_rl.algorithms.grpo import GRPO, GRPOConfig, with_group_advantages
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.starts import TrainingStarts, UCBConfig

CONFIG = GRPOConfig(groups=4, group_size=4, max_rounds=20)


def learner(config: GRPOConfig = CONFIG, *, max_steps: int = 40) -> GRPO:
    env = ReachEnv(num_envs=16, max_steps=max_steps)
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=4), RobotSpec.of(env.spec))
    return GRPO(config, policy, env, seed=0)


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
    config = GRPOConfig(gamma=1.0, scale_by_std=False)
    batch = with_group_advantages(config, rollout, 2).valid_chunks()
    # returns 0, 2 | 4, 5
    expected = {0: -1.0, 1: 1.0, 2: -0.5, 3: 0.5}
    assert isinstance(batch.inputs, StateContext) and batch.advantage is not None and batch.weight is not None
    numbers = batch.inputs.state[:, 0].int().tolist()
    assert numbers == [0, 1, 2, 3, 0, 1, 2]
    assert batch.advantage.tolist() == [expected[number] for number in numbers]
    assert batch.weight.tolist() == [0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5]


def test_returns_are_discounted_from_the_start() -> None:
    rollout = experience([[0.0, 0.0], [1.0, 2.0]], valid=[[True, True], [True, True]])
    batch = with_group_advantages(GRPOConfig(gamma=0.5, scale_by_std=False), rollout, 2).valid_chunks()
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


def test_a_start_gets_groups_until_its_outcomes_are_mixed() -> None:
    """Pools of two starts in groups of two: a success each for the batch, advantages relative to the whole pool."""
    config = GRPOConfig(scale_by_std=False)
    sampling = AdaptiveGroups(partial(with_group_advantages, config), size=2, rounds=3)
    stream = TrainingStarts(seed=0, num_tasks=1, failure_weight=0.0)
    starts = sampling.starts(2, stream)

    def outcomes(rewards: list[float]) -> list[Experience]:
        rollout = experience([rewards], valid=[[True] * 4])
        return sampling.add(rollout, torch.tensor(rewards).reshape(2, 2).bool(), 9)

    (mixed,) = outcomes([0.0, 0.0, 1.0, 0.0])  # start 1 is complete
    assert mixed.advantage is not None and mixed.advantage.tolist() == [[0.5, -0.5]]
    again = sampling.starts(2, stream)
    assert again[0] == starts[0] and again[1] not in starts and stream.next_index == 3
    assert outcomes([0.0, 0.0, 1.0, 1.0]) == []
    (rare,) = outcomes(
        [1.0, 0.0, 1.0, 1.0]
    )  # start 0: one success in six episodes, its first failure is learned from as well
    assert isinstance(rare.inputs, StateContext) and rare.inputs.state.flatten().tolist() == [0, 0]
    assert rare.advantage is not None
    torch.testing.assert_close(rare.advantage, torch.tensor([[-1 / 6, 5 / 6]]))
    sampling.starts(2, stream)
    assert (
        outcomes([1.0, 1.0, 0.0, 0.0]) == [] and sampling.rest(9) == []
    )  # start 2 never failed: given up, with nothing in it


def test_the_choice_is_balanced_where_there_are_as_many() -> None:
    wins = torch.tensor([1, 0, 0, 1, 1, 0], dtype=torch.bool)
    assert balanced_choice(wins, 4).tolist() == [0, 1, 2, 3]
    assert balanced_choice(torch.tensor([0, 0, 1, 0], dtype=torch.bool), 3).tolist() == [0, 1, 2]
    assert balanced_choice(torch.tensor([1, 1, 0, 1], dtype=torch.bool), 4).tolist() == [0, 1, 2, 3]


def test_adaptive_groups_and_drawn_tasks_of_an_iteration() -> None:
    grpo = learner(replace(CONFIG, groups=1, start_rounds=3, task_ucb=UCBConfig()))
    groups = grpo._collect_groups()
    assert groups.informative == 1
    for rollout in groups.rollouts:
        success = rollout.success.any(0)
        assert len(success) == 4 and 0 < success.sum() < 4
    ucb = grpo.collector.starts.ucb
    assert ucb is not None and ucb.episodes.sum() == 4 * groups.drawn
    assert grpo.iterate()["policy_steps"] > 0
    again = learner(grpo.config)
    again.collector.load_state_dict(grpo.collector.state_dict())
    assert again.collector.starts.take(8) == grpo.collector.starts.take(8)


def test_what_a_start_with_more_groups_counts_by_cannot_be_set() -> None:
    with pytest.raises(ValueError, match=r"min_success \(0\.3\).*need start_rounds 1, got 2"):
        GRPOConfig(start_rounds=2, min_success=0.3)
    with pytest.raises(ValueError, match=r"max_success \(1\.0\) need start_rounds 1"):
        GRPOConfig(start_rounds=2, max_success=1.0)


@pytest.mark.parametrize(
    ("start_rounds", "missing"),
    [(1, r"no group with success between 0\.1 and 0\.9"), (3, "no start whose episodes had both outcomes")],
)
def test_a_batch_without_success_says_what_was_missing(start_rounds: int, missing: str) -> None:
    grpo = learner(replace(CONFIG, max_rounds=2, start_rounds=start_rounds), max_steps=1)
    with pytest.raises(UserError, match=rf"GRPO found {missing} among 8 groups \(mean success 0\.00\)"):
        grpo.iterate()


def test_chunks_that_a_person_acted_are_not_learned_from() -> None:
    """A person succeeds in one episode of each group and fails in the other: the policy did neither."""
    config, moved = replace(CONFIG, group_size=2, max_rounds=1), []
    for person in ([1, -1, 1, -1], [1, -1, 0, 0]):
        env = CorrectedReach(person=person)
        torch.manual_seed(0)
        policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=4), RobotSpec.of(env.spec))
        grpo = GRPO(replace(config, min_success=0.0, max_success=1.0), policy, env, seed=0)
        before = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
        metrics = grpo.iterate()
        after = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
        moved.append((metrics["policy_steps"] > 0, not torch.equal(before, after)))
        assert metrics["success"] > 0
    assert moved[0] == (False, False)
    assert moved[1][0]  # by the episodes that it acted


def test_tasks_are_drawn_in_one_way() -> None:
    with pytest.raises(ValueError, match=r"failure_weight must be 0, got 0\.5"):
        GRPOConfig(task_ucb=UCBConfig(), failure_weight=0.5)


def test_a_partial_section_keeps_the_defaults_of_grpo(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("algorithm: {name: grpo, update: {learning_rate: 0.5}}\n")
    update = load_config(Experiment, path).algorithm.update
    assert (update.learning_rate, update.clip_high, update.normalize_advantage) == (0.5, 0.28, False)


def test_the_stream_of_minibatches_is_that_of_the_seed() -> None:
    expected = torch.Generator().manual_seed(spawn_seed(0, "minibatches")).get_state()
    assert torch.equal(learner().update.generator.get_state(), expected)
