"""Position of a colored object, measured in an image alone; compares real with imagined images."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from sims.tabletop.layout import RGB
from sims.tabletop.scene import AGENT_CAMERA, BLOCK_HALF
from sims.tabletop.task import COLORS
from sims.tabletop.tasks.registry import all_tasks

MIN_PIXELS = 3.0
SATURATION = 0.5  # the saturation of arm, table and cabinet is lower


def named_color(instruction: str) -> str | None:
    """The color of the object to be moved (of the hole for a peg); None if no task has this sentence."""
    return _colors_by_sentence().get(instruction.lower())


@functools.cache
def _colors_by_sentence() -> dict[str, str]:
    """Of every task; a sentence may name the first object last."""
    return {
        phrase.format(*colors).lower(): colors[0]
        for task in all_tasks().values()
        for colors in itertools.permutations(COLORS, len(task.candidates[0]))
        for phrase in (*task.phrasings, *task.ood_phrasings)
    }


def make_locator(cameras: Sequence[str]) -> Callable[[Tensor, Sequence[str]], Tensor] | None:
    """``locate`` for images of these cameras and instructions; None without the agent camera."""
    if "agent" not in cameras:
        return None
    agent = list(cameras).index("agent")

    def find(images: UInt8[Tensor, "B cameras height width 3"], instructions: Sequence[str]) -> Float[Tensor, "B 2"]:
        return locate(images[:, agent], [named_color(text) for text in instructions])

    return find


def locate(images: UInt8[Tensor, "B height width 3"], colors: Sequence[str | None]) -> Float[Tensor, "B 2"]:
    """(x, y) [m], in the plane of the blocks' centers, of the pixels of that color in each agent-camera image.

    NaN where fewer than MIN_PIXELS have it. Compares hue, which depends little on the light.
    """
    rgb = images.float() / 255
    top, low = rgb.amax(-1), rgb.amin(-1)
    saturation = (top - low) / top.clamp(min=0.05)
    hue = (rgb - low[..., None]) / (top - low)[..., None].clamp(min=1e-3)  # [0, 1] pattern of the channels
    table = {name: (torch.tensor(value) - min(value)) / (max(value) - min(value)) for name, value in RGB.items()}
    wanted = torch.stack([table[c] if c is not None else torch.full((3,), 9.0) for c in colors])[:, None, None]
    weight = ((hue - wanted).norm(dim=-1) < 0.4) & (saturation > SATURATION) & (top > 0.2)
    weight = weight.float() * saturation
    mass = weight.flatten(1).sum(1)
    ground = _ground(images.shape[1], images.shape[2])
    place = torch.einsum("bhw,hwc->bc", weight, ground) / mass.clamp(min=1e-6)[:, None]
    enough = (weight > 0).flatten(1).sum(1) >= MIN_PIXELS
    return torch.where(enough[:, None], place, torch.nan)


def _ground(height: int, width: int) -> Float[Tensor, "height width 2"]:
    """Where each pixel's ray meets the plane z = BLOCK_HALF [m], without the randomization of the camera."""
    (x0, y0, z0), (right, up), fovy = AGENT_CAMERA
    forward = torch.linalg.cross(torch.tensor(up), torch.tensor(right))
    half = math.tan(math.radians(fovy) / 2)
    v = (1 - (torch.arange(height) + 0.5) * 2 / height) * half
    u = ((torch.arange(width) + 0.5) * 2 / width - 1) * half * width / height
    ray = forward + u[None, :, None] * torch.tensor(right) + v[:, None, None] * torch.tensor(up)
    depth = (BLOCK_HALF - z0) / ray[..., 2].clamp(max=-0.05)
    return torch.stack([x0 + depth * ray[..., 0], y0 + depth * ray[..., 1]], dim=-1)
