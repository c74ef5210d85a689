"""A world model seen as a policy whose action is the next frame.

Denoising policies and world models walk from noise to sample by the same kernels, so what improves one improves the
other: sampled with a stochastic kernel a world model has log-probs, and the clipped surrogate that trains policies
trains it on a reward for frames (vla_rl/algorithms/rlir.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from policies.denoising.denoise import Predict, denoise, path_transition
from policies.denoising.kernels import Kernel, Prediction
from policies.policy import ActionSample, DenoisingTrace
from sims.tensor_dataclass import TensorDataclass
from world_models.models.flow_model import FlowWorld
from world_models.world_model import Moment


@dataclass(frozen=True, kw_only=True)
class Question(TensorDataclass):
    """What happens after ``moment`` if the first ``length`` of ``action`` are taken?"""

    moment: Moment
    action: Float[Tensor, "*B H A"]
    length: Int[Tensor, "*B"]


class WorldPolicy:
    """What ``vla_rl.algorithms.update.PolicyUpdate`` asks of a policy; frames [B, cameras, pixels] are its actions."""

    def __init__(self, world: FlowWorld, kernel: Kernel) -> None:
        self.world, self.kernel = world, kernel

    def trainable_parameters(self, *, encoder: bool) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.world.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def sample(self, context: Question, generator: torch.Generator) -> ActionSample:
        noise, limit = self.world.noise(len(context.action), generator).flatten(2), self.world.codec.limit
        path, log_prob = denoise(self._predict(context), self.kernel, noise, generator)
        return ActionSample(action=path.states[:, -1].clamp(-limit, limit), path=path, log_prob=log_prob)

    def log_prob(self, context: Question, path: DenoisingTrace) -> Float[Tensor, "B S cameras pixels"]:
        transition, x_next = path_transition(self._predict(context), self.kernel, path)
        return transition.log_prob(x_next)

    def _predict(self, context: Question) -> Predict:
        shape = self.world.latent_shape

        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            batch, steps = x_t.shape[:2]
            asked = context.map(lambda tensor: tensor.repeat_interleave(steps, dim=0))
            noisy, times = x_t.reshape(batch * steps, *shape), t.expand(batch, steps).reshape(-1)
            out = self.world.denoised(self.world.prefill(asked.moment), asked.action, asked.length, noisy, times)
            return Prediction(target=(x_t - out.latent.reshape(x_t.shape)) / t[..., None, None])

        return predict
