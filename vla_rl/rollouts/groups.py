"""Groups of episodes that share a start, drawn until a batch is full of informative ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sims.errors import UserError
from vla_rl.algorithms.advantages import informative_groups
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.rollout import Rollout
from vla_rl.rollouts.starts import TrainingStarts


@dataclass(frozen=True, kw_only=True)
class Groups:
    """``rollouts`` hold only informative groups; the numbers count everything that was drawn."""

    rollouts: Sequence[Rollout]
    drawn: int
    informative: int
    success: float
    control_steps: int


def collect_groups(collector: Collector, starts: TrainingStarts, config: GRPOConfig) -> Groups:
    """Rounds of num_envs / group_size groups until ``config.groups`` of them are informative.

    Raises UserError when ``max_rounds`` rounds held none: the policy always fails or always succeeds.
    """
    size = config.group_size
    per_round = collector.env.spec.num_envs // size
    kept: list[Rollout] = []
    informative = drawn = steps = 0
    successes: list[float] = []
    while informative < config.groups and drawn < config.max_rounds * per_round:
        shared = [start for start in starts.take(per_round) for _ in range(size)]
        rollout = collector.episodes(shared)
        starts.learn(rollout)
        success = rollout.success.any(0).reshape(per_round, size)
        good = informative_groups(success, low=config.min_success, high=config.max_success).nonzero().flatten()
        good = good[: config.groups - informative]
        if len(good):
            kept.append(rollout.columns((good[:, None] * size + torch.arange(size)).flatten()))
        informative += len(good)
        drawn += per_round
        steps += rollout.control_steps()
        successes.append(success.float().mean().item())
    if not kept:
        raise UserError(
            f"GRPO found no group with success between {config.min_success} and {config.max_success} among {drawn} "
            f"groups (mean success {sum(successes) / len(successes):.2f}). Start from a policy that sometimes "
            "succeeds (more demonstrations or BC steps), or take harder tasks if it always does."
        )
    return Groups(
        rollouts=kept,
        drawn=drawn,
        informative=informative,
        success=sum(successes) / len(successes),
        control_steps=steps,
    )
