"""A Gaussian MLP policy for state-only control: no images, no instruction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributions import Normal

from episodes.sampler import Targets
from policies.normalizer import Normalizer
from policies.policy import ActionSample, Policy, PolicySpec, RobotSpec, keep_committed, masked_mean
from sims.numbers.ranges import PositiveFloat, Width
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation


@dataclass(frozen=True, kw_only=True)
class GaussianPolicyConfig:
    """``hidden``: layer widths. ``initial_std``: of the exploration noise in normalized action units; it is learned."""

    name: Literal["gaussian"] = "gaussian"
    action_horizon: Width = 1
    hidden: tuple[Width, ...] = (64, 64)
    initial_std: PositiveFloat = 0.5


@dataclass(frozen=True, kw_only=True)
class StateContext(TensorDataclass):
    """The normalized state."""

    state: Float[Tensor, "*B state_dim"]


@dataclass(frozen=True, kw_only=True)
class DrawnAction(TensorDataclass):
    """The draw before clipping, in normalized action space."""

    x: Float[Tensor, "*B H A"]


class GaussianPolicy(Policy[StateContext, DrawnAction]):
    """Mean from an MLP, one learned standard deviation per action element (Schulman et al. 2017, Sec. 6.1)."""

    config: GaussianPolicyConfig

    def __init__(self, config: GaussianPolicyConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = PolicySpec(robot=robot, action_horizon=config.action_horizon, value_dim=robot.state_dim)
        layers: list[nn.Module] = []
        width = robot.state_dim
        for hidden in config.hidden:
            layers += [nn.Linear(width, hidden), nn.Tanh()]
            width = hidden
        shape = (config.action_horizon, robot.action_dim)
        self.mean = nn.Sequential(*layers, nn.Linear(width, math.prod(shape)), nn.Unflatten(-1, shape))
        self.log_std = nn.Parameter(torch.full(shape, math.log(config.initial_std)))
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=robot.action_dim)

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        return {"mean": list(self.mean.parameters()), "noise": [self.log_std]}

    def fit_normalizer(self, state: Float[Tensor, "N state_dim"], action: Float[Tensor, "M action_dim"]) -> None:
        self.normalizer.fit(state, action)

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[StateContext, TensorDataclass]:
        return StateContext(state=self.normalizer.normalize_state(obs.state)), state

    @torch.no_grad()
    def sample(self, context: StateContext, generator: torch.Generator) -> ActionSample:
        distribution = self._distribution(context)
        noise = torch.randn(distribution.mean.shape, generator=generator, device=self.device)
        trace = DrawnAction(x=distribution.mean + distribution.stddev * noise)
        return ActionSample(action=self._to_action(trace.x), trace=trace, log_prob=self.log_prob(context, trace))

    def act_from_noise(
        self,
        context: StateContext,
        noise: Float[Tensor, "B H A"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        action = self._to_action(self._mean(context))
        return keep_committed(action, committed, known)

    def store(self, context: StateContext) -> TensorDataclass:
        return context

    def restore(self, record: TensorDataclass) -> StateContext:
        assert isinstance(record, StateContext)
        return record

    def log_prob(self, context: StateContext, trace: DrawnAction) -> Float[Tensor, "B 1 H A"]:
        return self._distribution(context).log_prob(trace.x).unsqueeze(1)

    @property
    def learns_spread(self) -> bool:
        return self.log_std.requires_grad

    def entropy(self, context: StateContext, trace: DrawnAction) -> Float[Tensor, "B 1 H A"]:
        return self._distribution(context).entropy().unsqueeze(1)

    def value_features(self, context: StateContext) -> Float[Tensor, "B state_dim"]:
        return context.state

    def bc_loss(self, context: StateContext, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """Mean squared error of the mean over valid actions."""
        error = self._mean(context) - self.normalizer.normalize_action(targets.action)
        return masked_mean(error.square(), targets.mask)

    def _mean(self, context: StateContext) -> Float[Tensor, "B H A"]:
        with self.autocast():
            mean: Tensor = self.mean(context.state)
        return mean.float()

    def _distribution(self, context: StateContext) -> Normal:
        mean = self._mean(context)
        return Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)

    def _to_action(self, x: Tensor) -> Tensor:
        return self.normalizer.unnormalize_action(x).clamp(-1, 1)
