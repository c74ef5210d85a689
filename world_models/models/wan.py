"""Video models of the Wan 2.2 family as world models: weights in the layout of ``diffusers``, actions added.

The four observations of a prediction are a video of four latent frames, cameras side by side:

    first | previous | current | next          time 0 for the three that are known, s for the one to denoise

One time per token is how the family's text-and-image model receives its first frame. Actions and state take the place
of the text: a small module produces the tokens that cross-attention reads. Attention is bidirectional, so nothing is
prefilled; every denoising step runs the whole network over four frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policies.policy import RobotSpec
from sims.numbers.ranges import Width
from world_models.models.autoencoder import Autoencoder, AutoencoderConfig
from world_models.models.diffusers_networks import build_network, load_network, settings_of
from world_models.models.flow_model import (
    CleanEstimate,
    FlowWorldModel,
    FlowWorldModelConfig,
    HistoryPrefill,
    read_out_heads,
)
from world_models.world_model import History, WorldModelError

TRANSFORMER = "WanTransformer3DModel"


@dataclass(frozen=True, kw_only=True)
class WanConfig(FlowWorldModelConfig):
    """``folder``: of a ``diffusers`` pipeline with ``transformer`` and ``vae``, which replace the two settings below.

    ``transformer``: arguments of WanTransformer3DModel. ``action_tokens``: tokens for actions and state, made by an MLP
    of ``width``.
    """

    name: Literal["wan"] = "wan"
    folder: Path | None = None
    transformer: dict[str, Any] = field(default_factory=dict)
    autoencoder: AutoencoderConfig = field(
        default_factory=lambda: AutoencoderConfig(kind="AutoencoderKLWan", settings={})
    )
    action_tokens: Width = 8
    width: Width = 512


class WanWorldModel(FlowWorldModel[HistoryPrefill]):
    """Raises WorldModelError where the transformer's channels or patches do not fit the autoencoder's latents."""

    config: WanConfig
    codec: Autoencoder

    def __init__(self, config: WanConfig, robot: RobotSpec) -> None:
        transformer = config.folder and load_network(config.folder / "transformer", [TRANSFORMER])
        transformer = transformer or build_network(TRANSFORMER, config.transformer)
        vae = config.folder and replace(config.autoencoder, folder=config.folder / "vae")
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
                f"autoencoder has {channels}; models that take an image as further channels are not supported"
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
        self.action_tokens = nn.Linear(config.width, config.action_tokens * settings["text_dim"])
        self.state, self.error = read_out_heads(self.cameras * channels + config.width, robot.state_dim)

    def prefill(self, history: History) -> HistoryPrefill:
        return HistoryPrefill(history=history)

    def estimate(
        self, prefill: HistoryPrefill, action: Tensor, length: Tensor, noisy: Tensor, t: Tensor
    ) -> CleanEstimate:
        history = prefill.history
        condition = self.condition(self.conditioning(history, action, length, t))
        frames = (history.first, history.previous, history.current, noisy)
        video = torch.stack([_side_by_side(frame) for frame in frames], dim=2)
        times = torch.cat([t.new_zeros(len(t), 3 * self.tokens), t[:, None].expand(-1, self.tokens)], dim=1)
        with self.autocast(self.device):
            tokens = self.action_tokens(condition).unflatten(1, (self.config.action_tokens, -1))
            velocity = self.transformer(video, 1000 * times, tokens, return_dict=False)[0][:, :, -1].float()
        velocity = velocity.unflatten(3, (self.cameras, -1)).permute(0, 3, 1, 2, 4)
        clean = noisy - t[:, None, None, None, None] * velocity
        pooled = torch.cat([clean.mean((3, 4)).flatten(1), condition], dim=1)
        return self.read_out(clean, pooled, history, self.expected_change(history, action, length))


def _side_by_side(latent: Float[Tensor, "B cameras C h w"]) -> Float[Tensor, "B C h cameras_w"]:
    return latent.permute(0, 2, 3, 1, 4).flatten(3)
