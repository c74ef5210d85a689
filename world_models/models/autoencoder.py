"""An image autoencoder of ``diffusers`` as the codec of a latent world model: loaded from a folder, or fitted here.

Every look is encoded as a picture of its own. Latents are scaled to unit variance, channel by channel.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from policies.denoising.policy import RobotSpec
from policies.tensor_file import read_tensors
from world_models.data.clips import Clip, ClipSampler
from world_models.models.flow_model import Pixels
from world_models.training.optimization import Metrics, Optimization, OptimizerConfig
from world_models.world_model import WorldModelError

Kind = Literal["AutoencoderTiny", "AutoencoderKL", "AutoencoderDC", "AutoencoderKLWan"]
KINDS: tuple[str, ...] = get_args(Kind)
BATCH = 64  # pictures at a time when scales are measured


def _tiny() -> dict[str, Any]:
    """A quarter of the side, 8 channels, .3 M parameters."""
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
    """``settings``: arguments of the ``diffusers`` class ``kind``. ``folder``: where ``diffusers`` saved a trained one;
    kind and settings are then its own, and it is not fitted. ``motion_weight``: how much more pixels count that move.
    """

    kind: Kind = "AutoencoderTiny"
    settings: dict[str, Any] = field(default_factory=_tiny)
    folder: str | None = None
    fit: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(steps=2000))
    motion_weight: float = 9.0


class Autoencoder(nn.Module):
    """``world_models.models.flow_model.Codec`` over a frozen network; ``latent_shape`` is channels, height, width.

    ``config`` is what rebuilds this one without its folder: ``kind`` and ``settings`` as loaded.
    """

    shift: Tensor
    scale: Tensor
    limit = 6.0  # standard deviations

    def __init__(self, config: AutoencoderConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.untrained = config.folder is None
        self.network: Any = load(config.folder, KINDS) if config.folder else build(config.kind, config.settings)
        kind: Any = type(self.network).__name__
        settings = settings_of(self.network)
        self.config = replace(config, kind=kind, settings=settings, folder=None)
        self.video = kind == "AutoencoderKLWan"  # a picture is a video of one frame
        self.latent_shape = channels, _, _ = self._probe(*robot.image_size)
        self.knows_scale = settings.get("latents_mean") is not None
        for name, default, known in (("shift", 0.0, "latents_mean"), ("scale", 1.0, "latents_std")):
            values = settings[known] if self.knows_scale else [default] * channels
            self.register_buffer(name, torch.tensor(values).view(channels, 1, 1))

    @torch.no_grad()
    def _probe(self, height: int, width: int) -> tuple[int, int, int]:
        """What a picture of this size becomes."""
        try:
            latent = self._encode(torch.zeros(1, 3, height, width))
            shape = tuple(self._decode(latent).shape[1:])
        except RuntimeError as error:
            raise WorldModelError(f"{self.config.kind} with these settings does not run: {error}") from None
        if shape != (3, height, width):
            raise WorldModelError(
                f"{self.config.kind} turns pictures of {height} x {width} into {shape[1]} x {shape[2]}; "
                "record pictures whose sides are multiples of its reduction"
            )
        channels, rows, columns = latent.shape[1:]
        return channels, rows, columns

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        return (self._encode(self._pixels(images)) - self.shift) / self.scale

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        return Pixels().decode(self._decode(latent.to(self.shift) * self.scale + self.shift).float())

    def reconstruct(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [N, h, w, 3] to pixels in [-1, 1] [N, 3, h, w], and the same through the bottleneck; differentiable."""
        pixels = self._pixels(images)
        return pixels, self._decode(self._encode(pixels))

    @torch.no_grad()
    def measure(self, images: Tensor) -> None:
        """Set shift and scale to these pictures' mean and standard deviation, unless the network came with its own."""
        if self.knows_scale:
            return
        latent = (
            torch.cat([self._encode(self._pixels(part)) for part in images.split(BATCH)]).transpose(0, 1).flatten(1)
        )
        self.shift.copy_(latent.mean(1).view_as(self.shift))
        self.scale.copy_(latent.std(1).clamp(min=1e-3).view_as(self.scale))

    def _pixels(self, images: Tensor) -> Tensor:
        return Pixels().encode(images.to(self.shift.device))

    def _encode(self, pixels: Tensor) -> Tensor:
        out = self.network.encode(pixels.unsqueeze(2) if self.video else pixels, return_dict=False)[0]
        latent = out if isinstance(out, Tensor) else out.mode()  # a distribution where the kind is variational
        return latent.squeeze(2) if self.video else latent

    def _decode(self, latent: Tensor) -> Tensor:
        out = self.network.decode(latent.unsqueeze(2) if self.video else latent, return_dict=False)[0]
        return out.squeeze(2) if self.video else out


class AutoencoderFitter(Optimization):
    """Weighted absolute error of reconstructed looks; pixels that change between a clip's looks count more."""

    def __init__(self, codec: Autoencoder, clips: ClipSampler, *, seed: int) -> None:
        super().__init__(codec, codec.config.fit, clips, seed=seed)
        self.codec = codec

    def loss(self, clip: Clip) -> tuple[Tensor, Metrics]:
        pixels, again = self.codec.reconstruct(clip.frames.flatten(0, 2))
        pair = pixels.view(*clip.frames.shape[:3], *pixels.shape[1:])  # [B, 2, cameras, 3, h, w]
        moved = ((pair[:, 1] - pair[:, 0]).abs().amax(-3, keepdim=True) > 0.05).float()
        weight = 1 + self.codec.config.motion_weight * moved.unsqueeze(1).expand_as(pair).reshape(pixels.shape)
        error = (weight * (again - pixels).abs()).mean()
        return error, {"reconstruction": (again - pixels).detach().abs().mean().item()}


def settings_of(network: Any) -> dict[str, Any]:
    """The arguments that build a ``diffusers`` network again, as JSON holds them."""
    names = set(inspect.signature(type(network).__init__).parameters) & set(network.config)
    values = {name: network.config[name] for name in sorted(names)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def load(folder: str | Path, kinds: Sequence[str]) -> Any:
    """The network that ``save_pretrained`` of ``diffusers`` wrote into ``folder``, of a class among ``kinds``."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise WorldModelError(f"{folder} has no config.json; give a folder that save_pretrained of diffusers wrote")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if (kind := settings.get("_class_name")) not in kinds:
        raise WorldModelError(f"{folder} holds a {kind}, allowed are {', '.join(kinds)}")
    network = diffusers_class(kind).from_config(settings)
    tensors: dict[str, Tensor] = {}
    try:  # not by from_pretrained: where parts stay in float32 (Wan) that insists on another package, accelerate
        for file in sorted(folder.glob("diffusion_pytorch_model*.safetensors")):
            tensors |= read_tensors(file)[1]
        network.load_state_dict(tensors)
    except (SafetensorError, RuntimeError) as error:
        raise WorldModelError(f"{folder}: the weights do not fit: {' '.join(str(error).split())[:200]}") from None
    return network


def diffusers_class(kind: str) -> Any:
    """Imported late: the package takes seconds to load, and most runs need none of it."""
    import diffusers

    return getattr(diffusers, kind)


def build(kind: str, settings: dict[str, Any]) -> Any:
    """An untrained network. WorldModelError for settings that the class does not take."""
    try:
        return diffusers_class(kind)(**settings)
    except (TypeError, ValueError) as error:
        raise WorldModelError(f"{kind} cannot be built from these settings: {error}") from None
