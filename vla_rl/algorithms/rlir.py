"""Reinforcement of the world model itself: frames from which the given action can be read back earn reward (RLIR).

Groups of frames imagined for one question are compared, as GRPO compares episodes, and the clipped surrogate of
``algorithms.update`` moves the world model as it moves a policy. The arm alone reveals the action, so the reward also
counts what the recorded frame shows where things moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from policies.denoising.kernels import FlowCPSConfig, build_kernel
from policies.denoising.objectives import FlowMatching, FlowMatchingConfig
from vla_rl.algorithms.advantages import group_advantage
from vla_rl.algorithms.update import Batch, Metrics, PolicyUpdate, UpdateConfig
from world_models.data.clips import ClipSampler
from world_models.models.flow_model import FlowWorld
from world_models.training.fit import FitConfig, first_moment, motion_weight
from world_models.training.inverse_dynamics import InverseDynamics, gate, latents
from world_models.training.world_policy import Question, WorldPolicy
from world_models.world_model import WorldModelError


@dataclass(frozen=True, kw_only=True)
class RLIRConfig:
    """``object_weight``: of the error against the recorded frame where it moved, beside the inverse error."""

    questions: int = 8
    group_size: int = 8
    object_weight: float = 1.0
    kernel: FlowCPSConfig = field(default_factory=lambda: FlowCPSConfig(steps=2, noise_level=0.5))
    update: UpdateConfig = field(
        default_factory=lambda: UpdateConfig(
            learning_rate=1e-5, epochs=1, minibatch=32, micro_batch=16, reduction="chunk_mean", clip_low=1e-3,
            clip_high=1e-3, normalize_advantage=False, target_kl=None,
        )
    )  # fmt: skip


class RLIR:
    """Raises WorldModelError at once if the inverse model does not pass its gate on ``held_out``."""

    def __init__(
        self,
        world: FlowWorld,
        inverse: InverseDynamics,
        clips: ClipSampler,
        held_out: ClipSampler,
        config: RLIRConfig,
        *,
        seed: int,
    ) -> None:
        verdict = gate(inverse, held_out, seed=seed)
        if not verdict["passed"]:
            raise WorldModelError(
                f"the inverse dynamics model fails its gate, errors {verdict['errors']}: its reward could be had "
                "without following actions; train it longer or on more episodes"
            )
        self.config, self.clips, self.inverse = config, clips, inverse
        self.policy = WorldPolicy(world, build_kernel(config.kernel, FlowMatching(FlowMatchingConfig())))
        self.update = PolicyUpdate(
            self.policy,  # type: ignore[arg-type]  # it answers all that an update without a critic asks
            config=config.update,
            reference=None,
            critic=None,
            critic_config=None,
            generator=torch.Generator().manual_seed(seed),
        )
        self._rng, self._generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)

    def iterate(self) -> Metrics:
        """Ask, compare, move."""
        config, world = self.config, self.policy.world
        clip = self.clips.draw(self._rng, config.questions, 1)
        clip = clip.map(lambda tensor: tensor.repeat_interleave(config.group_size, dim=0))
        question = Question(moment=first_moment(world, clip), action=clip.action[:, 0], length=clip.length[:, 0])
        sample = self.policy.sample(question, self._generator)
        frames = sample.action.view(-1, *world.latent_shape)
        reward = self._reward(frames, question, world.encode(clip.frames[:, 1]))
        groups = reward.view(config.questions, config.group_size)
        batch = Batch(
            inputs=question,
            path=sample.path,
            log_prob=sample.log_prob,
            num_executed=torch.full((len(reward),), sample.action.shape[1]),
            advantage=group_advantage(groups, scale_by_std=True).flatten(),
            weight=torch.ones(len(reward)),
        )
        metrics = self.update.run(batch)
        return metrics | {"reward": reward.mean().item(), "reward_spread": groups.std(1).mean().item()}

    @torch.no_grad()
    def _reward(self, frames: Tensor, question: Question, truth: Tensor) -> Float[Tensor, " B"]:
        moment = question.moment
        weight = motion_weight(truth, moment.current, moment, FitConfig()) - 1
        missed = (weight * (frames - truth).square()).flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1)
        before, after = (latents(self.policy.world.decode(look)) for look in (moment.current, frames))
        error = self.inverse.error(before, after, question.action, question.length)
        return -error - self.config.object_weight * missed.sqrt()
