"""Video models of the Wan 2.2 family as world models: weights in the layout of ``diffusers``, actions added.

The four looks that a prediction knows or makes are a video of four latent frames, cameras side by side:

    first | previous | current | next          time 0 for the three that are known, s for the one to denoise

A time for every token is how the family's text-and-image model is told its first frame. Actions and state take
the place of the words: a small module writes the tokens that cross-attention reads. Attention is bidirectional, so
nothing is computed once per look; every denoising step runs the whole network over four frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policies.denoising.policy import RobotSpec
from world_models.models.autoencoder import Autoencoder, AutoencoderConfig, build, load, settings_of
from world_models.models.flow_model import Denoised, FlowWorld, FlowWorldConfig, Memory, read_out_heads
from world_models.world_model import Moment, WorldModelError

TRANSFORMER = "WanTransformer3DModel"


@dataclass(frozen=True, kw_only=True)
class WanConfig(FlowWorldConfig):
    """``folder``: of a ``diffusers`` pipeline, with ``transformer`` and ``vae`` in it; what they are replaces the
    settings below. ``transformer``: arguments of WanTransformer3DModel. ``words``: tokens that actions and state
    become, by an MLP of ``width``.
    """

    name: Literal["wan"] = "wan"
    folder: str | None = None
    transformer: dict[str, Any] = field(default_factory=dict)
    autoencoder: AutoencoderConfig = field(
        default_factory=lambda: AutoencoderConfig(kind="AutoencoderKLWan", settings={})
    )
    words: int = 8
    width: int = 512


class WanWorld(FlowWorld[Memory]):
    """Raises WorldModelError where the transformer's channels or patches do not fit the autoencoder's latents."""

    config: WanConfig
    codec: Autoencoder

    def __init__(self, config: WanConfig, robot: RobotSpec) -> None:
        transformer = config.folder and load(Path(config.folder) / "transformer", [TRANSFORMER])
        transformer = transformer or build(TRANSFORMER, config.transformer)
        vae = config.folder and replace(config.autoencoder, folder=str(Path(config.folder) / "vae"))
        codec = Autoencoder(vae or config.autoencoder, robot)
        super().__init__(
            replace(config, folder=None, transformer=settings_of(transformer), autoencoder=codec.config), robot, codec
        )
        self.transformer = transformer
        channels, height, width = codec.latent_shape
        self.latent_shape = (self.cameras, channels, height, width)
        settings = self.config.transformer
        if (settings["in_channels"], settings["out_channels"]) != (channels, channels):
            raise WorldModelError(
                f"the transformer takes {settings['in_channels']} and gives {settings['out_channels']} channels, the "
                f"autoencoder has {channels}; models that take a picture as further channels are not supported"
            )
        depth, rows, columns = settings["patch_size"]
        if depth != 1 or height % rows or self.cameras * width % columns:
            raise WorldModelError(
                f"patches of {depth} x {rows} x {columns} do not divide latents of {height} x {self.cameras} * {width}"
            )
        self.tokens = (height // rows) * (self.cameras * width // columns)  # of one frame
        self.condition = nn.Sequential(
            nn.Linear(self.condition_features, config.width),
            nn.SiLU(),
            nn.Linear(config.width, config.width),
            nn.LayerNorm(config.width),
        )
        self.words = nn.Linear(config.width, config.words * settings["text_dim"])
        self.state, self.error = read_out_heads(self.cameras * channels + config.width, robot.state_dim)

    def prefill(self, moment: Moment) -> Memory:
        return Memory(moment=moment.to(self.device))

    def denoised(self, memory: Memory, action: Tensor, length: Tensor, noisy: Tensor, t: Tensor) -> Denoised:
        moment = memory.moment
        features = self.conditioning(moment, action, length, t)
        condition = self.condition(features)
        video = torch.stack(
            [_side_by_side(look) for look in (moment.first, moment.previous, moment.current, noisy)], dim=2
        )
        times = torch.cat([t.new_zeros(len(t), 3 * self.tokens), t[:, None].expand(-1, self.tokens)], dim=1)
        with self.autocast(self.device):
            words = self.words(condition).unflatten(1, (self.config.words, -1))
            velocity = self.transformer(video, 1000 * times, words, return_dict=False)[0][:, :, -1].float()
        velocity = velocity.unflatten(3, (self.cameras, -1)).permute(0, 3, 1, 2, 4)
        clean = noisy - t[:, None, None, None, None] * velocity
        pooled = torch.cat([clean.mean((3, 4)).flatten(1), condition], dim=1)
        return self.read_out(clean, pooled, moment, self.moved(features))


def _side_by_side(latent: Float[Tensor, "B cameras C h w"]) -> Float[Tensor, "B C h cameras_w"]:
    return latent.permute(0, 2, 3, 1, 4).flatten(3)
