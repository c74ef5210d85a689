"""Our own compact vision-language-action network: about 1 M parameters on a CPU, 100 M and more by widths and depths.

Images are read by one small convolutional encoder per camera, conditioned on the instruction (FiLM), and pooled by
attention whose queries come from the instruction. A pooled value carries both what was seen and where, so a token
says "the red block, at x = .3, y = -.1" after few examples. An action expert, a transformer over action tokens with
adaptive LayerNorm on flow time, reads these tokens by cross-attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn

from policies.denoising.kernels import Prediction
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation

# Attention must begin peaked, not spread: a block covers two cells of 256, and under a flat map its gradient drowns
# (16 finds a named block after 10k frames, 1 not after 20k). Coordinates are scaled to weigh as much as appearance.
QUERY_GAIN = 16.0
COORDINATE_GAIN = 3.0
READ_GAIN = 4.0  # attention over words begins peaked likewise


@dataclass(frozen=True, kw_only=True)
class VLAConfig:
    """Defaults are the CPU network for 64 x 64 images.

    ``image_widths``, ``image_depths``: channels and residual 3 x 3 blocks per stage; the first stage follows a patch
    stem of stride ``image_patch``, each later one halves the map. ``queries`` x ``query_heads`` attention maps per
    camera give ``queries`` tokens. ``action_patch`` actions form one token (1: every action its own).
    ``forecast_steps``: control steps ahead at which imitation has the encoder guess the state, besides where the
    demonstration ends; ``forecast_dims``: only these first dimensions of it (null: all).
    """

    image_patch: int = 4
    image_widths: tuple[int, ...] = (32,)
    image_depths: tuple[int, ...] = (1,)
    queries: int = 4
    query_heads: int = 4
    text_width: int = 64
    text_depth: int = 1
    width: int = 192
    depth: int = 2
    heads: int = 4
    mlp_ratio: int = 2
    time_width: int = 64
    action_horizon: int = 8
    action_patch: int = 8
    forecast_steps: tuple[int, ...] = (16, 32)
    forecast_dims: int | None = None

    def __post_init__(self) -> None:
        if len(self.image_widths) != len(self.image_depths) or not self.image_widths:
            raise ValueError(
                "vla.image_widths and vla.image_depths need one entry per stage, "
                f"got {self.image_widths} and {self.image_depths}"
            )
        if self.action_horizon % self.action_patch:
            raise ValueError(
                f"vla.action_patch must divide action_horizon {self.action_horizon}, got {self.action_patch}"
            )
        if min(self.forecast_steps, default=1) < 1:
            raise ValueError(f"vla.forecast_steps must be at least 1, got {self.forecast_steps}")
        for name, width in (("width", self.width), ("text_width", self.text_width)):
            if width % self.heads:
                raise ValueError(f"vla.{name} must be a multiple of heads {self.heads}, got {width}")


@dataclass(frozen=True, kw_only=True)
class Context(TensorDataclass):
    """What one look gave. ``tokens`` feed the action expert; ``pooled`` is the summary that conditions it."""

    tokens: Float[Tensor, "*B context width"]
    pooled: Float[Tensor, "*B pooled_width"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A context as the expert reads it.

    ``summary`` [B, 1, 1, width]; ``anchor`` [B, 1, H, A], the action it would guess before any denoising;
    ``keys_values`` of each block.
    """

    summary: Tensor
    anchor: Tensor
    keys_values: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Words(TensorDataclass):
    """An instruction, word by word; ``exists`` is false in the slots that it leaves empty."""

    tokens: Float[Tensor, "*B max_words text_width"]
    exists: Bool[Tensor, "*B max_words"]


class WordReader(nn.Module):
    """``maps`` attention maps over the words, peaked from the start, so that each hands on one word whole.

    In one vector for the whole instruction the color of a mat is hidden among eight other words, and imitation needs
    twice the updates before it pushes to the right one (docs/algorithms.md).
    """

    def __init__(self, width: int, maps: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, maps)
        with torch.no_grad():
            self.score.weight *= READ_GAIN

    def forward(self, words: Words) -> Float[Tensor, "B maps text_width"]:
        """Zeros if there are no words."""
        exists = words.exists.unsqueeze(-1)
        weight = self.score(words.tokens).masked_fill(~exists, -1e4).softmax(dim=1) * exists
        return weight.transpose(1, 2) @ words.tokens


class TextEncoder(nn.Module):
    """Instruction bytes to words: letters (with their place in the word) are summed per word, words attend.

    A word's place in the sentence goes in with its letters, before anything nonlinear and as large as they are:
    the color of a block and the same color of a mat must look different before anything is learned.
    """

    max_words = 24
    max_letters = 16

    def __init__(self, *, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(256, width)
        self.place = nn.Embedding(self.max_letters, width)
        self.position = nn.Parameter(torch.randn(self.max_words, width))
        self.letters = nn.LayerNorm(width)
        self.word = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.blocks = nn.ModuleList([_Block(width=width, heads=heads, mlp_ratio=2) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, text: UInt8[Tensor, "B text_bytes"]) -> Words:
        """Words past the 24th share its slot."""
        code = text.long()
        letter = (code != 0) & (code != ord(" "))
        index = torch.arange(code.shape[1], device=code.device)
        # Where each byte's word starts: a running maximum, spelled so that ONNX has it too.
        starts = (torch.where(letter, 0, index + 1)[:, None] * (index <= index[:, None])).amax(dim=2)
        place = (index - starts).clamp(0, self.max_letters - 1)
        first = letter & (torch.cat([torch.ones_like(letter[:, :1]), ~letter[:, :-1]], dim=1))
        word = (first.long().cumsum(1) - 1).clamp(0, self.max_words - 1)
        member = F.one_hot(word, self.max_words) * letter.unsqueeze(-1)  # [B, bytes, words]
        letters = F.gelu(self.letter(code) + self.place(place))
        words = member.transpose(1, 2).to(letters.dtype) @ letters
        exists = member.any(dim=1)
        tokens = self.word(self.letters(words) + self.position)
        for block in self.blocks:
            tokens = block(tokens, exists)
        return Words(tokens=self.norm(tokens), exists=exists)


class CameraEncoder(nn.Module):
    """One camera's image to ``queries`` tokens that say what was seen and where, steered by the instruction."""

    def __init__(self, config: VLAConfig) -> None:
        super().__init__()
        widths, patch = config.image_widths, config.image_patch
        self.stem = nn.Conv2d(3, widths[0], kernel_size=patch, stride=patch)
        self.film = nn.ModuleList()
        self.blocks = nn.ModuleList()
        self.shrink = nn.ModuleList()
        for stage, (width, depth) in enumerate(zip(widths, config.image_depths, strict=True)):
            wider = stage + 1 < len(widths)
            self.shrink.append(nn.Conv2d(width, widths[stage + 1], 2, stride=2) if wider else nn.Identity())
            self.film.append(nn.Linear(config.text_width, 2 * width))
            self.blocks.append(nn.Sequential(*[_ConvBlock(width) for _ in range(depth)]))
        self.norm = nn.LayerNorm(widths[-1])
        maps = config.queries * config.query_heads
        self.queries, self.maps = config.queries, maps
        self.reader = WordReader(config.text_width, maps)
        self.query = nn.Parameter(torch.empty(maps, config.text_width, widths[-1]))
        self.query_bias = nn.Parameter(torch.empty(maps, widths[-1]))
        # One matrix per query: their tokens must stay apart when they are averaged or attended to.
        values = config.query_heads * (widths[-1] + 2)
        self.token = nn.Parameter(torch.empty(config.queries, values, config.width))
        self.token_bias = nn.Parameter(torch.zeros(config.queries, config.width))
        nn.init.normal_(self.token, std=values**-0.5)
        bound = config.text_width**-0.5
        nn.init.uniform_(self.query, -QUERY_GAIN * bound, QUERY_GAIN * bound)
        nn.init.uniform_(self.query_bias, -bound, bound)

    def forward(
        self, image: Tensor, words: Words, text: Float[Tensor, "B text_width"]
    ) -> Float[Tensor, "B queries width"]:
        """image: [B, 3, height, width] float in [-1, 1], channels last; ``text``: all words in one."""
        x = self.stem(image)
        for film, blocks, shrink in zip(self.film, self.blocks, self.shrink, strict=True):
            scale, shift = film(text)[..., None, None].chunk(2, dim=1)
            x = F.gelu(torch.addcmul(shift, x, 1 + scale))
            x = blocks(x)
            x = shrink(x)
        height, width = x.shape[-2:]
        features = self.norm(x.permute(0, 2, 3, 1).flatten(1, 2))  # [B, P, C]
        query = torch.einsum("bmt,mtc->bmc", self.reader(words), self.query) + self.query_bias
        weight = torch.softmax(query @ features.transpose(1, 2) / math.sqrt(features.shape[-1]), dim=-1)
        what, where = weight @ features, weight @ _coordinates(height, width, features)
        found = torch.cat([what, where], dim=-1).view(len(features), self.queries, -1)
        return torch.einsum("bqv,qvw->bqw", found, self.token) + self.token_bias


class ActionExpert(nn.Module):
    """Predicts the objective's target at x_t. Time adapts every LayerNorm; gates and the last layer start at zero."""

    def __init__(self, config: VLAConfig, *, action_dim: int, pooled_width: int) -> None:
        super().__init__()
        self.config = config
        tokens = config.action_horizon // config.action_patch
        width = config.width
        # Each action's own time goes in beside it, so that a clean prefix is told apart inside one token.
        self.inputs = nn.Linear(config.action_patch * (action_dim + 1), width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.pooled = nn.Sequential(nn.Linear(pooled_width, width), nn.GELU(), nn.Linear(width, width))
        self.time = nn.Sequential(nn.Linear(config.time_width, config.time_width), nn.SiLU())
        self.blocks = nn.ModuleList([_ExpertBlock(config, attend=tokens > 1) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.adapt = nn.Linear(config.time_width, 2 * width)
        self.target = nn.Linear(width, config.action_patch * action_dim)
        self.anchor = nn.Linear(width, config.action_horizon * action_dim)
        self.noise: nn.Linear | None = None
        for layer in (self.adapt, self.target):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def add_noise_head(self) -> None:
        """Start a noise head at 0, the geometric middle of its bounds. Does nothing if there is one."""
        if self.noise is None:
            self.noise = nn.Linear(self.target.in_features, self.target.out_features).to(self.target.weight.device)
            nn.init.zeros_(self.noise.weight)
            nn.init.zeros_(self.noise.bias)

    def remember(self, context: Context) -> Memory:
        """Everything that does not depend on x_t or t, once per look."""
        summary = self.pooled(context.pooled)
        anchor = self.anchor(summary).unflatten(-1, (self.config.action_horizon, -1)).unsqueeze(1)
        return Memory(
            summary=summary[:, None, None],
            anchor=anchor,
            keys_values=[block.remember(context.tokens) for block in self.blocks],  # type: ignore[operator]
        )

    def forward(self, x_t: Float[Tensor, "B S H A"], t: Tensor, memory: Memory) -> Prediction:
        """t: [B or 1, S], or [B, S, H] where actions have their own time. S: steps that share one context."""
        batch, steps, horizon, action_dim = x_t.shape
        times = (t if t.ndim == 3 else t.unsqueeze(-1)).unsqueeze(-1).expand(-1, -1, horizon, 1)
        patched = torch.cat([x_t, times.expand(batch, -1, -1, -1)], dim=-1)
        patched = patched.view(batch, steps, -1, self.config.action_patch * (action_dim + 1))
        x = self.inputs(patched) + self.position + memory.summary
        per_token = times.reshape(*times.shape[:2], -1, self.config.action_patch).mean(-1)
        if t.ndim == 2:
            per_token = per_token[..., :1]
        condition = self.time(_sinusoid(per_token, self.config.time_width))  # [B or 1, S, tokens or 1, time_width]
        for block, keys_values in zip(self.blocks, memory.keys_values, strict=True):
            x = block(x, condition, keys_values)
        shift, scale = self.adapt(condition).chunk(2, dim=-1)
        x = torch.addcmul(shift, self.norm(x), 1 + scale)
        noise = None if self.noise is None else self.noise(x).view(x_t.shape)
        return Prediction(target=self.target(x).view(x_t.shape), noise=noise)


class VLA(nn.Module):
    """Encoder and action expert. ``encode`` is the look, ``expert`` the step."""

    def __init__(self, config: VLAConfig, *, cameras: int, state_dim: int, action_dim: int) -> None:
        super().__init__()
        self.config = config
        self.cameras = nn.ModuleList([CameraEncoder(config) for _ in range(cameras)])
        self.text = TextEncoder(width=config.text_width, depth=config.text_depth, heads=config.heads)
        self.reader = WordReader(config.text_width, config.heads)
        self.merge = nn.Linear(config.heads * config.text_width, config.text_width)
        self.state = nn.Sequential(nn.Linear(state_dim, config.width), nn.GELU(), nn.Linear(config.width, config.width))
        self.words = nn.Linear(config.text_width, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.pooled_width = config.width * (cameras + 2)
        self.expert = ActionExpert(config, action_dim=action_dim, pooled_width=self.pooled_width)
        self.forecast_dims = state_dim if config.forecast_dims is None else config.forecast_dims
        if not 1 <= self.forecast_dims <= state_dim:
            raise ValueError(
                f"vla.forecast_dims must be within 1..{state_dim}, the state's dimensions, got {self.forecast_dims}"
            )
        self.forecast = nn.Sequential(
            nn.Linear(self.pooled_width, config.width),
            nn.GELU(),
            nn.Linear(config.width, (len(config.forecast_steps) + 1) * self.forecast_dims),
        )
        for module in self.cameras.modules():
            if isinstance(module, nn.Conv2d):  # images arrive channels last; with weights alike nothing is transposed
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)

    def encode(self, obs: Observation, state: Float[Tensor, "B state_dim"]) -> Context:
        """``state`` is normalized; ``obs`` gives the images and the words."""
        words = self._read(obs.instruction)
        text = self._summary(words)
        images = obs.images.permute(1, 0, 4, 2, 3)  # [cameras, B, 3, height, width], channels last in memory
        looks = [
            camera(image.to(text.dtype).mul_(1 / 127.5).sub_(1), words, text)
            for camera, image in zip(self.cameras, images, strict=True)
        ]
        tokens = [*looks, self.state(state).unsqueeze(1), self.words(text).unsqueeze(1)]
        pooled = torch.cat([self.norm(token.mean(dim=1)) for token in tokens], dim=-1)
        return Context(tokens=self.norm(torch.cat(tokens, dim=1)), pooled=pooled)

    def _read(self, text: UInt8[Tensor, "B text_bytes"]) -> Words:
        """A batch repeats few instructions, so each is read once."""
        if len(text) > 1:
            unique, index = torch.unique(text, dim=0, return_inverse=True)
            return self.text(unique)[index]
        return self.text(text)

    def _summary(self, words: Words) -> Float[Tensor, "B text_width"]:
        """Zeros if there are no words."""
        merged = self.merge(self.reader(words).flatten(1))
        return torch.where(words.exists.any(dim=1, keepdim=True), F.layer_norm(merged, merged.shape[-1:]), 0.0)


class _ConvBlock(nn.Module):
    """One 3 x 3 convolution per residual: the map is read by attention, which reaches everywhere at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.conv(x))


class _Block(nn.Module):
    """A transformer block over words, with a mask of the words that exist."""

    def __init__(self, *, width: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_ratio * width), nn.GELU(), nn.Linear(mlp_ratio * width, width))

    def forward(self, x: Tensor, exists: Tensor) -> Tensor:
        q, k, v = (_split(part, self.heads) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        # An empty instruction has no words; every row may then look at the first slot.
        mask = exists.clone()
        mask[:, 0] = True
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.out(_merge(attended))
        return x + self.mlp(self.norm2(x))


class _ExpertBlock(nn.Module):
    """Self-attention over action tokens (if several), cross-attention to the context, MLP; DiT's AdaLN-zero."""

    def __init__(self, config: VLAConfig, *, attend: bool) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width) if attend else None
        self.self_out = nn.Linear(width, width) if attend else None
        self.query = nn.Linear(width, width)
        self.keys_values = nn.Linear(width, 2 * width)
        self.cross_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, config.mlp_ratio * width), nn.GELU(), nn.Linear(config.mlp_ratio * width, width)
        )
        self.adapt = nn.Linear(config.time_width, (9 if attend else 6) * width)
        nn.init.zeros_(self.adapt.weight)
        nn.init.zeros_(self.adapt.bias)

    def remember(self, tokens: Float[Tensor, "B context width"]) -> tuple[Tensor, Tensor]:
        keys, values = self.keys_values(tokens).chunk(2, dim=-1)
        return _split(keys, self.heads), _split(values, self.heads)

    def forward(self, x: Tensor, condition: Tensor, memory: tuple[Tensor, Tensor]) -> Tensor:
        """x: [B, S, tokens, width]; every step S attends to the same memory, and to itself alone."""
        batch, steps, tokens, width = x.shape
        adapted = self.adapt(condition).chunk(9 if self.qkv is not None else 6, dim=-1)
        if self.qkv is not None and self.self_out is not None:
            shift, scale, gate = adapted[6:]
            flat = torch.addcmul(shift, self.norm(x), 1 + scale).view(batch * steps, tokens, width)
            q, k, v = (_split(part, self.heads) for part in self.qkv(flat).chunk(3, dim=-1))
            attended = self.self_out(_merge(F.scaled_dot_product_attention(q, k, v)))
            x = torch.addcmul(x, gate, attended.view(x.shape))
        shift, scale, gate = adapted[:3]
        query = self.query(torch.addcmul(shift, self.norm(x), 1 + scale)).view(batch, steps * tokens, width)
        attended = _merge(F.scaled_dot_product_attention(_split(query, self.heads), *memory))
        x = torch.addcmul(x, gate, self.cross_out(attended).view(x.shape))
        shift, scale, gate = adapted[3:6]
        return torch.addcmul(x, gate, self.mlp(torch.addcmul(shift, self.norm(x), 1 + scale)))


def _split(x: Tensor, heads: int) -> Tensor:
    """[B, N, width] -> [B, heads, N, width / heads]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def _coordinates(height: int, width: int, like: Tensor) -> Tensor:
    """Centers of the map's cells, (x, y) in [-1, 1] times COORDINATE_GAIN, [height * width, 2]."""
    y = (torch.arange(height, device=like.device, dtype=like.dtype) + 0.5) * 2 / height - 1
    x = (torch.arange(width, device=like.device, dtype=like.dtype) + 0.5) * 2 / width - 1
    cells = torch.stack([x.expand(height, width), y[:, None].expand(height, width)], dim=-1)
    return COORDINATE_GAIN * cells.flatten(0, 1)


def _sinusoid(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of periods .01 to 4, [..., width]."""
    periods = torch.logspace(math.log10(0.01), math.log10(4.0), width // 2, device=t.device, dtype=t.dtype)
    angle = t.unsqueeze(-1) * (2 * math.pi / periods)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
