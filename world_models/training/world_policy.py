"""A world model in the role of a policy whose action is the next frame.

Denoising policies and world models are sampled by the same kernels. With a stochastic kernel a world model's samples
have log-probs, and the clipped surrogate that trains policies trains it on a reward for frames
(vla_rl/algorithms/rlir.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from policies.denoising.denoise import DenoisingTrace, Predict, counted_transitions, denoise, trace_transition
from policies.denoising.kernels import Kernel, Prediction
from policies.device import Precision
from policies.policy import ActionSample
from sims.tensor_dataclass import TensorDataclass
from world_models.models.flow_model import FlowWorldModel
from world_models.world_model import History


@dataclass(frozen=True, kw_only=True)
class PredictionQuery(TensorDataclass):
    """What follows ``history`` if the first ``length`` actions of ``action`` are executed?"""

    history: History
    action: Float[Tensor, "*B H A"]
    length: Int[Tensor, "*B"]


class WorldPolicy:
    """The methods of ``policies.policy.Policy`` that an update without critic needs.

    Its context is a PredictionQuery, its actions are latents [B, cameras, pixels].
    """

    def __init__(self, model: FlowWorldModel, kernel: Kernel) -> None:
        self.model, self.kernel = model, kernel

    @property
    def device(self) -> torch.device:
        return self.model.device

    def scored_in(self, record: PredictionQuery) -> Precision:
        return self.model.config.precision

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        return {"dynamics": [parameter for parameter in self.model.parameters() if parameter.requires_grad]}

    def restore(self, record: PredictionQuery) -> PredictionQuery:
        """Queries are their own contexts."""
        return record

    @torch.no_grad()
    def sample(self, context: PredictionQuery, generator: torch.Generator) -> ActionSample:
        noise, limit = self.model.noise(len(context.action), generator).flatten(2), self.model.codec.limit
        trace, log_prob = denoise(self._predict(context), self.kernel, noise, generator)
        return ActionSample(action=trace.states[:, -1].clamp(-limit, limit), trace=trace, log_prob=log_prob)

    def log_prob(self, context: PredictionQuery, trace: DenoisingTrace) -> Float[Tensor, "B S cameras pixels"]:
        transition, x_next = trace_transition(self._predict(context), self.kernel, trace)
        return transition.log_prob(x_next)

    def counted(self, trace: DenoisingTrace, num_executed: Int[Tensor, " B"]) -> Bool[Tensor, "B S cameras"]:
        return counted_transitions(self.kernel, trace, num_executed)

    @property
    def log_prob_steps(self) -> int:
        return self.kernel.scored_steps

    @property
    def learns_spread(self) -> bool:
        """It has no noise head."""
        return False

    def _predict(self, query: PredictionQuery) -> Predict:
        shape = self.model.latent_shape

        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            batch, steps = x_t.shape[:2]
            repeated = query.map(lambda tensor: tensor.repeat_interleave(steps, dim=0))
            noisy, times = x_t.reshape(batch * steps, *shape), t.expand(batch, steps).reshape(-1)
            prefill = self.model.prefill(repeated.history)
            out = self.model.estimate(prefill, repeated.action, repeated.length, noisy, times)
            return Prediction(target=(x_t - out.latent.reshape(x_t.shape)) / t[..., None, None])

        return predict
