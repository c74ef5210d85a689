"""A causal diffusion transformer (Peebles & Xie 2023) over latents: one design from 1 M to 300 M parameters and more.

A look is a block of tokens, all cameras together. Attention is bidirectional within a block and causal across blocks:

                        keys    first   previous   current   next
    queries   first              x
              previous           x         x
              current            x         x          x
              next               x         x          x        x      asked at time s, with actions

so the keys and values of the first three are computed once per look, and every denoising step and every ``length``
asked from it computes one block. Time, actions and state enter by one adaptive layer norm that all layers share, each
with an offset of its own (Chen et al. 2023, PixArt-alpha, adaLN-single); places by rotary embedding over rows and
columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from policies.denoising.policy import RobotSpec
from world_models.models.autoencoder import Autoencoder, AutoencoderConfig
from world_models.models.flow_model import Denoised, FlowWorld, FlowWorldConfig, Memory, read_out_heads
from world_models.world_model import Moment, WorldModelError

CONTEXT = 3  # blocks before the predicted one: first, previous, current
Cache = tuple[Tensor, Tensor]  # keys and values, each [B, depth, heads, tokens, head width]


@dataclass(frozen=True, kw_only=True)
class LatentDiTConfig(FlowWorldConfig):
    """``patch``: latent cells per side of a token. ``context_noise``: while fitting, the last two looks (never the
    first) are noised up to this level of [0, 1], and the level is told; imagination gives them clean.
    ``compile``: mode of ``torch.compile``; "reduce-overhead" uses CUDA graphs.

    About 12 depth width^2 parameters: 128 x 6 is 1.3 M, 768 x 12 is 89 M, 1024 x 24 is 309 M.
    """

    name: Literal["latent_dit"] = "latent_dit"
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    patch: int = 2
    width: int = 256
    depth: int = 6
    heads: int = 4
    context_noise: float = 0.0
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (4 * self.heads):
            raise ValueError(f"world.width must be a multiple of 4 heads, got width {self.width}, heads {self.heads}")
        if not 0 <= self.context_noise < 1:
            raise ValueError(f"world.context_noise must be within [0, 1), got {self.context_noise}")


@dataclass(frozen=True, kw_only=True)
class DiTMemory(Memory):
    """Keys and values of the context."""

    keys: Float[Tensor, "*B depth heads tokens head_width"]
    values: Float[Tensor, "*B depth heads tokens head_width"]


class LatentDiT(FlowWorld[DiTMemory]):
    """Predicts the change of the last look's latent: untrained, it repeats that look."""

    config: LatentDiTConfig
    codec: Autoencoder

    def __init__(self, config: LatentDiTConfig, robot: RobotSpec) -> None:
        codec = Autoencoder(config.autoencoder, robot)
        super().__init__(replace(config, autoencoder=codec.config), robot, codec)
        channels, height, width = codec.latent_shape
        if height % config.patch or width % config.patch:
            raise WorldModelError(f"world.patch {config.patch} does not divide the latents' {height} x {width} cells")
        self.latent_shape = (self.cameras, channels, height, width)
        rows, columns = height // config.patch, width // config.patch
        cell = channels * config.patch**2
        self.look, self.noisy = nn.Linear(cell, config.width), nn.Linear(cell, config.width, bias=False)
        self.camera = nn.Parameter(0.02 * torch.randn(self.cameras, 1, config.width))
        self.role = nn.Parameter(0.5 * torch.randn(CONTEXT, config.width))
        self.level = nn.Parameter(0.5 * torch.randn(config.width))
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

    def prefill(self, moment: Moment) -> DiTMemory:
        moment = moment.to(self.device)
        return self._prefill(moment, moment, torch.zeros(len(moment.state), device=self.device))

    def prefill_to_fit(self, moment: Moment, generator: torch.Generator) -> DiTMemory:
        level = self.config.context_noise * torch.rand(len(moment.state), generator=generator).to(self.device)
        share = level[:, None, None, None, None]
        previous, current = (
            torch.lerp(look, torch.randn(look.shape, generator=generator).to(look), share)
            for look in (moment.previous, moment.current)
        )
        return self._prefill(moment, replace(moment, previous=previous, current=current), level)

    def _prefill(self, moment: Moment, shown: Moment, level: Float[Tensor, " B"]) -> DiTMemory:
        """``shown``: the moment as attention sees it; the last look that the change is added to stays clean."""
        with self.autocast(self.device):
            _, (keys, values) = self.transformer(*self.context_blocks(shown, level))
        return DiTMemory(moment=moment, keys=keys, values=values)

    def context_blocks(
        self, moment: Moment, level: Float[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B 3 tokens width"], Float[Tensor, "B 3 width"]]:
        """Tokens and conditions of first, previous, current."""
        looks = torch.stack([moment.first, moment.previous, moment.current], dim=1)
        told = torch.stack([torch.zeros_like(level), level, level], dim=1)
        tokens = (self.look(self._patches(looks)) + self.camera).flatten(2, 3)
        return tokens, self.role + told[..., None] * self.level

    def next_block(
        self, moment: Moment, action: Tensor, length: Tensor, noisy: Tensor, t: Tensor
    ) -> tuple[Float[Tensor, "B 1 tokens width"], Float[Tensor, "B 1 width"]]:
        """Tokens and condition of the block to denoise; it sees the last look in place."""
        cells = self.noisy(self._patches(noisy)) + self.look(self._patches(moment.current))
        condition = self.condition(self.conditioning(moment, action, length, t))
        return (cells + self.camera).flatten(1, 2)[:, None], condition[:, None]

    def denoised(self, memory: DiTMemory, action: Tensor, length: Tensor, noisy: Tensor, t: Tensor) -> Denoised:
        moment = memory.moment
        with self.autocast(self.device):
            tokens, condition = self.next_block(moment, action, length, noisy, t)
            hidden, _ = self.transformer(tokens, condition, (memory.keys, memory.values))
            hidden = self.norm(hidden[:, 0].unflatten(1, (self.cameras, -1)))  # [B, cameras, cells, width]
            change = self._unpatch(self.out(hidden)).float()
        pooled = torch.cat([hidden.float().mean(2).flatten(1), condition[:, 0].float()], dim=1)
        expected = self.moved(self.conditioning(moment, action, length, t))
        return self.read_out(moment.current + change, pooled, moment, expected)

    def _patches(self, latent: Tensor) -> Float[Tensor, "*B cameras cells features"]:
        flat = F.pixel_unshuffle(latent.flatten(0, -4), self.config.patch)
        return flat.flatten(2).transpose(1, 2).unflatten(0, latent.shape[:-3])

    def _unpatch(self, cells: Float[Tensor, "B cameras cells features"]) -> Tensor:
        _, _, height, width = self.latent_shape
        grid = (
            cells.flatten(0, 1).transpose(1, 2).unflatten(2, (height // self.config.patch, width // self.config.patch))
        )
        return F.pixel_shuffle(grid, self.config.patch).unflatten(0, cells.shape[:2])


class CausalTransformer(nn.Module):
    """Blocks of tokens, causal across blocks. ``grid``: cameras, rows, columns of the tokens of a block."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, *, width: int, depth: int, heads: int, grid: tuple[int, int, int]) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.layers = nn.ModuleList([_Layer(width, heads) for _ in range(depth)])
        angle = _angles(width // heads, grid)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(
        self,
        tokens: Float[Tensor, "B blocks tokens width"],
        condition: Float[Tensor, "B blocks width"],
        past: Cache | None = None,
    ) -> tuple[Float[Tensor, "B blocks tokens width"], Cache]:
        """The blocks that follow those of ``past``; what they add to it: keys and values of these blocks alone."""
        _, blocks, size, _ = tokens.shape
        modulation = self.modulation(condition).unflatten(-1, (6, 1, -1))  # [B, blocks, 6, 1, width]
        seen = 0 if past is None else past[0].shape[-2] // size
        mask = None if blocks == 1 else block_causal(blocks, seen, size, tokens.device)
        place = self.cosine.repeat(blocks, 1), self.sine.repeat(blocks, 1)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            before = None if past is None else (past[0][:, i], past[1][:, i])
            tokens, (key, value) = layer(tokens, modulation, place, mask, before)
            keys.append(key)
            values.append(value)
        return tokens, (torch.stack(keys, dim=1), torch.stack(values, dim=1))


class _Layer(nn.Module):
    """Attention with normalized queries and keys, then an MLP, each shifted, scaled and gated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.offset = nn.Parameter(0.02 * torch.randn(6, 1, width))
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_q, self.norm_k = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(
        self, x: Tensor, modulation: Tensor, place: Cache, mask: Tensor | None, past: Cache | None
    ) -> tuple[Tensor, Cache]:
        shift1, scale1, gate1, shift2, scale2, gate2 = (modulation + self.offset).unbind(2)
        mixed, cache = self._attend(torch.addcmul(shift1, self.norm1(x), 1 + scale1), place, mask, past)
        x = x + gate1 * mixed
        return x + gate2 * self.mlp(torch.addcmul(shift2, self.norm2(x), 1 + scale2)), cache

    def _attend(self, x: Tensor, place: Cache, mask: Tensor | None, past: Cache | None) -> tuple[Tensor, Cache]:
        q, k, v = self.qkv(x.flatten(1, 2)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Normalized in float32: in bfloat16 rms_norm warns and leaves its fused path.
        q, k = (_rotate(norm(x.float()), place).to(v) for norm, x in ((self.norm_q, q), (self.norm_k, k)))
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2)).view_as(x), (k, v)


def block_causal(blocks: int, seen: int, size: int, device: torch.device) -> Bool[Tensor, "queries keys"]:
    """True where ``blocks`` new blocks of ``size`` tokens may look: at all ``seen`` ones, themselves, those before."""
    query = torch.arange(seen, seen + blocks, device=device).repeat_interleave(size)
    key = torch.arange(seen + blocks, device=device).repeat_interleave(size)
    return query[:, None] >= key


def _angles(width: int, grid: tuple[int, int, int]) -> Float[Tensor, "tokens half_width"]:
    """Rotary angles (Su et al. 2021, Eq. 15): half of the pairs turn with the row, half with the column."""
    cameras, rows, columns = grid
    frequency = 100.0 ** -(torch.arange(width // 4) / (width // 4))
    row = torch.arange(rows).repeat_interleave(columns)[:, None] * frequency
    column = torch.arange(columns).repeat(rows)[:, None] * frequency
    return torch.cat([row, column], dim=1).repeat(cameras, 1)


def _rotate(x: Float[Tensor, "B heads tokens width"], place: Cache) -> Tensor:
    cosine, sine = place
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1)
