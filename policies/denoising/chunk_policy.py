"""What policies that denoise an action chunk have in common: exploring, scoring and deploying by one prediction."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from policies.denoising.denoise import (
    DenoisingTrace,
    Predict,
    counted_transitions,
    denoise,
    integrate,
    no_prediction,
    trace_transition,
)
from policies.denoising.kernels import Kernel
from policies.policy import ActionSample, Policy, keep_committed
from sims.tensor_dataclass import TensorDataclass

C = TypeVar("C", bound=TensorDataclass)


class DenoisedChunks(Policy[C, DenoisingTrace]):
    """Subclasses predict, and turn what is denoised into actions.

    ``explore_kernel`` samples and is trained, ``act_kernel`` deploys. ``initial_noise``: scale of the noise that a
    chunk is denoised from.
    """

    explore_kernel: Kernel
    act_kernel: Kernel
    initial_noise: float = 1.0

    @abstractmethod
    def predict(self, context: C) -> Predict:
        """The trained network bound to this context."""

    def frozen_predict(self, context: C) -> Predict | None:
        """The network that takes the steps before the first trained one; None: the trained one (DPPO)."""
        return None

    def predict_noise(self, context: C) -> Predict:
        """As ``predict``, of which only the spread of the transitions counts."""
        return self.predict(context) if self.explore_kernel.learned_noise else no_prediction

    @abstractmethod
    def unnormalized(self, x_0: Float[Tensor, "B noise_length noise_width"]) -> Float[Tensor, "B H A"]:
        """What is executed of a denoised chunk, in the units of the recorded actions."""

    def to_action(self, x_0: Float[Tensor, "B noise_length noise_width"], context: C) -> Float[Tensor, "B H A"]:
        """The chunk in environment units, in [-1, 1]."""
        return self.unnormalized(x_0).clamp(-1, 1)

    def holding(
        self, predict: Predict, committed: Float[Tensor, "B H A"] | None, known: Bool[Tensor, "*B H"] | None
    ) -> Predict:
        """``predict`` behind the ``committed`` actions where they are ``known``; here these change nothing."""
        return predict

    def denoised(
        self,
        context: C,
        noise: Float[Tensor, "B noise_length noise_width"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, "B H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        """``act_from_noise`` before ``to_action`` clips it or switches a gripper, which leave no gradient.

        Where actions are ``known``, for each chunk others, it holds what was denoised in their place.
        """
        predict = self.holding(self.predict(context), committed, known)
        return self.unnormalized(integrate(predict, self.act_kernel, self.initial_noise * noise))

    # -- acting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, context: C, generator: torch.Generator) -> ActionSample:
        noise = torch.randn(len(context), *self.spec.noise_shape, generator=generator, device=self.device)
        trace, log_prob = denoise(
            self.predict(context),
            self.explore_kernel,
            self.initial_noise * noise,
            generator,
            frozen_predict=self.frozen_predict(context),
        )
        return ActionSample(action=self.to_action(trace.states[:, -1], context), trace=trace, log_prob=log_prob)

    def act_from_noise(
        self,
        context: C,
        noise: Float[Tensor, "B noise_length noise_width"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        return self.act_by(self.predict(context), context, noise, committed, known)

    def act_by(
        self,
        predict: Predict,
        context: C,
        noise: Float[Tensor, "B noise_length noise_width"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        """``act_from_noise``, denoising by ``predict``."""
        predict = self.holding(predict, committed, known)
        action = self.to_action(integrate(predict, self.act_kernel, self.initial_noise * noise), context)
        return keep_committed(action, committed, known)

    # -- learning by likelihood -------------------------------------------------------------------------------------

    def log_prob(self, context: C, trace: DenoisingTrace) -> Float[Tensor, "B S H A"]:
        transition, x_next = trace_transition(self.predict(context), self.explore_kernel, trace)
        return transition.log_prob(x_next)

    def counted(self, trace: DenoisingTrace, num_executed: Int[Tensor, " B"]) -> Bool[Tensor, "B S H"]:
        counted = counted_transitions(self.explore_kernel, trace, num_executed)
        return counted[:, :, : self.spec.action_horizon]

    @property
    def log_prob_steps(self) -> int:
        return self.explore_kernel.scored_steps

    @property
    def learns_spread(self) -> bool:
        return self.explore_kernel.learned_noise

    def entropy(self, context: C, trace: DenoisingTrace) -> Float[Tensor, "B S H A"]:
        transition, _ = trace_transition(self.predict_noise(context), self.explore_kernel, trace)
        return transition.entropy()


class Conditionable(DenoisedChunks[C]):
    """A denoising policy whose context an embedding of ``condition_width`` numbers can be added to."""

    @property
    @abstractmethod
    def condition_width(self) -> int: ...

    @abstractmethod
    def conditioned(self, context: C, embedding: Float[Tensor, "B width"]) -> C:
        """``context`` with ``embedding`` added; differentiable in it."""
