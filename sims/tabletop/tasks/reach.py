"""Touch the named block from above, or stay just over it."""

from __future__ import annotations

import torch
from torch import Tensor

from sims.tabletop.grammar import expand
from sims.tabletop.placement import scattered_blocks
from sims.tabletop.scene import BLOCK_HALF
from sims.tabletop.scene_state import SceneState, gap, lift, near, of_candidate
from sims.tabletop.task import Task
from sims.tabletop.waypoints import Waypoint

CLOSE = 0.028  # [m] from the middle of the block's upper side


def _gaps(scene: SceneState) -> Tensor:
    return gap(scene.end_effector[:, None], lift(scene.blocks[..., :3], BLOCK_HALF))


def achieved(scene: SceneState) -> Tensor:
    standing = scene.blocks[..., 2] < BLOCK_HALF + 0.01
    return (_gaps(scene) < CLOSE) & standing


def expert(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Fingertips just above the block, coming from above."""
    block = of_candidate(scene.blocks, candidate)[:, :3]
    away = gap(block[:, :2], scene.end_effector[:, :2])
    goal = lift(block, 0.034 + ((away - 0.02) * 2).clamp(0, 0.06))
    return Waypoint(goal=goal, yaw=torch.zeros_like(away), gripper=torch.ones_like(away))


REACH = Task(
    name="reach",
    objects=("blocks",),
    candidates=((0,), (1,), (2,)),
    place=lambda rng, ood: scattered_blocks(rng, ood=ood),
    achieved=achieved,
    progress=lambda scene: near(_gaps(scene), 0.15),
    expert=expert,
    phrasings=expand(
        "[reach|touch|go to|move to] the {0} [block|cube]",
        "[bring|move] the gripper to the {0} [block|cube]",
        "please [reach|touch] the {0} [block|cube]",
    ),
    ood_phrasings=expand("put your fingers on the {0} [block|one]", "the {0} block: [tap it|feel it]"),
    held_out=frozenset({("purple",)}),
    max_steps=64,
)
