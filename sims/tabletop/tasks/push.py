"""Push the named block onto the named mat and leave it there."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from sims.tabletop.grammar import expand
from sims.tabletop.placement import (
    BACK,
    DRAWS,
    FRONT,
    OOD_BACK,
    OOD_FRONT,
    Placement,
    apart,
    first_accepted,
    with_yaw,
)
from sims.tabletop.scene import BLOCK_HALF, MAT_HALF
from sims.tabletop.scene_state import SceneState, gap, near, of_candidate
from sims.tabletop.task import Task, shifted_pairs
from sims.tabletop.waypoints import Waypoint, fold, retreat

AWAY = 0.075  # [m] from the end effector to the block's center, at which it no longer touches it

MAX_WAY = 0.34  # [m] of a block to a mat
Y, JITTER = np.array([-0.13, 0.0, 0.13, -0.1, 0.1]), 0.05  # [m] of the blocks and the mats


def place(rng: np.random.Generator, ood: bool) -> Placement:
    """Blocks in front, mats behind them, every block with a free way to both mats."""
    front, back = (OOD_FRONT, OOD_BACK) if ood else (FRONT, BACK)

    def sample() -> np.ndarray:
        points = np.concatenate([rng.uniform(*front, (DRAWS, 3, 2)), rng.uniform(*back, (DRAWS, 2, 2))], axis=1)
        points[..., 1] = Y + rng.uniform(-JITTER, JITTER, (DRAWS, 5))
        return points

    points = first_accepted(sample, _ways_are_free)
    mats = with_yaw(rng, points[3:], math.pi / 4)
    blocks = with_yaw(rng, points[:3], math.pi / 4)
    return Placement(blocks=blocks, fixtures={"mat0": mats[0], "mat1": mats[1]})


def _ways_are_free(points: np.ndarray) -> np.ndarray:
    """[draws]: things lie apart, and no other block is near the way of a block to a mat, or of the hand behind it."""
    blocks, mats = points[:, :3], points[:, 3:]
    way = mats[:, None] - blocks[:, :, None]  # [draws, blocks, mats, 2]
    length = np.linalg.norm(way, axis=-1)
    ahead = way / length[..., None]
    other = blocks[:, None, None] - blocks[:, :, None, None]  # [draws, blocks, 1, other, 2]
    along = np.clip((other * ahead[:, :, :, None]).sum(-1), -0.08, length[..., None])
    distance = np.linalg.norm(other - along[..., None] * ahead[:, :, :, None], axis=-1)
    distance = distance + np.eye(3)[None, :, None]
    free = (distance > 0.062).all(axis=(1, 2, 3)) & ((length > 0.11) & (length < MAX_WAY)).all(axis=(1, 2))
    return np.asarray(free & apart(blocks, 0.1) & apart(mats, 0.15))


def _pairs(scene: SceneState) -> tuple[Tensor, Tensor]:
    """Block and mat of the six candidates, each [N, 6, 3]."""
    return scene.blocks[..., :3].repeat_interleave(2, dim=1), scene.mats.repeat(1, 3, 1)


def achieved(scene: SceneState) -> Tensor:
    block, mat = _pairs(scene)
    on_mat = (gap(block[..., :2], mat[..., :2]) < MAT_HALF - 0.01) & (block[..., 2] < BLOCK_HALF + 0.015)
    return on_mat & (gap(scene.end_effector[:, None], block) > AWAY)


def progress(scene: SceneState) -> Tensor:
    block, mat = _pairs(scene)
    reached = near(gap(scene.end_effector[:, None], block), 0.1)
    return 0.3 * reached + 0.7 * near(gap(block[..., :2], mat[..., :2]), 0.2)


def expert(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Push from behind the block with closed fingers, always towards the mat's center; then go up."""
    block = of_candidate(scene.blocks, candidate // 2)[:, :2]
    mat = of_candidate(scene.mats, candidate % 2)[:, :2]
    ahead = torch.nn.functional.normalize(mat - block, dim=1)
    across = torch.stack([-ahead[:, 1], ahead[:, 0]], dim=1)
    offset = scene.end_effector[:, :2] - block
    along, aside = (offset * ahead).sum(1), (offset * across).sum(1)
    low = scene.end_effector[:, 2] < 0.045
    behind = (along < -BLOCK_HALF) & (aside.abs() < 0.025)
    start = block - ahead * (BLOCK_HALF + 0.045)
    away = gap(start, scene.end_effector[:, :2])
    height = 0.022 + ((away - 0.015) * 5).clamp(0, 0.08)
    pushing = scene.end_effector[:, :2] + 0.03 * ahead - 1.2 * aside[:, None] * across
    goal = torch.where((low & behind)[:, None], pushing, start)
    height = torch.where(low & behind, 0.022, height)
    yaw = fold(torch.atan2(ahead[:, 1], ahead[:, 0]), math.pi)
    push = Waypoint(goal=torch.cat([goal, height[:, None]], dim=1), yaw=yaw, gripper=torch.ones_like(yaw))
    return retreat(scene, gripper=1.0).where(gap(block, mat) < 0.035, push)


PUSH = Task(
    name="push",
    objects=("blocks", "mats"),
    candidates=tuple((block, 3 + mat) for block in range(3) for mat in range(2)),
    place=place,
    achieved=achieved,
    progress=progress,
    expert=expert,
    phrasings=expand(
        "[push|slide|move] the {0} [block|cube] [to|onto] the {1} mat",
        "please [push|slide] the {0} [block|cube] to the {1} mat",
    ),
    ood_phrasings=expand(
        "shove the {0} [block|one] until it lies on the {1} mat", "the {1} mat needs the {0} [block|cube] on it"
    ),
    held_out=shifted_pairs(2),
    max_steps=80,
    from_above=False,
)
