"""A causal diffusion transformer (Peebles & Xie 2023) over latents; settings give 1 M to 300 M parameters and more.

An observation is a block of tokens of all cameras. Attention is bidirectional within a block, causal across blocks:

                        keys    first   previous   current   next
    queries   first              x
              previous           x         x
              current            x         x          x
              next               x         x          x        x      at time s, with actions

so the keys and values of the first three are computed once per observation, and every denoising step for every
``length`` computes one block. Time, actions and state enter through one adaptive layer norm that all layers share, each
with its own offset (Chen et al. 2023, PixArt-alpha, adaLN-single); positions through rotary embeddings of rows and
columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from policies.policy import RobotSpec
from sims.numbers.ranges import Depth, PartialShare, Width
from world_models.models.autoencoder import Autoencoder, AutoencoderConfig
from world_models.models.causal_transformer import CausalTransformer
from world_models.models.flow_model import (
    CleanEstimate,
    FlowWorldModel,
    FlowWorldModelConfig,
    HistoryPrefill,
    read_out_heads,
)
from world_models.world_model import History, WorldModelError

CONTEXT = 3  # blocks before the predicted one: first, previous, current


@dataclass(frozen=True, kw_only=True)
class LatentDiTConfig(FlowWorldModelConfig):
    """``patch``: latent cells per side of a token. ``context_noise``: in a fit, noise up to this level of [0, 1] is
    added to the last two frames (never to the first), and the network is given the level; sampling uses level 0.
    ``compile``: mode of ``torch.compile``; "reduce-overhead" uses CUDA graphs.

    About 12 depth width^2 parameters: 128 x 6 is 1.3 M, 768 x 12 is 89 M, 1024 x 24 is 309 M.
    """

    name: Literal["latent_dit"] = "latent_dit"
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    patch: Width = 2
    width: Width = 256
    depth: Depth = 6
    heads: Width = 4
    context_noise: PartialShare = 0.0
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"

    def __post_init__(self) -> None:
        if self.width % (4 * self.heads):
            raise ValueError(
                f"dynamics.width must be a multiple of 4 heads, got width {self.width}, heads {self.heads}"
            )


@dataclass(frozen=True, kw_only=True)
class DiTPrefill(HistoryPrefill):
    """Keys and values of the context. ``seen``: the current frame as the network is shown it, noised in a fit."""

    seen: Float[Tensor, "*B cameras channels height width"]
    keys: Float[Tensor, "*B depth heads tokens head_width"]
    values: Float[Tensor, "*B depth heads tokens head_width"]


class LatentDiT(FlowWorldModel[DiTPrefill]):
    """Predicts the change of the current frame's latent; untrained, it repeats that frame."""

    config: LatentDiTConfig
    codec: Autoencoder

    def __init__(self, config: LatentDiTConfig, robot: RobotSpec) -> None:
        codec = Autoencoder(config.autoencoder, robot)
        super().__init__(replace(config, autoencoder=codec.config), robot, codec)
        channels, height, width = codec.latent_shape
        if height % config.patch or width % config.patch:
            raise WorldModelError(
                f"dynamics.patch {config.patch} does not divide the latents' {height} x {width} cells"
            )
        self.latent_shape = (self.cameras, channels, height, width)
        rows, columns = height // config.patch, width // config.patch
        cell = channels * config.patch**2
        self.embed, self.embed_noisy = nn.Linear(cell, config.width), nn.Linear(cell, config.width, bias=False)
        self.camera_embedding = nn.Parameter(0.02 * torch.randn(self.cameras, 1, config.width))
        self.role_embedding = nn.Parameter(0.5 * torch.randn(CONTEXT, config.width))
        self.level_embedding = nn.Parameter(0.5 * torch.randn(config.width))
        self.condition = nn.Sequential(
            nn.Linear(self.condition_features, config.width),
            nn.SiLU(),
            nn.Linear(config.width, config.width),
            nn.LayerNorm(config.width),
        )
        self.transformer = CausalTransformer(
            width=config.width, depth=config.depth, heads=config.heads, grid=(self.cameras, rows, columns)
        )
        self.norm, self.out = nn.LayerNorm(config.width), nn.Linear(config.width, cell)
        self.state, self.error = read_out_heads((self.cameras + 1) * config.width, robot.state_dim)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        if config.compile != "off":
            self.transformer.compile(mode=config.compile)

    def prefill(self, history: History) -> DiTPrefill:
        return self._prefill(history, history, torch.zeros(len(history.state), device=self.device))

    def prefill_to_fit(self, history: History, generator: torch.Generator) -> DiTPrefill:
        level = self.config.context_noise * torch.rand(len(history.state), generator=generator, device=self.device)
        share = level[:, None, None, None, None]
        previous, current = (
            torch.lerp(frame, torch.randn(frame.shape, generator=generator, device=self.device), share)
            for frame in (history.previous, history.current)
        )
        return self._prefill(history, replace(history, previous=previous, current=current), level)

    def _prefill(self, history: History, noised: History, level: Float[Tensor, " B"]) -> DiTPrefill:
        """The network sees ``noised`` alone; the frame that the change is added to is of ``history``."""
        with self.autocast(self.device):
            _, (keys, values) = self.transformer(*self.context_blocks(noised, level))
        return DiTPrefill(history=history, seen=noised.current, keys=keys, values=values)

    def context_blocks(
        self, history: History, level: Float[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B 3 tokens width"], Float[Tensor, "B 3 width"]]:
        """Tokens and conditions of first, previous, current."""
        frames = torch.stack([history.first, history.previous, history.current], dim=1)
        levels = torch.stack([torch.zeros_like(level), level, level], dim=1)
        tokens = (self.embed(self._patches(frames)) + self.camera_embedding).flatten(2, 3)
        return tokens, self.role_embedding + levels[..., None] * self.level_embedding

    def next_block(
        self, history: History, action: Tensor, length: Tensor, noisy: Tensor, t: Tensor
    ) -> tuple[Float[Tensor, "B 1 tokens width"], Float[Tensor, "B 1 width"]]:
        """Tokens and condition of the block to denoise; each token also holds the current frame's patch."""
        cells = self.embed_noisy(self._patches(noisy)) + self.embed(self._patches(history.current))
        condition = self.condition(self.conditioning(history, action, length, t))
        return (cells + self.camera_embedding).flatten(1, 2)[:, None], condition[:, None]

    def estimate(self, prefill: DiTPrefill, action: Tensor, length: Tensor, noisy: Tensor, t: Tensor) -> CleanEstimate:
        history = prefill.history
        with self.autocast(self.device):
            tokens, condition = self.next_block(replace(history, current=prefill.seen), action, length, noisy, t)
            hidden, _ = self.transformer(tokens, condition, (prefill.keys, prefill.values))
            hidden = self.norm(hidden[:, 0].unflatten(1, (self.cameras, -1)))  # [B, cameras, cells, width]
            change = self._unpatch(self.out(hidden)).float()
        pooled = torch.cat([hidden.float().mean(2).flatten(1), condition[:, 0].float()], dim=1)
        expected_change = self.expected_change(history, action, length)
        return self.read_out(history.current + change, pooled, history, expected_change)

    def _patches(self, latent: Tensor) -> Float[Tensor, "*B cameras cells features"]:
        flat = F.pixel_unshuffle(latent.flatten(0, -4), self.config.patch)
        return flat.flatten(2).transpose(1, 2).unflatten(0, latent.shape[:-3])

    def _unpatch(self, cells: Float[Tensor, "B cameras cells features"]) -> Tensor:
        _, _, height, width = self.latent_shape
        grid = (
            cells.flatten(0, 1).transpose(1, 2).unflatten(2, (height // self.config.patch, width // self.config.patch))
        )
        return F.pixel_shuffle(grid, self.config.patch).unflatten(0, cells.shape[:2])
