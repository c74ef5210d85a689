"""A convolutional flow-matching world model for small frames: minutes on a CPU.

A predicted frame is a mixture, pixel by pixel, of the last frame seen through a few projective transformations that the
actions choose (Finn et al. 2016, spatial transformer predictor), each corrected by one predicted flow field, of the
episode's first frame through others, and of newly drawn content. A camera on the hand moves as a whole, a hand and what
it holds move as one: both are a handful of numbers that depend on state and actions alone, found long before a
convolution has learned to move pixels far. What stands still stays sharp however long the imagination, what the arm
uncovers comes back from the first frame, which a camera on the hand sees from where it is now, and a small block keeps
its shape because it is moved, not drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from policies.denoising.policy import RobotSpec
from world_models.models.flow_model import Denoised, FlowWorld, FlowWorldConfig, Memory, Pixels, read_out_heads
from world_models.world_model import Moment, WorldModelError

PATCH = 4  # pixels per side of a cell of the working map
KEEP_LOGIT = 3.0  # an untrained model repeats the last frame


@dataclass(frozen=True, kw_only=True)
class ConvFlowConfig(FlowWorldConfig):
    """``points``: positions per camera that the actions draw as soft spots into the image (where does the hand go?).

    ``transforms``, ``first_transforms``: projective transformations of the last and of the first frame, per camera.
    """

    name: Literal["conv_flow"] = "conv_flow"
    width: int = 48
    deep_width: int = 96
    blocks: int = 2
    deep_blocks: int = 2
    condition: int = 192
    layers: int = 3
    heads: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deep_width % self.heads:
            raise ValueError(f"world.deep_width must be a multiple of heads {self.heads}, got {self.deep_width}")


class ConvFlow(FlowWorld[Memory]):
    """Latents are the pixels in [-1, 1]."""

    config: ConvFlowConfig
    places: Tensor  # where the pixels lie, cell by cell: [3, cells, pixels]

    def __init__(self, config: ConvFlowConfig, robot: RobotSpec) -> None:
        super().__init__(config, robot, Pixels())
        height, width = robot.image_size
        if height % (2 * PATCH) or width % (2 * PATCH):
            raise WorldModelError(
                f"conv_flow needs image sides that are multiples of {2 * PATCH}, got {height} x {width}"
            )
        self.latent_shape = (self.cameras, 3, height, width)
        self.sources = 2 + 2 * config.layers  # current and first frame, as they were and as each layer moved
        self.look = nn.Linear(3 * (self.sources + 1) * PATCH**2, config.width)
        self.camera = nn.Parameter(0.02 * torch.randn(self.cameras, config.condition))
        self.condition = nn.Sequential(
            nn.Linear(self.condition_features, config.condition),
            nn.SiLU(),
            nn.Linear(config.condition, config.condition),
            nn.SiLU(),
            nn.Linear(config.condition, config.condition),
            nn.LayerNorm(config.condition),  # FiLM and heads need it of size one, three small layers leave a twentieth
        )
        self.place = nn.Parameter(0.02 * torch.randn(self.cameras, config.width, height // PATCH, width // PATCH))
        self.enter = nn.ModuleList([_Residual(config.width, config.condition) for _ in range(config.blocks)])
        self.down = nn.Conv2d(config.width, config.deep_width, 2, stride=2)
        self.deep = nn.ModuleList([_Residual(config.deep_width, config.condition) for _ in range(config.deep_blocks)])
        self.cross = _CrossView(config.deep_width, config.heads)
        self.deeper = nn.ModuleList([_Residual(config.deep_width, config.condition) for _ in range(config.deep_blocks)])
        self.up = nn.Conv2d(config.deep_width, 4 * config.width, 1)
        self.leave = nn.ModuleList([_Residual(config.width, config.condition) for _ in range(config.blocks)])
        self.norm = nn.GroupNorm(4, config.width)
        self.out = nn.Conv2d(config.width, (self.sources + 4) * PATCH**2, 3, padding=1)  # mixture, content
        self.layer = nn.Sequential(
            nn.Linear(robot.state_dim, 128),
            nn.SiLU(),
            nn.Linear(128, 128),
            nn.SiLU(),
            nn.Linear(128, self.cameras * config.layers * 8),
        )
        pooled = self.cameras * config.deep_width + config.condition
        self.state, self.error = read_out_heads(pooled, robot.state_dim)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)  # type: ignore[arg-type]
        nn.init.constant_(self.out.bias[: PATCH**2], KEEP_LOGIT)  # type: ignore[index]
        nn.init.normal_(self.layer[-1].weight, std=1e-2)  # type: ignore[arg-type]  # alike, they would stay alike
        self.register_buffer("places", _cells(_places(height, width)[None])[0], persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub

    def prefill(self, moment: Moment) -> Memory:
        return Memory(moment=moment.to(self.device))

    def denoised(self, memory: Memory, action: Tensor, length: Tensor, noisy: Tensor, t: Tensor) -> Denoised:
        moment, batch = memory.moment, len(action)
        features = self.conditioning(moment, action, length, t)
        condition, expected = self.condition(features), self.moved(features)
        per_camera = (condition[:, None] + self.camera).flatten(0, 1)
        seen, precision = self._seen(moment, expected), getattr(torch, self.config.precision)
        with self.autocast(noisy.device):
            given = torch.cat([part.to(precision) for part in (*seen, _cells(noisy.flatten(0, 1)))], dim=1)
            x = self.look(given.transpose(1, 2).flatten(2)).transpose(1, 2).unflatten(2, self.place.shape[2:])
            x = x + self.place.to(precision).repeat(batch, 1, 1, 1)  # else every residual sum is widened again
            for block in self.enter:
                x = block(x, per_camera)
            y = self.down(x)
            for block in self.deep:
                y = block(y, per_camera)
            y = self.cross(y, self.cameras)
            for block in self.deeper:
                y = block(y, per_camera)
            x = x + F.pixel_shuffle(self.up(y), 2)
            for block in self.leave:
                x = block(x, per_camera)
            out = self.out(F.silu(self.norm(x)))
        pooled = torch.cat([y.float().mean((2, 3)).unflatten(0, (batch, -1)).flatten(1), condition], dim=1)
        return self.read_out(self._mix(out, seen), pooled, moment, expected)

    def _seen(self, moment: Moment, expected: Tensor) -> list[Float[Tensor, "BC 3 cells pixels"]]:
        """Both frames as they were, and as each layer moved with the robot since."""
        state = self.normalizer.normalize_state(moment.state)
        poses = torch.stack([state + expected, state, self.normalizer.normalize_state(moment.first_state)])
        generator = F.pad(self.layer(poses).view(3, -1, 8), (0, 1)).unflatten(-1, (3, 3))
        now, then, first = torch.linalg.matrix_exp(generator - _trace(generator)).unbind(0)
        back = torch.linalg.inv(now)
        parts = []
        for frames, pose in ((moment.current, then), (moment.first, first)):
            frame = frames.flatten(0, 1)
            several = (pose @ back).view(len(frame), -1, 3, 3)
            parts += [_cells(frame), *(_warp(frame, matrix, self.places) for matrix in several.unbind(1))]
        return parts

    def _mix(self, out: Float[Tensor, "BC channels h w"], seen: list[Tensor]) -> Tensor:
        out = out.flatten(2).transpose(1, 2).unflatten(2, (-1, PATCH**2)).float()  # [BC, cells, sources + 4, pixels]
        mixture, content = out.split([self.sources + 1, 3], dim=2)
        shares = torch.softmax(mixture, dim=2).split(1, dim=2)
        mixed = shares[-1] * content
        for part, share in zip(seen, shares[:-1], strict=True):
            mixed = torch.addcmul(mixed, part.transpose(1, 2), share)
        height, width = self.latent_shape[-2:]
        tiles = mixed.unflatten(3, (PATCH, PATCH)).unflatten(1, (height // PATCH, width // PATCH))
        return tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, self.cameras, 3, height, width)


def _cells(frames: Float[Tensor, "B C height width"]) -> Float[Tensor, "B C cells pixels"]:
    """The pixels of every cell together, so that look and mixture transpose little: memory is what costs here."""
    batch, channels, height, width = frames.shape
    parts = frames.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return parts.transpose(3, 4).reshape(batch, channels, -1, PATCH**2)


class _Residual(nn.Module):
    """Two 3 x 3 convolutions behind one FiLM-conditioned normalization of every cell."""

    def __init__(self, width: int, condition: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.film = nn.Linear(condition, 2 * width)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(F.silu(condition)).to(x)[:, None, None].chunk(2, dim=-1)
        y = F.layer_norm(x.movedim(1, -1), x.shape[1:2]) * (1 + scale) + shift  # cell by cell: channels lie together
        return x + self.conv2(F.silu(self.conv1(F.silu(y.movedim(-1, 1)))))


class _CrossView(nn.Module):
    """Self-attention over the cells of all cameras of a row: what one camera sees, the others can use."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, cameras: int) -> Tensor:
        rows, width, height, breadth = x.shape
        tokens = x.flatten(2).transpose(1, 2).reshape(rows // cameras, -1, width)
        parts = self.qkv(self.norm(tokens)).float().chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        with torch.autocast(x.device.type, enabled=False):  # in bfloat16 its backward is 5 times slower on CPUs
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed).reshape(rows, height * breadth, width).transpose(1, 2).reshape(x.shape)


def _trace(matrix: Float[Tensor, "*B 3 3"]) -> Float[Tensor, "*B 3 3"]:
    """What makes it traceless when subtracted."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    return mean[..., None, None] * torch.eye(3, device=matrix.device)


def _places(height: int, width: int) -> Float[Tensor, "3 height width"]:
    """Where the pixels lie: x, y in [-1, 1], 1."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    return torch.stack([x, y, torch.ones_like(x)])


def _warp(
    frames: Float[Tensor, "B C h w"], matrix: Float[Tensor, "B 3 3"], places: Float[Tensor, "3 rows columns"]
) -> Float[Tensor, "B C rows columns"]:
    """out(p) = frames(H p) at all ``places`` p, bilinear, edges repeated."""
    moved = matrix @ places.flatten(1)
    grid = (moved[:, :2] / moved[:, 2:].clamp(min=0.1)).unflatten(2, places.shape[1:])
    return F.grid_sample(frames, grid.movedim(1, -1), padding_mode="border", align_corners=True)
