"""What every denoising world model shares: what it is conditioned on, its sampler, its scales.

The network denoises: x_s = (1 - s) x + s noise, it predicts x^, the velocity is (x_s - x^) / s. Steps are taken by the
kernels of ``policies``, so a world model is sampled and scored by the code that samples and scores policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from policies.denoising.denoise import Predict, denoise, integrate
from policies.denoising.kernels import FlowODE, FlowODEConfig, Prediction
from policies.denoising.policy import Precision, RobotSpec
from policies.normalizer import Normalizer
from sims.tensor_dataclass import TensorDataclass
from world_models.world_model import Imagined, Moment

SEEN = 0.1  # of the head's output: pictures correct what the kinematics know to millimeters


@dataclass(frozen=True, kw_only=True)
class FlowWorldConfig:
    """``actions`` False: the baseline that does not see them. ``steps``: denoising steps.

    ``precision`` bfloat16 pays on GPUs and on CPUs with instructions for it (AVX-512 BF16, AMX).
    """

    action_horizon: int = 8
    actions: bool = True
    steps: int = 1
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.action_horizon < 1:
            raise ValueError(
                f"world.steps and action_horizon must be at least 1, got {self.steps}, {self.action_horizon}"
            )


class Codec(Protocol):
    """Pictures to latents and back. ``limit``: no latent is larger; imagined ones are clamped there."""

    limit: float

    def encode(self, images: UInt8[Tensor, "N height width 3"]) -> Float[Tensor, "N channels h w"]: ...

    def decode(self, latent: Float[Tensor, "N channels h w"]) -> UInt8[Tensor, "N height width 3"]: ...


class Pixels:
    """Latents are the pixels in [-1, 1]."""

    limit = 1.0

    def encode(self, images: Tensor) -> Tensor:
        return images.movedim(-1, -3).float().mul_(1 / 127.5).sub_(1)

    def decode(self, latent: Tensor) -> Tensor:
        return latent.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).contiguous()


@dataclass(frozen=True, kw_only=True)
class Memory(TensorDataclass):
    """The moment, and what else a network computes once per look."""

    moment: Moment


M = TypeVar("M", bound=Memory)


@dataclass(frozen=True, kw_only=True)
class Denoised(TensorDataclass):
    """One network call: clean-latent estimate, state, and the log of its expected squared error."""

    latent: Float[Tensor, "*B cameras channels height width"]
    state: Float[Tensor, "*B state_dim"]
    log_error: Float[Tensor, "*B"]


class FlowWorld(nn.Module, ABC, Generic[M]):
    """Implements ``world_models.world_model.WorldModel``; a kind of world adds ``prefill`` and ``denoised``.

    Everything may be asked from another device than the model's; answers come back to the asker's.
    """

    step_std: Tensor  # of a chunk's change of the normalized state, [state_dim]
    latent_shape: tuple[int, int, int, int]
    state: nn.Module
    error: nn.Module

    def __init__(self, config: FlowWorldConfig, robot: RobotSpec, codec: Codec) -> None:
        super().__init__()
        self.config, self.robot, self.codec = config, robot, codec
        self.action_horizon, self.cameras = config.action_horizon, len(robot.cameras)
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.register_buffer("step_std", torch.ones(robot.state_dim))
        self.kinematics = Kinematics(self.condition_features, robot.state_dim)

    # -- the interface ---------------------------------------------------------------------------------------------

    def encode(self, images: Tensor) -> Tensor:
        flat = self.codec.encode(images.flatten(0, -4))
        return flat.view(*images.shape[:-3], *flat.shape[1:]).to(images.device)

    def decode(self, latent: Tensor) -> Tensor:
        flat = self.codec.decode(latent.flatten(0, -4))
        return flat.view(*latent.shape[:-3], *flat.shape[1:]).to(latent.device)

    @abstractmethod
    def prefill(self, moment: Moment) -> M:
        """What all calls for this moment share."""

    @torch.no_grad()
    def sample_chunk(self, memory: M, action: Tensor, length: Tensor, noise: Tensor) -> Imagined:
        said: list[Denoised] = []
        predict = self._predict(memory, action.to(self.device), length.to(self.device), said)
        latent = integrate(predict, self._sampler, noise.to(self.device).flatten(2)).view(noise.shape)
        latent, last = latent.clamp(-self.codec.limit, self.codec.limit), said[0]
        return Imagined(latent=latent, state=last.state, error=(0.5 * last.log_error).exp()).to(noise.device)

    @torch.no_grad()
    def walk(
        self, memory: M, action: Tensor, length: Tensor, noise: Tensor
    ) -> Float[Tensor, "B steps_plus_1 cameras channels height width"]:
        """The sampler's states from noise to latent."""
        predict = self._predict(memory, action, length, [])
        path, _ = denoise(predict, self._sampler, noise.flatten(2), torch.Generator(noise.device))
        return path.states.unflatten(-1, noise.shape[2:])

    @property
    def _sampler(self) -> FlowODE:
        return FlowODE(FlowODEConfig(steps=self.config.steps))

    def _predict(self, memory: M, action: Tensor, length: Tensor, said: list[Denoised]) -> Predict:
        """The network bound to a question; ``said`` holds all it said of the last step, and of that alone."""

        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            noisy = x_t.reshape(len(action), *self.latent_shape)
            said[:] = [self.denoised(memory, action, length, noisy, t.expand(len(action), -1)[:, 0])]
            return Prediction(target=(x_t - said[0].latent.reshape(x_t.shape)) / t[..., None, None])

        return predict

    def noise(self, batch: int, generator: torch.Generator) -> Tensor:
        return torch.randn(batch, *self.latent_shape, generator=generator, device=generator.device)

    # -- for fitting -----------------------------------------------------------------------------------------------

    @abstractmethod
    def denoised(self, memory: M, action: Tensor, length: Tensor, noisy: Tensor, t: Tensor) -> Denoised:
        """One call at x_t = ``noisy`` [B, *latent_shape], t [B] in (0, 1]; differentiable."""

    def prefill_to_fit(self, moment: Moment, generator: torch.Generator) -> M:
        """Prefill while fitting; a model that corrupts its context draws that from ``generator``."""
        return self.prefill(moment)

    def fit_scales(self, state: Tensor, action: Tensor, change: Tensor) -> None:
        """From all recorded states and actions, and the states' changes over a chunk [N, state_dim]."""
        self.normalizer.fit(state, action)
        std = (change / self.normalizer.state_std).std(0, correction=0)
        self.step_std.copy_(torch.where(std > 1e-4, std, 1.0))

    # -- for the networks ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.step_std.device

    @property
    def condition_features(self) -> int:
        robot = self.robot
        chunk = self.action_horizon * (robot.action_dim + 1)
        return 2 * chunk + 2 * robot.action_dim + 2 * robot.state_dim + 1

    def conditioning(
        self, moment: Moment, action: Tensor, length: Tensor, t: Tensor
    ) -> Float[Tensor, "B condition_features"]:
        """State, its last change, t; of the coming and of the last chunk the actions taken, which, their sum."""
        state = self.normalizer.normalize_state(moment.state)
        moved = self.normalizer.normalize_state(moment.previous_state) - state
        parts = [state, moved / self.step_std, t[:, None]]
        for chunk, taken in ((action, length), (moment.past_action, moment.past_length)):
            chunk = chunk if self.config.actions else torch.zeros_like(chunk)
            mask = (torch.arange(self.action_horizon, device=action.device) < taken[:, None]).to(chunk.dtype)[..., None]
            parts += [(chunk * mask).flatten(1), mask.flatten(1), (chunk * mask).sum(1)]
        return torch.cat(parts, dim=1)

    def moved(self, features: Float[Tensor, "B condition_features"]) -> Float[Tensor, "B state_dim"]:
        """The normalized state's change that ``conditioning`` alone lets expect."""
        return self.kinematics(features) * self.step_std

    def read_out(self, latent: Tensor, pooled: Float[Tensor, "B pooled"], moment: Moment, expected: Tensor) -> Denoised:
        """``expected``: of ``moved``; the head ``state`` adds what pictures tell (does the hand close on a thing?). The
        error's estimate is by ``error``, which teaches nobody else."""
        change = (expected + SEEN * self.state(pooled) * self.step_std) * self.normalizer.state_std
        return Denoised(latent=latent, state=moment.state + change, log_error=self.error(pooled.detach())[:, 0])

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.config.precision == "bfloat16":
            return torch.autocast(device.type, torch.bfloat16)
        return nullcontext()


class Kinematics(nn.Module):
    """Features of state and actions -> the state's change in units of ``step_std``: nearly linear, and then some."""

    def __init__(self, features: int, state_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, state_dim)
        self.rest = nn.Sequential(
            nn.Linear(features, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, state_dim)
        )
        for last in (self.linear, self.rest[-1]):
            nn.init.zeros_(last.weight)  # type: ignore[arg-type]
            nn.init.zeros_(last.bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features) + self.rest(features)


def read_out_heads(pooled: int, state_dim: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Heads ``state`` and ``error`` over ``pooled`` features; untrained, the state stays as it is."""
    state = nn.Sequential(nn.LayerNorm(pooled), nn.Linear(pooled, 256), nn.SiLU(), nn.Linear(256, state_dim))
    error = nn.Sequential(nn.LayerNorm(pooled), nn.Linear(pooled, 64), nn.SiLU(), nn.Linear(64, 1))
    nn.init.zeros_(state[-1].weight)  # type: ignore[arg-type]
    nn.init.zeros_(state[-1].bias)  # type: ignore[arg-type]
    return state, error
