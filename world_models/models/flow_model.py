"""What all denoising world models share: conditioning, sampler, scales.

The network is given x_s = (1 - s) x + s noise and estimates x; the velocity is (x_s - estimate) / s. Steps are taken by
the kernels of ``policies.denoising``, so world models are sampled and scored by the code that samples and scores
policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from policies.denoising.denoise import Predict, denoise, integrate
from policies.denoising.kernels import FlowODE, FlowODEConfig, Prediction
from policies.device import Precision
from policies.normalizer import Normalizer
from policies.policy import RobotSpec
from sims.numbers.ranges import Depth, Width
from sims.tensor_dataclass import TensorDataclass
from world_models.models.kinematics import Kinematics
from world_models.world_model import History, ImaginedObservation

Latent = Float[Tensor, "*B cameras channels height width"]
STATE_HEAD_SCALE = 0.1  # images only correct what the kinematics predict to millimeters


@dataclass(frozen=True, kw_only=True)
class FlowWorldModelConfig:
    """``actions`` False: a baseline that is not given the actions. ``steps``: denoising steps.

    ``precision``: bfloat16 is faster on GPUs and on CPUs with instructions for it (AVX-512 BF16, AMX), and many times
    slower on CPUs without AVX-512 (``vla-rl doctor`` tells).
    """

    action_horizon: Width = 8
    actions: bool = True
    steps: Depth = 1
    precision: Precision = "float32"


@runtime_checkable
class Codec(Protocol):
    """Images to latents and back. ``limit``: largest magnitude of a latent; predictions are clamped to it."""

    limit: float

    def encode(
        self, images: UInt8[Tensor, "N image_height image_width 3"]
    ) -> Float[Tensor, "N channels height width"]: ...

    def decode(
        self, latent: Float[Tensor, "N channels height width"]
    ) -> UInt8[Tensor, "N image_height image_width 3"]: ...


class PixelCodec:
    """The codec whose latents are the pixels in [-1, 1]."""

    limit = 1.0

    def encode(self, images: UInt8[Tensor, "*N height width 3"]) -> Float[Tensor, "*N 3 height width"]:
        return images.movedim(-1, -3).float().mul_(1 / 127.5).sub_(1)

    def decode(self, latent: Float[Tensor, "*N 3 height width"]) -> UInt8[Tensor, "*N height width 3"]:
        return latent.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).contiguous()


@dataclass(frozen=True, kw_only=True)
class HistoryPrefill(TensorDataclass):
    """The history, and what a network computes from it once for all predictions."""

    history: History


P = TypeVar("P", bound=HistoryPrefill)


@dataclass(frozen=True, kw_only=True)
class CleanEstimate(TensorDataclass):
    """Output of one network call: clean latent, state, and the log of the expected squared error."""

    latent: Float[Tensor, "*B cameras channels height width"]
    state: Float[Tensor, "*B state_dim"]
    log_error: Float[Tensor, "*B"]


class FlowWorldModel(nn.Module, ABC, Generic[P]):
    """Action-conditioned video dynamics of all cameras together with the robot's state, one action chunk per call.

    A subclass adds ``prefill`` and ``estimate``. Arguments and results are on the model's device; its weights are
    float32, ``config.precision`` is of its products.
    """

    step_std: Tensor  # standard deviation of a chunk's change of the normalized state, [state_dim]
    latent_shape: tuple[int, int, int, int]  # cameras, channels, height, width
    state: nn.Module
    error: nn.Module

    def __init__(self, config: FlowWorldModelConfig, robot: RobotSpec, codec: Codec) -> None:
        super().__init__()
        self.config, self.robot, self.codec = config, robot, codec
        self.action_horizon, self.cameras = config.action_horizon, len(robot.cameras)
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.register_buffer("step_std", torch.ones(robot.state_dim))
        self.kinematics = Kinematics(self.condition_features, robot.state_dim)

    # -- the interface ---------------------------------------------------------------------------------------------

    def encode(self, images: UInt8[Tensor, "*B cameras image_height image_width 3"]) -> Latent:
        """Images to float32 latents of ``latent_shape``."""
        flat = self.codec.encode(images.flatten(0, -4))
        return flat.view(*images.shape[:-3], *flat.shape[1:])

    def decode(self, latent: Latent) -> UInt8[Tensor, "*B cameras image_height image_width 3"]:
        """Latents of ``latent_shape`` to images."""
        flat = self.codec.decode(latent.flatten(0, -4))
        return flat.view(*latent.shape[:-3], *flat.shape[1:])

    @abstractmethod
    def prefill(self, history: History) -> P:
        """What all predictions from ``history`` share."""

    @torch.no_grad()
    def sample_chunk(
        self, prefill: P, action: Float[Tensor, "B H A"], length: Int[Tensor, " B"], noise: Latent
    ) -> ImaginedObservation:
        """The observation after the first ``length`` (1..H) of ``action``; later actions are not read. No graph.

        Deterministic: the same prefill, actions and standard normal ``noise`` give the same prediction.
        """
        last: list[CleanEstimate] = []
        predict = self._predict(prefill, action, length, last)
        latent = integrate(predict, self._sampler, noise.flatten(2)).view(noise.shape)
        latent, estimate = latent.clamp(-self.codec.limit, self.codec.limit), last[0]
        error = (0.5 * estimate.log_error).exp()
        return ImaginedObservation(latent=latent, state=estimate.state, error=error)

    @torch.no_grad()
    def sampling_states(
        self, prefill: P, action: Tensor, length: Tensor, noise: Latent
    ) -> Float[Tensor, "B steps_plus_1 cameras channels height width"]:
        """The sampler's states from noise to latent."""
        predict = self._predict(prefill, action, length, [])
        trace, _ = denoise(predict, self._sampler, noise.flatten(2), torch.Generator(noise.device))
        return trace.states.unflatten(-1, noise.shape[2:])

    @property
    def _sampler(self) -> FlowODE:
        return FlowODE(FlowODEConfig(steps=self.config.steps))

    def _predict(self, prefill: P, action: Tensor, length: Tensor, last: list[CleanEstimate]) -> Predict:
        """The network bound to its conditions; ``last`` then holds the estimate of the latest step."""

        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            noisy = x_t.reshape(len(action), *self.latent_shape)
            last[:] = [self.estimate(prefill, action, length, noisy, t.expand(len(action), -1)[:, 0])]
            return Prediction(target=(x_t - last[0].latent.reshape(x_t.shape)) / t[..., None, None])

        return predict

    def noise(self, batch: int, generator: torch.Generator) -> Latent:
        """Standard normal, [batch, *latent_shape], on the generator's device."""
        return torch.randn(batch, *self.latent_shape, generator=generator, device=generator.device)

    def noise_of(self, seed: int, chunk: int) -> Latent:
        """That of one chunk of the episode with this seed, ``latent_shape``; drawn on the host.

        All predictions from the same history share it, and so do episodes with the same seed.
        """
        entropy = np.random.SeedSequence([seed, chunk])
        generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
        return self.noise(1, generator)[0]

    # -- for fitting -----------------------------------------------------------------------------------------------

    @abstractmethod
    def estimate(
        self,
        prefill: P,
        action: Float[Tensor, "B H A"],
        length: Tensor,
        noisy: Float[Tensor, "B cameras channels height width"],
        t: Float[Tensor, " B"],
    ) -> CleanEstimate:
        """One network call at x_t = ``noisy`` [B, *latent_shape], t in (0, 1]; differentiable."""

    def prefill_to_fit(self, history: History, generator: torch.Generator) -> P:
        """``prefill`` during a fit; a model that adds noise to its context draws that from ``generator``."""
        return self.prefill(history)

    def fit_scales(
        self,
        state: Float[Tensor, "N state_dim"],
        action: Float[Tensor, "M action_dim"],
        change: Float[Tensor, "K state_dim"],
    ) -> None:
        """Measure the scales of all recorded states and actions, and of the states' changes over a chunk."""
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
        self, history: History, action: Float[Tensor, "B H A"], length: Tensor, t: Float[Tensor, " B"]
    ) -> Float[Tensor, "B condition_features"]:
        """State, its last change and t; of the coming and of the past chunk the executed actions, a mask, their sum."""
        state = self.normalizer.normalize_state(history.state)
        change = self.normalizer.normalize_state(history.previous_state) - state
        parts = [state, change / self.step_std, t[:, None]]
        for chunk, executed in ((action, length), (history.past_action, history.past_length)):
            chunk = chunk if self.config.actions else torch.zeros_like(chunk)
            index = torch.arange(self.action_horizon, device=action.device)
            mask = (index < executed[:, None]).to(chunk.dtype)[..., None]
            parts += [(chunk * mask).flatten(1), mask.flatten(1), (chunk * mask).sum(1)]
        return torch.cat(parts, dim=1)

    def expected_change(
        self, history: History, action: Float[Tensor, "B H A"], length: Tensor
    ) -> Float[Tensor, "B state_dim"]:
        """The change of the normalized state that the kinematics predict, at every t as at 1, where they are fitted."""
        t = torch.ones(len(action), device=action.device)
        return self.kinematics(self.conditioning(history, action, length, t)) * self.step_std

    def read_out(
        self,
        latent: Float[Tensor, "B cameras channels height width"],
        pooled: Float[Tensor, "B pooled"],
        history: History,
        expected_change: Float[Tensor, "B state_dim"],
    ) -> CleanEstimate:
        """The head ``state`` adds to ``expected_change`` what images show (does the hand close on an object?).

        The head ``error`` estimates the error; its gradient does not reach ``pooled``.
        """
        change = expected_change + STATE_HEAD_SCALE * self.state(pooled) * self.step_std
        state = history.state + change * self.normalizer.state_std
        return CleanEstimate(latent=latent, state=state, log_error=self.error(pooled.detach())[:, 0])

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.config.precision == "bfloat16":
            return torch.autocast(device.type, torch.bfloat16)
        return nullcontext()


def read_out_heads(pooled: int, state_dim: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Heads ``state`` and ``error`` over ``pooled`` features; untrained, the state head's output is zero."""
    state = nn.Sequential(nn.LayerNorm(pooled), nn.Linear(pooled, 256), nn.SiLU(), nn.Linear(256, state_dim))
    error = nn.Sequential(nn.LayerNorm(pooled), nn.Linear(pooled, 64), nn.SiLU(), nn.Linear(64, 1))
    nn.init.zeros_(state[-1].weight)  # type: ignore[arg-type]
    nn.init.zeros_(state[-1].bias)  # type: ignore[arg-type]
    return state, error
