"""Reinforcement learning of the world model itself, rewarded by inverse dynamics (RLIR).

Groups of frames sampled for one query are compared as GRPO compares episodes, and ``ClippedUpdate`` trains the world
model as it trains a policy. Frames from which the given action can be recovered are rewarded; since the arm alone
reveals the action, the error against the recorded frame where it moved counts too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from policies.denoising.kernels import FlowCPSConfig, build_kernel
from policies.denoising.objectives import FlowMatching, FlowMatchingConfig
from policies.device import make_generator
from policies.policy import ActionSample
from sims.devices.crossing import crossing, read_numbers
from sims.numbers.ranges import Interval, NonNegativeFloat, PositiveInt
from sims.numbers.seeding import spawn_seed
from vla_rl.algorithms.advantages import group_advantage
from vla_rl.algorithms.algorithm import Metrics
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.log_ratio import Reduction
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.rollouts.experience import Experience
from world_models.data.clip import first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.models.flow_model import FlowWorldModel
from world_models.models.inverse_dynamics import InverseDynamics, to_pixels
from world_models.training.dynamics import DynamicsFitConfig, motion_weight
from world_models.training.inverse_dynamics import gate
from world_models.training.world_policy import PredictionQuery, WorldPolicy
from world_models.world_model import WorldModelError


@dataclass(frozen=True, kw_only=True)
class RLIRUpdateConfig(UpdateConfig):
    """Small steps: a clip of 0.001 on the mean over all pixels binds like one of several on their sum."""

    learning_rate: float = 1e-5
    epochs: int = 1
    minibatch: int = 32
    micro_batch: int = 16
    reduction: Reduction = "chunk_mean"
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    normalize_advantage: bool = False
    target_kl: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("average", "reference_weight"):
            value, default = getattr(self, name), getattr(RLIRUpdateConfig, name)
            if value != default:
                raise ValueError(
                    f"update.{name} copies a policy, and this trains a world model: leave it at {default}, got {value}"
                )


@dataclass(frozen=True, kw_only=True)
class RLIRConfig:
    """``queries`` per iteration, each sampled ``group_size`` times.

    ``object_weight``: of the error against the recorded frame where it moved, beside the inverse error.
    """

    queries: PositiveInt = 8
    group_size: Annotated[int, Interval(ge=2, le=10**9)] = 8
    object_weight: NonNegativeFloat = 1.0
    kernel: FlowCPSConfig = field(default_factory=lambda: FlowCPSConfig(steps=2, noise_level=0.5))
    update: RLIRUpdateConfig = field(default_factory=RLIRUpdateConfig)


class RLIR:
    """Raises WorldModelError at once if the inverse dynamics model does not pass its gate on ``held_out``."""

    def __init__(
        self,
        model: FlowWorldModel,
        inverse: InverseDynamics,
        clips: ClipSampler,
        held_out: ClipSampler,
        config: RLIRConfig,
        *,
        seed: int,
    ) -> None:
        result = gate(inverse, held_out, seed=seed)
        if not result["passed"]:
            raise WorldModelError(
                f"the inverse dynamics model fails its gate, errors {result['errors']}: its reward could be had "
                "without following actions; train it longer or on more episodes"
            )
        self.config, self.clips, self.inverse = config, clips, inverse
        self.policy = WorldPolicy(model, build_kernel(config.kernel, FlowMatching(FlowMatchingConfig())))
        self.update = ClippedUpdate(config.update, self.policy, seed=spawn_seed(seed, "minibatches"))
        self._rng = np.random.default_rng(spawn_seed(seed, "clips"))
        self._generator = make_generator(model.device, spawn_seed(seed, "exploration"))

    def iterate(self) -> Metrics:
        """Sample groups of frames for recorded queries, compare them within their group, update the world model."""
        config, model = self.config, self.policy.model
        with crossing("batches"):
            clip = self.clips.draw(self._rng, config.queries, 1).to(model.device)
        clip = clip.map(lambda tensor: tensor.repeat_interleave(config.group_size, dim=0))
        query = PredictionQuery(history=first_history(model, clip), action=clip.action[:, 0], length=clip.length[:, 0])
        sample = self.policy.sample(query, self._generator)
        frames = sample.action.view(-1, *model.latent_shape)
        reward = self._reward(frames, query, model.encode(clip.frames[:, 1]))
        groups = reward.view(config.queries, config.group_size)
        advantage = group_advantage(groups, scale_by_std=True).flatten()
        metrics = self.update.run(_experience(query, sample, reward, advantage))
        return metrics | read_numbers({"reward": reward.mean(), "reward_spread": groups.std(1).mean()})

    @torch.no_grad()
    def _reward(
        self,
        frames: Float[Tensor, "B cameras channels height width"],
        query: PredictionQuery,
        truth: Float[Tensor, "B cameras channels height width"],
    ) -> Float[Tensor, " B"]:
        history = query.history
        weight = motion_weight(truth, history.current, history, DynamicsFitConfig()) - 1
        squared = (weight * (frames - truth).square()).flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1)
        before, after = (to_pixels(self.policy.model.decode(latent)) for latent in (history.current, frames))
        error = self.inverse.error(before, after, query.action, query.length)
        return -error - self.config.object_weight * squared.sqrt()


def _experience(
    query: PredictionQuery, sample: ActionSample, reward: Float[Tensor, " B"], advantage: Float[Tensor, " B"]
) -> Experience:
    """Every sample as a finished episode of one chunk; all of its elements were executed."""
    zero, ended = torch.zeros_like(reward), torch.ones_like(reward, dtype=torch.bool)
    index = torch.zeros_like(reward, dtype=torch.int64)
    return Experience(
        inputs=query,
        trace=sample.trace,
        log_prob=sample.log_prob,
        value=zero,
        next_value=zero,
        reward=reward,
        num_executed=torch.full_like(index, sample.action.shape[1]),
        terminated=ended,
        truncated=~ended,
        success=~ended,
        valid=ended,
        task=index,
        policy_version=index,
        actor=index,
        advantage=advantage,
        weight=torch.ones_like(reward),
    )
