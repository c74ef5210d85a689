"""Image autoencoders of ``diffusers`` as codecs of latent world models: loaded from a folder, or fitted.

Every image is encoded on its own. Latents are scaled to unit variance per channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from policies.policy import RobotSpec
from world_models.models.diffusers_networks import build_network, load_network, settings_of
from world_models.models.flow_model import PixelCodec
from world_models.world_model import WorldModelError

Kind = Literal["AutoencoderTiny", "AutoencoderKL", "AutoencoderDC", "AutoencoderKLWan"]
KINDS: tuple[str, ...] = get_args(Kind)
SCALE_BATCH = 64  # images encoded at a time to measure scales


def _tiny() -> dict[str, Any]:
    """A quarter of the resolution, 8 channels, 0.3 M parameters."""
    widths, depths = [48, 48, 48], [1, 1, 1]
    return {
        "encoder_block_out_channels": widths,
        "decoder_block_out_channels": widths,
        "num_encoder_blocks": depths,
        "num_decoder_blocks": depths,
        "latent_channels": 8,
    }


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """``settings``: arguments of the ``diffusers`` class ``kind``. ``folder``: of a trained network that ``diffusers``
    saved; kind and settings are then read from it and it is not fitted.
    """

    kind: Kind = "AutoencoderTiny"
    settings: dict[str, Any] = field(default_factory=_tiny)
    folder: Path | None = None


class Autoencoder(nn.Module):
    """Implements ``flow_model.Codec``; ``latent_shape`` is channels, height, width.

    ``config`` rebuilds this autoencoder without its folder: ``kind`` and ``settings`` are as loaded.
    """

    shift: Tensor
    scale: Tensor
    limit = 6.0  # standard deviations

    def __init__(self, config: AutoencoderConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.untrained = config.folder is None
        self.network: Any = (
            load_network(config.folder, KINDS) if config.folder else build_network(config.kind, config.settings)
        )
        kind: Any = type(self.network).__name__
        settings = settings_of(self.network)
        self.config = replace(config, kind=kind, settings=settings, folder=None)
        self.video = kind == "AutoencoderKLWan"  # an image is a video of one frame
        self.latent_shape = channels, _, _ = self._probe(*robot.image_size)
        self.knows_scale = settings.get("latents_mean") is not None
        for name, default, known in (("shift", 0.0, "latents_mean"), ("scale", 1.0, "latents_std")):
            values = settings[known] if self.knows_scale else [default] * channels
            self.register_buffer(name, torch.tensor(values).view(channels, 1, 1))

    @torch.no_grad()
    def _probe(self, height: int, width: int) -> tuple[int, int, int]:
        """Latent shape of an image of this size. WorldModelError if the network does not reproduce that size."""
        try:
            latent = self._encode(torch.zeros(1, 3, height, width))
            shape = tuple(self._decode(latent).shape[1:])
        except RuntimeError as error:
            raise WorldModelError(f"{self.config.kind} with these settings does not run: {error}") from None
        if shape != (3, height, width):
            raise WorldModelError(
                f"{self.config.kind} turns images of {height} x {width} into {shape[1]} x {shape[2]}; "
                "record images whose sides are multiples of its reduction"
            )
        channels, rows, columns = latent.shape[1:]
        return channels, rows, columns

    @torch.no_grad()
    def encode(self, images: UInt8[Tensor, "N height width 3"]) -> Float[Tensor, "N channels h w"]:
        return (self._encode(self._pixels(images)) - self.shift) / self.scale

    @torch.no_grad()
    def decode(self, latent: Float[Tensor, "N channels h w"]) -> UInt8[Tensor, "N height width 3"]:
        return PixelCodec().decode(self._decode(latent.to(self.shift) * self.scale + self.shift).float())

    def reconstruct(
        self, images: UInt8[Tensor, "N height width 3"]
    ) -> tuple[Float[Tensor, "N 3 height width"], Float[Tensor, "N 3 height width"]]:
        """PixelCodec in [-1, 1], and their reconstruction; differentiable."""
        pixels = self._pixels(images)
        return pixels, self._decode(self._encode(pixels))

    @torch.no_grad()
    def fit_scales(self, images: UInt8[Tensor, "N height width 3"]) -> None:
        """Set shift and scale to the latents' mean and standard deviation, unless the network has its own."""
        if self.knows_scale:
            return
        latent = (
            torch.cat([self._encode(self._pixels(part)) for part in images.split(SCALE_BATCH)])
            .transpose(0, 1)
            .flatten(1)
        )
        self.shift.copy_(latent.mean(1).view_as(self.shift))
        self.scale.copy_(latent.std(1).clamp(min=1e-3).view_as(self.scale))

    def _pixels(self, images: Tensor) -> Tensor:
        return PixelCodec().encode(images)

    def _encode(self, pixels: Tensor) -> Tensor:
        out = self.network.encode(pixels.unsqueeze(2) if self.video else pixels, return_dict=False)[0]
        latent = out if isinstance(out, Tensor) else out.mode()  # a distribution where the kind is variational
        return latent.squeeze(2) if self.video else latent

    def _decode(self, latent: Tensor) -> Tensor:
        out = self.network.decode(latent.unsqueeze(2) if self.video else latent, return_dict=False)[0]
        return out.squeeze(2) if self.video else out
