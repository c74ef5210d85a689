"""Group-relative policy optimization: the group that shares a start is its own baseline, no critic.

Shao et al. 2024 (DeepSeekMath, Sec. 4.1) with the refilled dynamic sampling of SimpleVLA-RL (Li et al. 2025): groups
that all succeed or all fail carry no gradient, so more are drawn until the batch is full of informative ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from vla_rl.algorithms.advantages import group_advantage
from vla_rl.algorithms.update import Batch, Metrics, PolicyUpdate, UpdateConfig
from vla_rl.rollouts.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """``groups`` informative groups of ``group_size`` episodes make a batch.

    ``max_rounds`` bounds how often a batch is refilled; a batch that is still short is used as it is, an empty one
    is an error. ``episode_weight``: every episode counts alike whatever its length; else every chunk does.
    """

    name: Literal["grpo"] = "grpo"
    iterations: int = 60
    groups: int = 16
    group_size: int = 8
    min_success: float = 0.1
    max_success: float = 0.9
    max_rounds: int = 6
    scale_by_std: bool = True
    episode_weight: bool = True
    gamma: float = 1.0
    failure_weight: float = 0.0
    update: UpdateConfig = field(
        default_factory=lambda: UpdateConfig(clip_low=0.2, clip_high=0.28, normalize_advantage=False)
    )


def grpo_batch(rollout: Rollout, *, group_size: int, scale_by_std: bool, episode_weight: bool) -> Batch:
    """``rollout`` [T, N] holds one episode per row; rows ``[g * G, (g + 1) * G)`` are group g.

    An episode's return is its summed reward over valid chunks; all its chunks share its advantage.
    """
    valid = rollout.valid
    returns = torch.where(valid, rollout.reward, 0.0).sum(0)
    advantage = group_advantage(returns.reshape(-1, group_size), scale_by_std=scale_by_std).reshape(-1)
    length = valid.sum(0).clamp(min=1).float()
    weight = 1 / length if episode_weight else torch.ones_like(length)
    chunks = rollout[valid]
    return Batch(
        inputs=chunks.inputs,
        path=chunks.path,
        log_prob=chunks.log_prob,
        num_executed=chunks.num_executed,
        advantage=advantage.expand_as(rollout.reward)[valid],
        weight=weight.expand_as(rollout.reward)[valid],
    )


class GRPO:
    def __init__(self, config: GRPOConfig, update: PolicyUpdate) -> None:
        self.config, self._update = config, update

    def update(self, rollouts: Sequence[Rollout]) -> Metrics:
        """``rollouts`` hold whole informative groups, as ``collect_groups`` returns them."""
        config = self.config
        batch = Batch.cat(
            [
                grpo_batch(
                    rollout,
                    group_size=config.group_size,
                    scale_by_std=config.scale_by_std,
                    episode_weight=config.episode_weight,
                )
                for rollout in rollouts
            ]
        )
        return self._update.run(dataclasses.replace(batch, weight=batch.weight / batch.weight.mean()))
