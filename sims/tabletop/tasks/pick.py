"""Raise the named block and keep it up."""

from __future__ import annotations

import torch
from torch import Tensor

from sims.tabletop.grammar import expand
from sims.tabletop.placement import scattered_blocks
from sims.tabletop.scene import BLOCK_HALF
from sims.tabletop.scene_state import SceneState, gap, near, of_candidate
from sims.tabletop.task import Task
from sims.tabletop.waypoints import Waypoint, end_effector_yaw, grasp_block

RAISED = 0.07  # [m] above the table


def achieved(scene: SceneState) -> Tensor:
    in_hand = gap(scene.end_effector[:, None], scene.blocks[..., :3]) < 0.05
    return (scene.blocks[..., 2] > BLOCK_HALF + RAISED) & in_hand


def progress(scene: SceneState) -> Tensor:
    raised = ((scene.blocks[..., 2] - BLOCK_HALF) / RAISED).clamp(0, 1)
    return 0.5 * near(gap(scene.end_effector[:, None], scene.blocks[..., :3]), 0.1) + 0.5 * raised


def expert(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Grasp and raise."""
    approach, held = grasp_block(scene, of_candidate(scene.blocks, candidate))
    goal = torch.cat([scene.end_effector[:, :2], torch.full_like(scene.end_effector[:, 2:], 0.2)], dim=1)
    raised = Waypoint(goal=goal, yaw=end_effector_yaw(scene), gripper=torch.ones_like(approach.gripper))
    return raised.where(held, approach)


PICK = Task(
    name="pick",
    objects=("blocks",),
    candidates=((0,), (1,), (2,)),
    place=lambda rng, ood: scattered_blocks(rng, ood=ood),
    achieved=achieved,
    progress=progress,
    expert=expert,
    phrasings=expand(
        "[pick up|lift|raise|grab] the {0} [block|cube]",
        "[grasp|grip] the {0} [block|cube] and [raise|lift] it",
        "please [pick up|lift] the {0} [block|cube]",
    ),
    ood_phrasings=expand("take the {0} [block|one] off the table", "[could|would] you hold up the {0} block"),
    held_out=frozenset({("cyan",)}),
    max_steps=64,
)
