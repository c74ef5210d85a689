"""What the network learns to predict: the two families of denoising policies.

An objective turns (action, noise, t) into the noisy input x_t and the regression target. Flow time everywhere:
t = 1 is noise, t = 0 is action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from sims.numbers.ranges import Interval, PositiveFloat

# Of normalized actions, roughly: only the network's starting point depends on it.
ACTION_STD = 0.5


@dataclass(frozen=True, kw_only=True)
class FlowMatchingConfig:
    """Velocity prediction on straight paths. ``time_power`` p draws t with density p t^(p-1); pi0: 1.5, uniform: 1."""

    name: Literal["flow_matching"] = "flow_matching"
    time_power: PositiveFloat = 1.5


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """Noise prediction on the squared-cosine schedule of ``levels`` noise levels (Nichol & Dhariwal 2021)."""

    name: Literal["diffusion"] = "diffusion"
    levels: Annotated[int, Interval(ge=1, le=100_000)] = 100


ObjectiveConfig = FlowMatchingConfig | DiffusionConfig


class FlowMatching:
    """x_t = (1 - t) action + t noise, target v = noise - action (Lipman et al. 2023, in openpi's direction of time)."""

    def __init__(self, config: FlowMatchingConfig) -> None:
        self.config = config

    def draw_time(self, shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
        """Training times in (0, 1]."""
        uniform = 1 - torch.rand(shape, generator=generator, device=device)
        return uniform ** (1 / self.config.time_power)

    def corrupt(self, action: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """x_t and the target, both shaped like ``action``; ``t`` broadcasts against it."""
        return torch.lerp(action, noise, t.expand_as(action)), noise - action

    def guess(self, x_t: Tensor, t: Tensor, anchor: Tensor) -> Tensor:
        """E[v | x_t] if actions were Normal(anchor, ACTION_STD^2); the network predicts what is left.

        x_t - anchor at t = 1, -x_t at t = 0: the network neither copies its input nor starts far off.
        """
        variance = ACTION_STD**2
        gain = (t - (1 - t) * variance) / (t**2 + (1 - t) ** 2 * variance)
        return gain * (x_t - (1 - t) * anchor) - anchor


class Diffusion(nn.Module):
    """x_t = sqrt(alpha_bar) action + sqrt(1 - alpha_bar) noise, target = noise (Ho et al. 2020, Eq. 4 and 14).

    Level n of ``levels`` is time t = n / levels, so t = 0 is the clean action and the grid of a sampler with K steps
    is the flow's own, t_i = 1 - i/K (``diffusers`` calls this spacing "trailing").
    """

    _alpha_bar: Tensor  # of every level; a buffer, so that it is where the policy is

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

        self.config = config
        schedule = DDPMScheduler(num_train_timesteps=config.levels, beta_schedule="squaredcos_cap_v2")
        alpha_bar = torch.cat([torch.ones(1), schedule.alphas_cumprod]).to(torch.float32)
        self.register_buffer("_alpha_bar", alpha_bar, persistent=False)

    def alpha_bar(self, t: Tensor) -> Tensor:
        """Signal power left at time ``t`` (rounded to the nearest level), same shape."""
        level = torch.round(t * self.config.levels).long()
        return self._alpha_bar[level].to(t.dtype)

    def draw_time(self, shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
        """Training times, one of the levels 1/levels..1."""
        level = torch.randint(1, self.config.levels + 1, shape, generator=generator, device=device)
        return level / self.config.levels

    def corrupt(self, action: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """As for FlowMatching."""
        alpha_bar = self.alpha_bar(t)
        return alpha_bar.sqrt() * action + (1 - alpha_bar).sqrt() * noise, noise

    def guess(self, x_t: Tensor, t: Tensor, anchor: Tensor) -> Tensor:
        """E[noise | x_t] if actions were Normal(anchor, ACTION_STD^2)."""
        alpha_bar = self.alpha_bar(t)
        gain = (1 - alpha_bar).sqrt() / (1 - alpha_bar + alpha_bar * ACTION_STD**2)
        return gain * (x_t - alpha_bar.sqrt() * anchor)


Objective = FlowMatching | Diffusion


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that ``config`` describes."""
    return FlowMatching(config) if isinstance(config, FlowMatchingConfig) else Diffusion(config)
