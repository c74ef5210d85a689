"""A convolutional flow-matching world model for small images; it is fitted in minutes on a CPU.

A predicted frame is a mixture, pixel by pixel, of the current frame, of the episode's first frame, of both warped by a
few projective transformations, and of newly generated content (Finn et al. 2016, spatial transformer predictor). The
transformations follow from the robot's states before and after the predicted motion, since a camera on the hand moves
rigidly and so do the hand and a grasped object. Static parts stay sharp over any number of predictions, regions that
the arm uncovers come from the first frame, and small objects keep their shape because they are warped, not redrawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from policies.policy import RobotSpec
from sims.numbers.ranges import Depth, Interval, Width
from world_models.models.flow_model import (
    CleanEstimate,
    FlowWorldModel,
    FlowWorldModelConfig,
    HistoryPrefill,
    PixelCodec,
    read_out_heads,
)
from world_models.models.warp import mean_trace, pixel_coordinates, to_cells, warp
from world_models.world_model import History, WorldModelError

PATCH = 4  # pixels per side of a cell of the network's feature map
KEEP_LOGIT = 3.0  # an untrained model repeats the current frame


@dataclass(frozen=True, kw_only=True)
class ConvFlowConfig(FlowWorldModelConfig):
    """``width``, ``deep_width``: channels at 1/4 and 1/8 of the resolution; ``blocks``, ``deep_blocks``: half of the
    residual blocks there. ``condition``: width of the conditioning. ``layers``: projective transformations per camera.
    ``heads``: of the attention across cameras.
    """

    name: Literal["conv_flow"] = "conv_flow"
    width: Width = 48
    deep_width: Width = 96
    blocks: Depth = 2
    deep_blocks: Depth = 2
    condition: Width = 192
    layers: Annotated[int, Interval(ge=0, le=256)] = 3
    heads: Width = 4

    def __post_init__(self) -> None:
        if self.deep_width % self.heads:
            raise ValueError(f"dynamics.deep_width must be a multiple of heads {self.heads}, got {self.deep_width}")


class ConvFlow(FlowWorldModel[HistoryPrefill]):
    """Latents are the pixels in [-1, 1]."""

    config: ConvFlowConfig
    coordinates: Tensor  # homogeneous pixel coordinates by cell, [3, cells, pixels]

    def __init__(self, config: ConvFlowConfig, robot: RobotSpec) -> None:
        super().__init__(config, robot, PixelCodec())
        height, width = robot.image_size
        if height % (2 * PATCH) or width % (2 * PATCH):
            raise WorldModelError(
                f"conv_flow needs image sides that are multiples of {2 * PATCH}, got {height} x {width}"
            )
        self.latent_shape = (self.cameras, 3, height, width)
        self.sources = 2 + 2 * config.layers  # current and first frame, unchanged and warped by each layer
        self.embed = nn.Linear(3 * (self.sources + 1) * PATCH**2, config.width)
        self.camera_embedding = nn.Parameter(0.02 * torch.randn(self.cameras, config.condition))
        self.condition = nn.Sequential(
            nn.Linear(self.condition_features, config.condition),
            nn.SiLU(),
            nn.Linear(config.condition, config.condition),
            nn.SiLU(),
            nn.Linear(config.condition, config.condition),
            nn.LayerNorm(config.condition),  # FiLM and heads need unit scale; initialization leaves 1/20 of it
        )
        self.position = nn.Parameter(0.02 * torch.randn(self.cameras, config.width, height // PATCH, width // PATCH))
        self.enter = nn.ModuleList([_Residual(config.width, config.condition) for _ in range(config.blocks)])
        self.down = nn.Conv2d(config.width, config.deep_width, 2, stride=2)
        self.deep = nn.ModuleList([_Residual(config.deep_width, config.condition) for _ in range(config.deep_blocks)])
        self.cross = _CrossView(config.deep_width, config.heads)
        self.deeper = nn.ModuleList([_Residual(config.deep_width, config.condition) for _ in range(config.deep_blocks)])
        self.up = nn.Conv2d(config.deep_width, 4 * config.width, 1)
        self.leave = nn.ModuleList([_Residual(config.width, config.condition) for _ in range(config.blocks)])
        self.norm = nn.GroupNorm(4, config.width)
        self.out = nn.Conv2d(config.width, (self.sources + 4) * PATCH**2, 3, padding=1)  # mixture, content
        self.layer_pose = nn.Sequential(
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
        nn.init.normal_(self.layer_pose[-1].weight, std=1e-2)  # type: ignore[arg-type]  # equal layers would stay equal
        coordinates = to_cells(pixel_coordinates(height, width)[None], PATCH)[0]
        self.register_buffer("coordinates", coordinates, persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub

    def prefill(self, history: History) -> HistoryPrefill:
        return HistoryPrefill(history=history)

    def estimate(
        self, prefill: HistoryPrefill, action: Tensor, length: Tensor, noisy: Tensor, t: Tensor
    ) -> CleanEstimate:
        history, batch = prefill.history, len(action)
        condition = self.condition(self.conditioning(history, action, length, t))
        expected_change = self.expected_change(history, action, length)
        per_camera = (condition[:, None] + self.camera_embedding).flatten(0, 1)
        candidates = self._candidates(history, expected_change)
        with self.autocast(noisy.device):
            deep, out = self._network(candidates, noisy, per_camera)
        pooled = torch.cat([deep.float().mean((2, 3)).unflatten(0, (batch, -1)).flatten(1), condition], dim=1)
        return self.read_out(self._mix(out, candidates), pooled, history, expected_change)

    def _network(self, candidates: list[Tensor], noisy: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """The deepest feature map [B * cameras, deep_width, h / 8, w / 8] and the logits and content for ``_mix``."""
        precision = getattr(torch, self.config.precision)
        inputs = (*candidates, to_cells(noisy.flatten(0, 1), PATCH))
        cells = torch.cat([part.to(precision) for part in inputs], dim=1)
        x = self.embed(cells.transpose(1, 2).flatten(2)).transpose(1, 2).unflatten(2, self.position.shape[2:])
        # In ``precision``, because otherwise autocast widens every residual sum.
        x = x + self.position.to(precision).repeat(len(noisy), 1, 1, 1)
        for block in self.enter:
            x = block(x, condition)
        y = self.down(x)
        for block in self.deep:
            y = block(y, condition)
        y = self.cross(y, self.cameras)
        for block in self.deeper:
            y = block(y, condition)
        x = x + F.pixel_shuffle(self.up(y), 2)
        for block in self.leave:
            x = block(x, condition)
        return y, self.out(F.silu(self.norm(x)))

    def _candidates(self, history: History, expected_change: Tensor) -> list[Float[Tensor, "BC 3 cells pixels"]]:
        """Current and first frame, each unchanged and then warped by every layer to the expected state."""
        state = self.normalizer.normalize_state(history.state)
        states = torch.stack([state + expected_change, state, self.normalizer.normalize_state(history.first_state)])
        generator = F.pad(self.layer_pose(states).view(3, -1, 8), (0, 1)).unflatten(-1, (3, 3))
        generator = generator - mean_trace(generator)
        signed = torch.cat([-generator[:1], generator[1:]])  # exp(-G) is the inverse of exp(G), also of a large one
        inverse, current, first = torch.linalg.matrix_exp(signed).unbind(0)
        candidates = []
        for frames, pose in ((history.current, current), (history.first, first)):
            frame = frames.flatten(0, 1)
            matrices = (pose @ inverse).view(len(frame), -1, 3, 3)
            warped = [warp(frame, matrix, self.coordinates) for matrix in matrices.unbind(1)]
            candidates += [to_cells(frame, PATCH), *warped]
        return candidates

    def _mix(
        self, out: Float[Tensor, "BC channels h w"], candidates: list[Tensor]
    ) -> Float[Tensor, "B cameras 3 height width"]:
        """Softmax mixture of the candidates and new content, pixel by pixel."""
        out = out.flatten(2).transpose(1, 2).unflatten(2, (-1, PATCH**2)).float()  # [BC, cells, sources + 4, pixels]
        mixture, content = out.split([self.sources + 1, 3], dim=2)
        shares = torch.softmax(mixture, dim=2).split(1, dim=2)
        mixed = shares[-1] * content
        for part, share in zip(candidates, shares[:-1], strict=True):
            mixed = torch.addcmul(mixed, part.transpose(1, 2), share)
        height, width = self.latent_shape[-2:]
        tiles = mixed.unflatten(3, (PATCH, PATCH)).unflatten(1, (height // PATCH, width // PATCH))
        return tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, self.cameras, 3, height, width)


class _Residual(nn.Module):
    """Two 3 x 3 convolutions after one FiLM-conditioned layer norm of every cell."""

    def __init__(self, width: int, condition: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.film = nn.Linear(condition, 2 * width)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(F.silu(condition)).to(x)[:, None, None].chunk(2, dim=-1)
        y = F.layer_norm(x.movedim(1, -1), x.shape[1:2]) * (1 + scale) + shift  # over channels, per cell
        return x + self.conv2(F.silu(self.conv1(F.silu(y.movedim(-1, 1)))))


class _CrossView(nn.Module):
    """Self-attention over the cells of all cameras of an environment."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, cameras: int) -> Tensor:
        images, channels, height, width = x.shape
        tokens = x.flatten(2).transpose(1, 2).reshape(images // cameras, -1, channels)
        parts = self.qkv(self.norm(tokens)).float().chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        with torch.autocast(x.device.type, enabled=False):  # in bfloat16 its backward is 5 times slower on CPUs
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed).reshape(images, height * width, channels).transpose(1, 2).reshape(x.shape)
