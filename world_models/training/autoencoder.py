"""Fit of the image autoencoder of a latent world model."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from sims.devices.crossing import read_numbers
from sims.numbers.ranges import NonNegativeFloat, PositiveInt
from world_models.data.clip import Clip
from world_models.data.clip_sampler import ClipSampler
from world_models.models.autoencoder import Autoencoder
from world_models.training.optimization import ClipOptimization, OptimizerConfig

MOVED = 0.05  # a pixel moved if a channel changed by more, of a range of 2


@dataclass(frozen=True, kw_only=True)
class AutoencoderFitConfig(OptimizerConfig):
    """``motion_weight``: added weight of pixels that differ between a clip's two frames."""

    steps: PositiveInt = 2000
    motion_weight: NonNegativeFloat = 9.0


class AutoencoderFit(ClipOptimization):
    """Weighted absolute error of reconstructed images."""

    def __init__(self, codec: Autoencoder, config: AutoencoderFitConfig, clips: ClipSampler, *, seed: int) -> None:
        super().__init__(codec, config, clips, seed=seed)
        self.codec, self.config = codec, config

    def loss(self, clip: Clip) -> tuple[Float[Tensor, ""], dict[str, float]]:
        pixels, reconstruction = self.codec.reconstruct(clip.frames.flatten(0, 2))
        pair = pixels.view(*clip.frames.shape[:3], *pixels.shape[1:])  # [B, 2, cameras, 3, h, w]
        moved = ((pair[:, 1] - pair[:, 0]).abs().amax(-3, keepdim=True) > MOVED).float()
        weight = 1 + self.config.motion_weight * moved.unsqueeze(1).expand_as(pair).reshape(pixels.shape)
        error = (weight * (reconstruction - pixels).abs()).mean()
        return error, read_numbers({"reconstruction": (reconstruction - pixels).abs().mean()})
