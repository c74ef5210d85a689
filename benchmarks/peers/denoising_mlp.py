"""DPPO's and ReinFlow's network for low-dimensional states, with this project's kernels: a policy for comparisons.

One residual MLP on (noisy chunk, time embedding, state), as ``DiffusionMLP`` and ``FlowMLP`` of these projects have it;
the noise of a flow comes from a second, small MLP on (time embedding, state).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from episodes.sampler import Targets
from policies.denoising.chunk_policy import DenoisedChunks
from policies.denoising.denoise import Predict
from policies.denoising.kernels import (
    DDIMConfig,
    DDPMConfig,
    FlowNoiseConfig,
    FlowODEConfig,
    Prediction,
    build_kernel,
)
from policies.denoising.objectives import DiffusionConfig, FlowMatchingConfig, build_objective
from policies.gaussian import StateContext
from policies.normalizer import Normalizer
from policies.policy import PolicySpec, RobotSpec, masked_mean
from sims.numbers.ranges import Width
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation

TIME_DIM = 16


@dataclass(frozen=True, kw_only=True)
class DenoisingMLPConfig:
    """``noise_hidden``: layer widths of the network that a flow's noise comes from."""

    action_horizon: Width
    hidden: tuple[Width, ...]
    noise_hidden: tuple[Width, ...] = (64, 64)
    objective: FlowMatchingConfig | DiffusionConfig
    act: FlowODEConfig | DDIMConfig
    explore: FlowNoiseConfig | DDPMConfig


class Residual(nn.Module):
    """x + W2 relu(W1 relu(x)), the block of DPPO's ``ResidualMLP``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.second(self.first(x.relu()).relu_())
        return changed.add_(x)


class Denoiser(nn.Module):
    """The objective's target for noisy chunks at times t, given one state each."""

    frequency: Tensor

    def __init__(self, config: DenoisingMLPConfig, *, state_dim: int, chunk: int) -> None:
        super().__init__()
        width, steps = config.hidden[0], config.explore.steps
        self.time = nn.Sequential(nn.Linear(TIME_DIM, 2 * TIME_DIM), nn.Mish(), nn.Linear(2 * TIME_DIM, TIME_DIM))
        blocks = [Residual(width) for _ in config.hidden[1::2]]
        self.network = nn.Sequential(nn.Linear(chunk + TIME_DIM + state_dim, width), *blocks, nn.Linear(width, chunk))
        self.noise: nn.Module | None = None
        if isinstance(config.explore, FlowNoiseConfig):
            widths = (TIME_DIM + state_dim, *config.noise_hidden)
            layers = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.Tanh())]
            self.noise = nn.Sequential(*layers, nn.Linear(widths[-1], chunk))
        frequency = torch.exp(torch.arange(TIME_DIM // 2) * (-math.log(10_000) / (TIME_DIM // 2 - 1)))
        self.register_buffer("frequency", frequency * steps)

    def forward(self, x: Float[Tensor, "B S H A"], t: Float[Tensor, "#B S"], state: Float[Tensor, "B D"]) -> Prediction:
        time, given = self._time(t).expand(*x.shape[:2], -1), state[:, None].expand(-1, x.shape[1], -1)
        target = self.network(torch.cat([x.flatten(2), time, given], -1)).view_as(x)
        return Prediction(target=target, noise=self._noise(x, time, given))

    def noise_alone(self, x: Tensor, t: Tensor, state: Tensor) -> Prediction:
        """As ``forward``, with a target of zeros."""
        with torch.no_grad():
            time = self._time(t).expand(*x.shape[:2], -1)
        noise = self._noise(x, time, state[:, None].expand(-1, x.shape[1], -1))
        return Prediction(target=torch.zeros_like(x), noise=noise)

    def _time(self, t: Tensor) -> Tensor:
        angle = t[..., None] * self.frequency
        time: Tensor = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        return time

    def _noise(self, x: Tensor, time: Tensor, given: Tensor) -> Tensor | None:
        return None if self.noise is None else self.noise(torch.cat([time.detach(), given], -1)).view_as(x)


class DenoisingMLP(DenoisedChunks[StateContext]):
    """Flow matching or diffusion on the state alone."""

    config: DenoisingMLPConfig
    frozen: Denoiser | None

    def __init__(self, config: DenoisingMLPConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = PolicySpec(robot=robot, action_horizon=config.action_horizon, value_dim=robot.state_dim)
        self.objective = build_objective(config.objective)
        self.act_kernel = build_kernel(config.act, self.objective)
        self.explore_kernel = build_kernel(config.explore, self.objective)
        chunk = config.action_horizon * robot.action_dim
        self.denoiser = Denoiser(config, state_dim=robot.state_dim, chunk=chunk)
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.frozen = None
        self.prepare_to_explore()

    def prepare_to_explore(self) -> None:
        if self.explore_kernel.needs_frozen_copy:
            self.frozen = copy.deepcopy(self.denoiser).requires_grad_(False)

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        return {"denoiser": list(self.denoiser.parameters())}

    def fit_normalizer(self, state: Float[Tensor, "N state_dim"], action: Float[Tensor, "M action_dim"]) -> None:
        self.normalizer.fit(state, action)

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[StateContext, TensorDataclass]:
        return StateContext(state=self.normalizer.normalize_state(obs.state)), state

    def store(self, context: StateContext) -> TensorDataclass:
        return context

    def restore(self, record: TensorDataclass) -> StateContext:
        assert isinstance(record, StateContext)
        return record

    def value_features(self, context: StateContext) -> Float[Tensor, "B value_dim"]:
        return context.state

    def bc_loss(self, context: StateContext, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        clean = self.normalizer.normalize_action(targets.action).unsqueeze(1)
        noise = torch.randn(clean.shape, generator=generator, device=self.device)
        t = self.objective.draw_time(clean.shape[:2], generator, self.device)
        x_t, target = self.objective.corrupt(clean, noise, t[..., None, None])
        error = self.denoiser(x_t, t, context.state).target - target
        return masked_mean(error.square(), targets.mask[:, None])

    def predict(self, context: StateContext) -> Predict:
        return self._bind(self.denoiser, context)

    def frozen_predict(self, context: StateContext) -> Predict | None:
        return None if self.frozen is None else self._bind(self.frozen, context)

    def predict_noise(self, context: StateContext) -> Predict:
        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            return self.denoiser.noise_alone(x_t, t, context.state)

        return predict

    def _bind(self, network: Denoiser, context: StateContext) -> Predict:
        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            prediction: Prediction = network(x_t, t, context.state)
            return prediction

        return predict

    def unnormalized(self, x_0: Float[Tensor, "B H A"]) -> Float[Tensor, "B H A"]:
        return self.normalizer.unnormalize_action(x_0)
