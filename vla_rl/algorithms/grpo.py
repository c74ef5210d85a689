"""Group-relative policy optimization: the mean return of a group that shares a start is the baseline, no critic.

Shao et al. 2024 (DeepSeekMath, Sec. 4.1) with the refilled dynamic sampling of SimpleVLA-RL (Li et al. 2025): groups
that all succeed or all fail have no gradient, so more are drawn until the batch is full of informative ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from policies.policy import Policy
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.numbers.ranges import Interval, PositiveFloat, PositiveInt, Share
from sims.numbers.seeding import spawn_seed
from sims.subproc.termination import interruptible
from sims.vector_env import VectorEnv
from vla_rl.algorithms.advantages import episode_return, group_advantage
from vla_rl.algorithms.algorithm import AlgorithmConfig, Metrics
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.group_sampling import AdaptiveGroups, FixedGroups, GroupSampling
from vla_rl.algorithms.on_policy import OnPolicy, ages
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.rollouts.collector import Collector, chunks_of_longest
from vla_rl.rollouts.experience import Experience, RewardCounts, reward_errors
from vla_rl.rollouts.sharded import MakeRollouts, PartialRollouts
from vla_rl.rollouts.starts import TaskUCB, UCBConfig


@dataclass(frozen=True, kw_only=True)
class GRPOUpdateConfig(UpdateConfig):
    """``clip_high``: of DAPO (Yu et al. 2025, Sec. 3.1). Advantages are already relative to their group."""

    clip_high: PositiveFloat = 0.28
    normalize_advantage: bool = False


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(AlgorithmConfig):
    """``groups`` informative groups of ``group_size`` episodes make a batch.

    ``max_rounds`` bounds how often a batch is refilled; a batch that is still short is used as it is, an empty one
    is an error. ``start_rounds``: 1, a start has one group, which is dropped where its mean success is outside
    [``min_success``, ``max_success``]; more: a start gets up to so many groups, until it has both outcomes in balance
    (Reinforce-Ada, group_sampling.py). ``task_ucb``: tasks are drawn by what is left to learn (DUMP,
    rollouts/starts.py); null: in turn, or more of those that fail. ``complete_share``: below 1 a rollout ends as soon
    as that share of its groups is complete; the others go on in the next one, by newer weights, and updates are
    decoupled (APRIL). ``episode_weight``: every episode has the same weight whatever its length; else every chunk has.
    """

    name: Literal["grpo"] = "grpo"
    gamma: Annotated[float, Interval(gt=0, le=1)] = 1.0
    groups: PositiveInt = 16
    group_size: Annotated[int, Interval(ge=2, le=10**9)] = 8
    min_success: Share = 0.1
    max_success: Share = 0.9
    max_rounds: PositiveInt = 6
    start_rounds: PositiveInt = 1
    task_ucb: UCBConfig | None = None
    complete_share: Annotated[float, Interval(gt=0, le=1)] = 1.0
    scale_by_std: bool = True
    episode_weight: bool = True
    update: GRPOUpdateConfig = field(default_factory=GRPOUpdateConfig)

    def __post_init__(self) -> None:
        if self.staleness:
            raise ValueError(
                f"algorithm grpo needs staleness 0, got {self.staleness}; algorithms ppo and off_policy can have more"
            )
        if self.task_ucb is not None and self.failure_weight:
            raise ValueError(f"task_ucb draws the tasks: failure_weight must be 0, got {self.failure_weight}")
        if self.complete_share < 1 and self.start_rounds > 1:
            raise ValueError(f"complete_share below 1 needs start_rounds 1, got {self.start_rounds}")
        defaults = (GRPOConfig.min_success, GRPOConfig.max_success)
        if self.start_rounds > 1 and (self.min_success, self.max_success) != defaults:
            raise ValueError(
                f"min_success ({self.min_success}) and max_success ({self.max_success}) need start_rounds 1, got "
                f"{self.start_rounds}: with more, a start counts where it has both outcomes; leave them out"
            )
        if self.min_success > self.max_success:
            raise ValueError(f"min_success ({self.min_success}) must not be above max_success ({self.max_success})")

    def check_num_envs(self, num_envs: int, setting: str) -> None:
        super().check_num_envs(num_envs, setting)
        if num_envs // self.rollout_shards % self.group_size:
            shards = f" times algorithm.rollout_shards ({self.rollout_shards})" if self.rollout_shards > 1 else ""
            raise ValueError(
                f"{setting} ({num_envs}) must be a multiple of algorithm.group_size ({self.group_size}){shards}: "
                "the episodes of a group run side by side"
            )

    def kept_episodes(self, num_envs: int) -> int:
        """Most at a time: all groups but one, and a round of every environment, or as many as a start can have."""
        return (self.groups - 1) * self.group_size + self.start_rounds * num_envs


@dataclass(frozen=True, kw_only=True)
class Groups:
    """``rollouts``: [T, N] of informative groups only, ``group_size`` neighbors each, with advantages; the numbers
    count all drawn. ``success``: of the first group of each start."""

    rollouts: list[Experience]
    drawn: int
    informative: int
    success: float
    control_steps: int
    reward_counts: list[RewardCounts | None]


class GRPO(OnPolicy):
    """One iteration: episodes in groups that share a start, group advantages, a clipped update."""

    def __init__(
        self,
        config: GRPOConfig,
        policy: Policy,
        env: VectorEnv,
        *,
        seed: int,
        make_rollouts: MakeRollouts = Collector,
    ) -> None:
        self.config = config
        update = ClippedUpdate(config.update, policy, seed=spawn_seed(seed, "minibatches"))
        collector = make_rollouts(
            env,
            policy,
            critic=None,
            gamma=config.gamma,
            failure_weight=config.failure_weight,
            seed=seed,
            kept=config.kept_episodes(env.spec.num_envs) * chunks_of_longest(env.spec, policy.spec.action_horizon),
        )
        if config.complete_share < 1 and not isinstance(collector, PartialRollouts):
            raise UserError(
                "algorithm.complete_share below 1 needs rollouts in the run's own process: leave the section cluster "
                "out, or set cluster.collectors 0"
            )
        if config.task_ucb is not None:
            collector.starts.ucb = TaskUCB(config.task_ucb, len(env.spec.tasks))
        super().__init__(policy, collector, update)

    def iterate(self) -> Metrics:
        config, collector = self.config, self.collector
        with interruptible():
            groups = self._collect_groups()
        batch = Experience.cat([rollout.own_chunks() for rollout in groups.rollouts])
        groups.rollouts.clear()  # the update needs the memory
        assert batch.weight is not None
        with collector.timer.section("learn"):
            metrics = self.update.run(
                dataclasses.replace(batch, weight=batch.weight / batch.weight.mean()),
                version=self.iteration if config.complete_share < 1 else None,
            )
        self.iteration += 1
        self.publish()
        if config.complete_share < 1 and len(batch):
            metrics |= ages(self.iteration - 1 - batch.policy_version)
        return {
            **metrics,
            "success": groups.success,
            "control_steps": float(groups.control_steps),
            "groups_drawn": float(groups.drawn),
            "groups_informative": float(groups.informative),
            **reward_errors(groups.reward_counts),
            **collector.timer.take(),
        }

    def _collect_groups(self) -> Groups:
        """Rounds of num_envs / group_size groups until ``config.groups`` of them are informative.

        Raises UserError when ``max_rounds`` rounds held none: the policy always fails or always succeeds.
        """
        config, size = self.config, self.config.group_size
        per_round, starts = self.collector.num_envs // size, self.collector.starts
        sampling, kept = self._sampling(), list[Experience]()
        informative = drawn = steps = 0
        successes: list[Bool[Tensor, "groups size"]] = []
        counts: list[RewardCounts | None] = []
        while informative < config.groups and drawn < config.max_rounds * per_round:
            before = starts.next_index
            rollout = self._round(sampling, per_round)
            self._learn_tasks(rollout)
            with crossing("outcomes"):
                success = rollout.success.any(0).reshape(-1, size).cpu()
            # Of groups that were cut off before, each is its start's first, too.
            if fresh := len(success) if config.start_rounds == 1 else starts.next_index - before:
                successes.append(success[-fresh:])
            kept += sampling.add(rollout, success, config.groups - informative)
            informative = sum(part.valid.shape[1] for part in kept) // size
            drawn += len(success)
            steps += rollout.control_steps()
            counts.append(rollout.reward_counts())
        kept += sampling.rest(config.groups - informative)
        mean_success = torch.cat(successes).float().mean().item()
        if not kept:
            raise UserError(
                f"GRPO found no {sampling.wanted} among {drawn} groups (mean success {mean_success:.2f}). Start from a "
                "policy that sometimes succeeds (more demonstrations or BC steps), or take harder tasks if it always "
                "does."
            )
        informative = sum(part.valid.shape[1] for part in kept) // size
        return Groups(
            rollouts=kept, drawn=drawn, informative=informative, success=mean_success, control_steps=steps,
            reward_counts=counts,
        )  # fmt: skip

    def _round(self, sampling: GroupSampling, groups: int) -> Experience:
        """One rollout of ``groups`` groups; of those of them that are complete, where it does not wait for all."""
        config, collector, size = self.config, self.collector, self.config.group_size
        if config.complete_share == 1:
            shared = [start for start in sampling.starts(groups, collector.starts) for _ in range(size)]
            return collector.episodes(shared)
        assert isinstance(collector, PartialRollouts)
        take = partial(sampling.starts, stream=collector.starts)
        return collector.complete_groups(take, size=size, share=config.complete_share)

    def _sampling(self) -> GroupSampling:
        config = self.config
        advantages = partial(with_group_advantages, config)
        if config.start_rounds == 1:
            return FixedGroups(advantages, low=config.min_success, high=config.max_success)
        return AdaptiveGroups(advantages, size=config.group_size, rounds=config.start_rounds)

    def _learn_tasks(self, rollout: Experience) -> None:
        """How much is left to learn of each task, from all groups of a round."""
        if (ucb := self.collector.starts.ucb) is None:
            return
        groups = with_group_advantages(self.config, rollout, self.config.group_size)
        assert groups.advantage is not None
        with crossing("outcomes"):
            ucb.learn(rollout.task[0].cpu().numpy(), groups.advantage[0].cpu().numpy())


def with_group_advantages(config: GRPOConfig, rollout: Experience, group_size: int) -> Experience:
    """Episodes ``rollout`` [T, N] with advantages and weights.

    Each environment holds one episode; environments ``[g * G, (g + 1) * G)`` are group g of G = ``group_size``. The
    return is that of the whole episode, discounted per control step; all chunks of an episode share its advantage.
    """
    valid = rollout.valid
    returns = episode_return(rollout.reward, rollout.num_executed, valid, gamma=config.gamma)
    groups = returns.reshape(-1, group_size)
    advantage = group_advantage(groups, scale_by_std=config.scale_by_std).reshape(-1)
    length = valid.sum(0).clamp(min=1).float()
    weight = 1 / length if config.episode_weight else torch.ones_like(length)
    return dataclasses.replace(
        rollout, advantage=advantage.expand_as(rollout.reward), weight=weight.expand_as(rollout.reward)
    )
