"""Compact vision-language encoder: images, instruction and proprioception to tokens, for small policies on a CPU.

One small convolutional encoder per camera, conditioned on the instruction (FiLM) and pooled by attention whose queries
come from the instruction. A pooled value holds appearance and image coordinates, so that a token can represent "the
red block, at x = .3, y = -.1" after few examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn

from policies.device import holds_numbers
from policies.normalizer import Normalizer
from policies.policy import Policy, RobotSpec, T, is_trained
from sims.errors import UserError
from sims.numbers.ranges import Depth, Interval, PositiveInt, Width
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation

# Attention must be peaked at initialization: a block covers two cells of 256, and a flat map averages its gradient away
# (gain 16 localizes a named block after 10k frames, gain 1 not after 20k). Coordinates weigh as much as appearance.
QUERY_GAIN = 16.0
COORDINATE_GAIN = 3.0
READ_GAIN = 4.0  # attention over words is peaked at initialization, too


@dataclass(frozen=True, kw_only=True)
class CompactEncoderConfig:
    """Defaults are for 64 x 64 images on a CPU.

    ``image_widths``, ``image_depths``: channels and residual 3 x 3 blocks per stage; the first stage follows a patch
    stem of stride ``image_patch``, each later one halves the map; the images' sides must be multiples of
    ``image_patch`` * 2 ** (stages - 1). ``queries`` x ``query_heads`` attention maps per
    camera give ``queries`` tokens of ``width``. ``forecast_steps``: control steps ahead at which an auxiliary loss of
    behavior cloning predicts the state, besides the demonstration's end; ``forecast_dims``: only its first dimensions
    (null: all). ``landmarks``: how many numbers a head predicts that say where the named objects are; they are learned
    in pretraining (``vla-rl pretrain``) and appended to ``Encoding.pooled``. 0: no such head.
    """

    image_patch: Width = 4
    image_widths: tuple[Width, ...] = (32,)
    image_depths: tuple[Depth, ...] = (1,)
    queries: Width = 4
    query_heads: Width = 4
    text_width: Width = 64
    text_depth: Depth = 1
    text_heads: Width = 4
    width: Width = 192
    forecast_steps: tuple[PositiveInt, ...] = (16, 32)
    forecast_dims: Width | None = None
    landmarks: Annotated[int, Interval(ge=0, le=16384)] = 0

    def __post_init__(self) -> None:
        if len(self.image_widths) != len(self.image_depths) or not self.image_widths:
            raise ValueError(
                "encoder.image_widths and encoder.image_depths need one entry per stage, "
                f"got {self.image_widths} and {self.image_depths}"
            )
        if self.text_width % self.text_heads:
            raise ValueError(
                f"encoder.text_width must be a multiple of text_heads {self.text_heads}, got {self.text_width}"
            )


@dataclass(frozen=True, kw_only=True)
class Encoding(TensorDataclass):
    """One observation, encoded: ``tokens`` for attention, ``pooled`` as a summary vector."""

    tokens: Float[Tensor, "*B context width"]
    pooled: Float[Tensor, "*B pooled_width"]


@dataclass(frozen=True, kw_only=True)
class TextTokens(TensorDataclass):
    """An instruction as one token per word; ``exists`` is False in unused slots."""

    tokens: Float[Tensor, "*B max_words text_width"]
    exists: Bool[Tensor, "*B max_words"]


class TokenAttention(nn.Module):
    """``maps`` attention maps over the words, peaked at initialization, so that each selects one word.

    With one vector for the whole instruction behavior cloning needs twice the updates before it distinguishes the
    color of the object from the color of the goal (docs/algorithms.md).
    """

    def __init__(self, width: int, maps: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, maps)
        with torch.no_grad():
            self.score.weight *= READ_GAIN

    def forward(self, words: TextTokens) -> Float[Tensor, "B maps text_width"]:
        """Zeros if there are no words."""
        exists = words.exists.unsqueeze(-1)
        weight = self.score(words.tokens).masked_fill(~exists, -1e4).softmax(dim=1) * exists
        return weight.transpose(1, 2) @ words.tokens


class TextEncoder(nn.Module):
    """Instruction bytes to words: letter embeddings (with their position) are summed per word, words attend.

    The position in the sentence is added before anything nonlinear and at the same scale: the color of the object and
    the same color of the goal must differ before training.
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

    def forward(self, text: UInt8[Tensor, "B text_bytes"]) -> TextTokens:
        """Any length; words past the 24th share its slot."""
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
        return TextTokens(tokens=self.norm(tokens), exists=exists)


class CameraEncoder(nn.Module):
    """One camera's image to ``queries`` tokens of appearance and position, conditioned on the instruction."""

    def __init__(self, config: CompactEncoderConfig) -> None:
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
        self.queries = config.queries
        self.reader = TokenAttention(config.text_width, maps)
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
        self, image: Tensor, words: TextTokens, text: Float[Tensor, "B text_width"]
    ) -> Float[Tensor, "B queries width"]:
        """image: [B, 3, height, width] float in [-1, 1], channels last; ``text``: summary of all words."""
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


def _check_image_size(config: CompactEncoderConfig, image_size: tuple[int, int]) -> None:
    """The stem takes patches, and every later stage halves the map; what is left over nobody would see."""
    unit = config.image_patch * 2 ** (len(config.image_widths) - 1)
    if all(side and side % unit == 0 for side in image_size):
        return
    height, width = (" or ".join(map(str, _multiples_beside(side, unit))) for side in image_size)
    raise UserError(
        f"the images (sim.image_size) are {image_size[0]}x{image_size[1]} pixels, but encoder.image_patch "
        f"{config.image_patch} with {len(config.image_widths)} stages needs multiples of {unit}, at least "
        f"{unit}x{unit}: give images of height {height} and width {width}, or another image_patch"
    )


def _multiples_beside(side: int, unit: int) -> list[int]:
    return sorted({max(side // unit, 1) * unit, max(-(-side // unit), 1) * unit})


class CompactEncoder(nn.Module):
    """Images, instruction and normalized state to an ``Encoding``.

    ``image_size``: (height, width) in pixels of the images to come; UserError where ``config`` needs others.
    """

    def __init__(
        self, config: CompactEncoderConfig, *, cameras: int, image_size: tuple[int, int], state_dim: int
    ) -> None:
        super().__init__()
        if cameras:
            _check_image_size(config, image_size)
        self.config = config
        self.cameras = nn.ModuleList([CameraEncoder(config) for _ in range(cameras)])
        self.text = TextEncoder(width=config.text_width, depth=config.text_depth, heads=config.text_heads)
        self.reader = TokenAttention(config.text_width, config.text_heads)
        self.merge = nn.Linear(config.text_heads * config.text_width, config.text_width)
        self.state = nn.Sequential(nn.Linear(state_dim, config.width), nn.GELU(), nn.Linear(config.width, config.width))
        self.instruction = nn.Linear(config.text_width, config.width)
        self.norm = nn.LayerNorm(config.width)
        seen_width = config.width * (cameras + 2)
        self.landmark_head = _landmark_head(seen_width, config.landmarks) if config.landmarks else None
        self.pooled_width = seen_width + config.landmarks
        for module in self.cameras.modules():
            if isinstance(module, nn.Conv2d):  # images arrive channels last; with weights alike nothing is transposed
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, obs: Observation, state: Float[Tensor, "B state_dim"]) -> Encoding:
        """``state`` is normalized; ``obs`` gives images and instruction."""
        words = self._read(obs.instruction)
        text = self._summary(words)
        images = obs.images.permute(1, 0, 4, 2, 3)  # [cameras, B, 3, height, width], channels last in memory
        seen = [
            camera(image.to(text.dtype).mul_(1 / 127.5).sub_(1), words, text)
            for camera, image in zip(self.cameras, images, strict=True)
        ]
        tokens = [*seen, self.state(state).unsqueeze(1), self.instruction(text).unsqueeze(1)]
        pooled = torch.cat([self.norm(token.mean(dim=1)) for token in tokens], dim=-1)
        if self.landmark_head is not None:
            pooled = torch.cat([pooled, self.landmark_head(pooled)], dim=-1)
        return Encoding(tokens=self.norm(torch.cat(tokens, dim=1)), pooled=pooled)

    def landmarks(self, encoding: Encoding) -> Float[Tensor, "*B landmarks"]:
        """The predicted landmarks, which ``pooled`` ends with."""
        return encoding.pooled[..., self.pooled_width - self.config.landmarks :]

    def _read(self, instruction: UInt8[Tensor, "B bytes"]) -> TextTokens:
        """On a CPU each distinct instruction of the batch is encoded once; a GPU would have to wait to know them."""
        if len(instruction) > 1 and instruction.device.type == "cpu" and holds_numbers(instruction):
            unique, index = torch.unique(instruction, dim=0, return_inverse=True)
            return self.text(unique)[index]
        return self.text(instruction)

    def _summary(self, words: TextTokens) -> Float[Tensor, "B text_width"]:
        """Zeros if there are no words."""
        merged = self.merge(self.reader(words).flatten(1))
        return torch.where(words.exists.any(dim=1, keepdim=True), F.layer_norm(merged, merged.shape[-1:]), 0.0)


def _landmark_head(width: int, landmarks: int) -> nn.Sequential:
    """Not linear: the cameras' estimates must be weighed by what each of them can see."""
    hidden = 256
    return nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, landmarks)
    )


@dataclass(frozen=True, kw_only=True)
class EncodedContext(TensorDataclass):
    """``obs`` is kept beside its encoding, for records that the encoder is to read again in the update.

    ``added``: to ``encoding.pooled``, by a policy that is conditioned.
    """

    encoding: Encoding
    obs: Observation | None
    added: Float[Tensor, "*B pooled_width"] | None = None


class CompactPolicy(Policy[EncodedContext, T]):
    """A policy that sees with this encoder. A record is the observation where it is trained, else the encoding."""

    def __init__(self, config: CompactEncoderConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.encoder = CompactEncoder(
            config, cameras=len(robot.cameras), image_size=robot.image_size, state_dim=robot.state_dim
        )
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=robot.action_dim)

    def fit_normalizer(self, state: Float[Tensor, "N state_dim"], action: Float[Tensor, "M action_dim"]) -> None:
        self.normalizer.fit(state, action)

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[EncodedContext, TensorDataclass]:
        return EncodedContext(encoding=self.encoding(self.encoder, obs), obs=obs), state

    def encoding(self, encoder: CompactEncoder, obs: Observation) -> Encoding:
        """What ``encoder``, its own or a copy of it, makes of an observation."""
        with self.autocast():
            return encoder(obs, self.normalizer.normalize_state(obs.state)).map(Tensor.float)

    def store(self, context: EncodedContext) -> TensorDataclass:
        if is_trained(self.encoder):
            assert context.obs is not None
            return context.obs
        return context.encoding

    def restore(self, record: TensorDataclass) -> EncodedContext:
        if isinstance(record, Observation):
            return self.encode(record, self.initial_state(len(record)))[0]
        assert isinstance(record, Encoding)
        return EncodedContext(encoding=record, obs=None)

    def value_features(self, context: EncodedContext) -> Float[Tensor, "B value_dim"]:
        return context.encoding.pooled.detach()


class Forecast(nn.Module):
    """Auxiliary head: the states that the demonstration reaches later, guessed from one observation."""

    def __init__(self, config: CompactEncoderConfig, *, pooled_width: int, state_dim: int) -> None:
        super().__init__()
        self.dims = state_dim if config.forecast_dims is None else config.forecast_dims
        if not 1 <= self.dims <= state_dim:
            raise UserError(
                f"start.policy.encoder.forecast_dims must be within 1..{state_dim}, the state's dimensions, got "
                f"{self.dims}; null predicts all of them"
            )
        self.head = nn.Sequential(
            nn.Linear(pooled_width, config.width),
            nn.GELU(),
            nn.Linear(config.width, (len(config.forecast_steps) + 1) * self.dims),
        )

    def forward(self, pooled: Float[Tensor, "B pooled_width"]) -> Float[Tensor, "B times dims"]:
        """Normalized; the last entry is the demonstration's end."""
        return self.head(pooled).unflatten(-1, (-1, self.dims))


class HasCompactEncoder(nn.Module):
    """Base of networks with a compact encoder, from which others may start.

    No protocol: from Python 3.12 on, ``isinstance`` of a protocol does not see an nn.Module's submodules.
    """

    encoder: CompactEncoder
    forecast: Forecast
    normalizer: Normalizer


class _ConvBlock(nn.Module):
    """One 3 x 3 convolution per residual; the attention that reads the map has a global receptive field."""

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
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        # An empty instruction has no words: every slot then attends to the first one.
        mask = exists.clone()
        mask[:, 0] = True
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.out(merge_heads(attended))
        return x + self.mlp(self.norm2(x))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, width] -> [B, heads, N, width / heads]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def _coordinates(height: int, width: int, like: Tensor) -> Tensor:
    """Centers of the map's cells, (x, y) in [-1, 1] times COORDINATE_GAIN, [height * width, 2]."""
    y = (torch.arange(height, device=like.device, dtype=like.dtype) + 0.5) * 2 / height - 1
    x = (torch.arange(width, device=like.device, dtype=like.dtype) + 0.5) * 2 / width - 1
    cells = torch.stack([x.expand(height, width), y[:, None].expand(height, width)], dim=-1)
    return COORDINATE_GAIN * cells.flatten(0, 1)
