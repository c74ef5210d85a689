"""Denoising kernels: how one step x_t -> x_{t - dt} is taken, and how likely it was.

``transition`` is the only place where a step is computed. Sampling, the log-probability of a stored trace, evaluation
and deployment all call it, on the time grid of ``time_grid``, so a rollout and its update agree.
Flow time: t = 1 is noise, t = 0 is action, v = noise - action. Papers with the other direction are converted here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policies.denoising.objectives import Diffusion, FlowMatching, Objective
from sims.numbers.ranges import Depth, Interval, PositiveFloat, Share

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def time_grid(steps: int, device: torch.device | str = "cpu") -> Float[Tensor, " steps_plus_1"]:
    """t_i = 1 - i/K for i = 0..K: the grid of every kernel, loss and evaluation."""
    return (1 - torch.arange(steps + 1, dtype=torch.float64, device=device) / steps).float()


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Network output at x_t: the objective's target [..., H, A], and the raw noise head's if there is one."""

    target: Tensor
    noise: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Transition:
    """x_{t-dt} ~ Normal(mean, std) per element; ``std`` broadcasts against ``mean``, None for a deterministic step."""

    mean: Tensor
    std: Tensor | None

    def sample(self, noise: Tensor) -> Tensor:
        return self.mean if self.std is None else self.mean + self.std * noise

    def log_prob(self, x_next: Tensor) -> Tensor:
        """Log density per element. ValueError for a deterministic step, which has none (it is not zero)."""
        std = self._require_std()
        return -0.5 * ((x_next - self.mean) / std) ** 2 - torch.log(std) - LOG_SQRT_2PI

    def entropy(self) -> Tensor:
        """Differential entropy per element."""
        return (torch.log(self._require_std()) + 0.5 + LOG_SQRT_2PI).expand_as(self.mean)

    def _require_std(self) -> Tensor:
        if self.std is None:
            raise ValueError("a deterministic step has no density: explore with flow_sde, flow_cps, flow_noise or ddpm")
        return self.std


class Kernel(ABC):
    """How to get from noise to action in ``steps`` transitions.

    ``trained_steps``: transitions whose log-prob counts. ``one_step_per_sample``: only one of them, drawn per sample,
    is random. ``learned_noise``: reads the noise head. ``frozen_early_steps``: untrained early steps belong to a frozen
    copy. ``noise_clip``: bound of the drawn noise, in stds.
    """

    one_step_per_sample: bool = False
    learned_noise: bool = False
    frozen_early_steps: bool = False
    noise_clip: float | None = None

    def __init__(self, *, steps: int, trained_steps: range) -> None:
        if steps < 1:
            raise ValueError(f"kernel steps must be at least 1, got {steps}")
        self.steps = steps
        self.trained_steps = trained_steps

    @property
    def scored_steps(self) -> int:
        """S: the transitions of one sample whose log-prob counts."""
        return 1 if self.one_step_per_sample else len(self.trained_steps)

    @property
    def needs_frozen_copy(self) -> bool:
        """Whether steps before the trained ones are taken by a frozen copy of the network (DPPO)."""
        return self.frozen_early_steps and self.trained_steps.start > 0

    def grid(self, device: torch.device | str = "cpu") -> Float[Tensor, " steps_plus_1"]:
        """Times of the states of a trace, for sampling, scoring, evaluation and deployment."""
        return time_grid(self.steps, device)

    @abstractmethod
    def transition(
        self, x_t: Tensor, prediction: Prediction, t: Tensor, dt: Tensor, explore: Tensor | None = None
    ) -> Transition:
        """One step. x_t: [..., H, A]; t, dt broadcast against it, t in (0, 1], 0 < dt <= t.

        ``explore`` (bool, broadcastable; default everywhere): rows where it is False take the noiseless step.
        Only kernels with ``one_step_per_sample`` are asked for it.
        """


@dataclass(frozen=True, kw_only=True)
class FlowODEConfig:
    """Euler steps of the deterministic flow."""

    name: Literal["flow_ode"] = "flow_ode"
    steps: Depth = 4


@dataclass(frozen=True, kw_only=True)
class FlowSDEConfig:
    """``noise_level``: 0.5 in pi_RL (K = 3-5), 0.7 in Flow-GRPO (K = 10). ``random_steps``: "one", drawn per sample."""

    name: Literal["flow_sde"] = "flow_sde"
    steps: Annotated[int, Interval(ge=2, le=256)] = 4
    noise_level: PositiveFloat = 0.5
    random_steps: Literal["all", "one"] = "all"


@dataclass(frozen=True, kw_only=True)
class FlowCPSConfig:
    """``noise_level`` in (0, 1): the share of each step's noise that is fresh is sin(pi noise_level / 2)."""

    name: Literal["flow_cps"] = "flow_cps"
    steps: Annotated[int, Interval(ge=2, le=256)] = 4
    noise_level: Annotated[float, Interval(gt=0, lt=1)] = 0.5


@dataclass(frozen=True, kw_only=True)
class FlowNoiseConfig:
    """The noise head chooses each element's std between the bounds (normalized action units)."""

    name: Literal["flow_noise"] = "flow_noise"
    steps: Depth = 4
    min_std: PositiveFloat = 0.08
    max_std: PositiveFloat = 0.16


@dataclass(frozen=True, kw_only=True)
class DDPMConfig:
    """``train_last``: K', the last steps that are trained; earlier ones are taken by a frozen copy (DPPO)."""

    name: Literal["ddpm"] = "ddpm"
    steps: Depth = 20
    train_last: Depth = 10
    min_std: PositiveFloat = 0.1
    clip_action: PositiveFloat = 1.0
    noise_clip: PositiveFloat = 3.0


@dataclass(frozen=True, kw_only=True)
class DDIMConfig:
    """``eta`` = 0 is deterministic, 1 has DDPM's noise. The rest as in DDPMConfig; unused when eta = 0."""

    name: Literal["ddim"] = "ddim"
    steps: Depth = 5
    eta: Share = 0.0
    train_last: Depth = 5
    min_std: PositiveFloat = 0.1
    clip_action: PositiveFloat = 1.0
    noise_clip: PositiveFloat = 3.0


KernelConfig = FlowODEConfig | FlowSDEConfig | FlowCPSConfig | FlowNoiseConfig | DDPMConfig | DDIMConfig


class FlowODE(Kernel):
    """Euler step of dx/dt = v. No density: ``Transition.log_prob`` raises."""

    def __init__(self, config: FlowODEConfig) -> None:
        super().__init__(steps=config.steps, trained_steps=range(0))
        self.config = config

    def transition(
        self, x_t: Tensor, prediction: Prediction, t: Tensor, dt: Tensor, explore: Tensor | None = None
    ) -> Transition:
        return Transition(mean=x_t - dt * prediction.target.to(x_t.dtype), std=None)


class FlowSDE(Kernel):
    """Reverse SDE with the marginals of the flow (Liu et al. 2025, Flow-GRPO, Eq. 9; Chen et al. 2025, pi_RL).

    sigma = a sqrt(t / (1 - t)), the drift corrected by sigma^2 / (2t) times the noise estimate x + (1 - t) v.
    """

    def __init__(self, config: FlowSDEConfig) -> None:
        if config.noise_level <= 0:
            raise ValueError(f"flow_sde.noise_level must be positive, got {config.noise_level}; for 0 use flow_ode")
        if config.steps < 2:
            raise ValueError(
                f"flow_sde.steps must be at least 2 (one step has no finite noise level), got {config.steps}"
            )
        super().__init__(steps=config.steps, trained_steps=range(config.steps))
        self.config = config
        self.one_step_per_sample = config.random_steps == "one"

    def transition(
        self, x_t: Tensor, prediction: Prediction, t: Tensor, dt: Tensor, explore: Tensor | None = None
    ) -> Transition:
        velocity = prediction.target.to(x_t.dtype)
        # 1 - t vanishes at pure noise; there, and only there, the denominator is taken at the step's end.
        denominator = torch.where(t < 1, 1 - t, dt)
        variance_rate = self.config.noise_level**2 * t / denominator
        if explore is not None:
            variance_rate = variance_rate * explore
        noise_estimate = x_t + (1 - t) * velocity
        mean = x_t - dt * velocity - variance_rate * dt / (2 * t) * noise_estimate
        return Transition(mean=mean, std=(variance_rate * dt).sqrt())


class FlowCPS(Kernel):
    """Coefficients-preserving sampling (Wang & Yu 2025): the noise estimate is partly replaced by fresh noise.

    x_{t'} = (1 - t') x0^ + t' cos(pi a / 2) x1^ + t' sin(pi a / 2) noise. The last step (t' = 0) is deterministic,
    so it is not among the trained ones.
    """

    def __init__(self, config: FlowCPSConfig) -> None:
        if not 0 < config.noise_level < 1:
            raise ValueError(f"flow_cps.noise_level must be between 0 and 1, got {config.noise_level}")
        if config.steps < 2:
            raise ValueError(f"flow_cps.steps must be at least 2 (the last one is noiseless), got {config.steps}")
        super().__init__(steps=config.steps, trained_steps=range(config.steps - 1))
        self.config = config

    def transition(
        self, x_t: Tensor, prediction: Prediction, t: Tensor, dt: Tensor, explore: Tensor | None = None
    ) -> Transition:
        velocity = prediction.target.to(x_t.dtype)
        angle = 0.5 * math.pi * self.config.noise_level
        t_next = t - dt
        action_estimate = x_t - t * velocity
        noise_estimate = x_t + (1 - t) * velocity
        mean = (1 - t_next) * action_estimate + t_next * math.cos(angle) * noise_estimate
        return Transition(mean=mean, std=t_next * math.sin(angle))


class FlowNoise(Kernel):
    """Euler mean, learned std (Zhang et al. 2025, ReinFlow; pi_RL's Flow-Noise).

    log var = log lo^2 + (log hi^2 - log lo^2) (tanh(head) + 1) / 2.
    """

    learned_noise = True

    def __init__(self, config: FlowNoiseConfig) -> None:
        if not 0 < config.min_std <= config.max_std:
            raise ValueError(
                f"flow_noise needs 0 < min_std <= max_std, got min_std {config.min_std}, max_std {config.max_std}"
            )
        super().__init__(steps=config.steps, trained_steps=range(config.steps))
        self.config = config

    def transition(
        self, x_t: Tensor, prediction: Prediction, t: Tensor, dt: Tensor, explore: Tensor | None = None
    ) -> Transition:
        if prediction.noise is None:
            raise ValueError("flow_noise needs a noise head and the network has none; set policy.explore to flow_noise")
        low, high = math.log(self.config.min_std), math.log(self.config.max_std)
        share = (torch.tanh(prediction.noise.to(x_t.dtype)) + 1) / 2
        mean = x_t - dt * prediction.target.to(x_t.dtype)
        return Transition(mean=mean, std=torch.exp(low + (high - low) * share))


def noise_head_beside(target: nn.Linear) -> nn.Linear:
    """A noise head for ``FlowNoise`` beside the output layer; its 0 is the geometric middle of the bounds."""
    head = nn.Linear(target.in_features, target.out_features, device=target.weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class DDPM(Kernel):
    """Ancestral step of DDPM (Ho et al. 2020, Eq. 7) with DPPO's guards (Ren et al. 2024).

    The action estimate is clipped, the noise estimate recomputed from it, the std is at least ``min_std``.
    """

    frozen_early_steps = True

    def __init__(self, config: DDPMConfig, objective: Diffusion) -> None:
        super().__init__(steps=config.steps, trained_steps=_last_steps(config, objective))
        self.config = config
        self.objective = objective
        self.noise_clip = config.noise_clip

    def transition(
        self, x_t: Tensor, prediction: Prediction, t: Tensor, dt: Tensor, explore: Tensor | None = None
    ) -> Transition:
        alpha_bar, alpha_bar_next = self.objective.alpha_bar(t), self.objective.alpha_bar(t - dt)
        alpha = alpha_bar / alpha_bar_next
        action, _ = _estimates(x_t, prediction, alpha_bar, self.config.clip_action)
        mean = (alpha_bar_next.sqrt() * (1 - alpha) * action + alpha.sqrt() * (1 - alpha_bar_next) * x_t) / (
            1 - alpha_bar
        )
        return Transition(mean=mean, std=_posterior_std(alpha_bar, alpha_bar_next).clamp(min=self.config.min_std))


class DDIM(Kernel):
    """Step of DDIM (Song et al. 2021, Eq. 12 and 16); with eta > 0 guarded as in DPPO."""

    frozen_early_steps = True

    def __init__(self, config: DDIMConfig, objective: Diffusion) -> None:
        if config.eta < 0 or config.eta > 1:
            raise ValueError(f"ddim.eta must be within [0, 1], got {config.eta}")
        super().__init__(steps=config.steps, trained_steps=_last_steps(config, objective))
        self.config = config
        self.objective = objective
        self.noise_clip = config.noise_clip

    def transition(
        self, x_t: Tensor, prediction: Prediction, t: Tensor, dt: Tensor, explore: Tensor | None = None
    ) -> Transition:
        alpha_bar, alpha_bar_next = self.objective.alpha_bar(t), self.objective.alpha_bar(t - dt)
        action, noise = _estimates(x_t, prediction, alpha_bar, self.config.clip_action)
        sigma = self.config.eta * _posterior_std(alpha_bar, alpha_bar_next)
        direction = (1 - alpha_bar_next - sigma**2).clamp(min=0).sqrt()
        mean = alpha_bar_next.sqrt() * action + direction * noise
        return Transition(mean=mean, std=sigma.clamp(min=self.config.min_std) if self.config.eta > 0 else None)


FLOW_KERNELS: Mapping[type[Any], Callable[[Any], Kernel]] = {
    FlowODEConfig: FlowODE,
    FlowSDEConfig: FlowSDE,
    FlowCPSConfig: FlowCPS,
    FlowNoiseConfig: FlowNoise,
}
DIFFUSION_KERNELS: Mapping[type[Any], Callable[[Any, Diffusion], Kernel]] = {DDPMConfig: DDPM, DDIMConfig: DDIM}


def build_kernel(config: KernelConfig, objective: Objective) -> Kernel:
    """The kernel that ``config`` describes. ValueError if it does not belong to the objective's family."""
    if isinstance(objective, FlowMatching) and type(config) in FLOW_KERNELS:
        return FLOW_KERNELS[type(config)](config)
    if isinstance(objective, Diffusion) and type(config) in DIFFUSION_KERNELS:
        return DIFFUSION_KERNELS[type(config)](config, objective)
    raise ValueError(
        f"kernel {config.name} does not fit objective {objective.config.name}: "
        "flow_matching takes flow_ode, flow_sde, flow_cps or flow_noise; diffusion takes ddpm or ddim"
    )


def build_act_kernel(config: KernelConfig, objective: Objective) -> Kernel:
    """``build_kernel`` of what deploys (``integrate``). ValueError too if it draws noise."""
    kernel = build_kernel(config, objective)
    if kernel.trained_steps:
        raise ValueError(f"act must be deterministic: flow_ode, or ddim with eta = 0; got {config}")
    return kernel


def _estimates(x_t: Tensor, prediction: Prediction, alpha_bar: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Clipped action estimate, and the noise estimate that goes with it."""
    action = (x_t - (1 - alpha_bar).sqrt() * prediction.target.to(x_t.dtype)) / alpha_bar.sqrt()
    action = action.clamp(-clip, clip)
    return action, (x_t - alpha_bar.sqrt() * action) / (1 - alpha_bar).sqrt()


def _posterior_std(alpha_bar: Tensor, alpha_bar_next: Tensor) -> Tensor:
    return ((1 - alpha_bar_next) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_next)).sqrt()


def _last_steps(config: DDPMConfig | DDIMConfig, objective: Diffusion) -> range:
    """The trained steps: none of a deterministic kernel.

    Without a floor on the std the very last one is deterministic and has no density.
    """
    levels = objective.config.levels
    if config.steps < 1 or levels % config.steps:
        raise ValueError(f"{config.name}.steps must divide the objective's {levels} levels, got {config.steps}")
    if isinstance(config, DDIMConfig) and config.eta == 0:
        return range(0)
    if not 1 <= config.train_last <= config.steps:
        raise ValueError(f"{config.name}.train_last must be within 1..{config.steps}, got {config.train_last}")
    return range(config.steps - config.train_last, config.steps if config.min_std > 0 else config.steps - 1)
