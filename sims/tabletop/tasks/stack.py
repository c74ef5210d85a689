"""Put one named block on another and let go."""

from __future__ import annotations

import torch
from torch import Tensor

from sims.devices.constant import constant
from sims.tabletop.grammar import expand
from sims.tabletop.placement import scattered_blocks
from sims.tabletop.scene import BLOCK_HALF
from sims.tabletop.scene_state import SceneState, gap, lift, near, of_candidate
from sims.tabletop.task import Task, shifted_pairs
from sims.tabletop.waypoints import Waypoint, carry, end_effector_yaw, grasp_block

PAIRS = ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))  # upper, lower


def _pairs(scene: SceneState) -> tuple[Tensor, Tensor]:
    """Upper and lower block of the six candidates, each [N, 6, 3]."""
    upper, lower = scene.blocks[:, constant(PAIRS, scene.blocks, torch.int64), :3].unbind(2)
    return upper, lower


def achieved(scene: SceneState) -> Tensor:
    upper, lower = _pairs(scene)
    offset = upper - lower
    aligned = offset[..., :2].norm(dim=-1) < 0.022
    resting = (offset[..., 2] - 2 * BLOCK_HALF).abs() < 0.008
    released = (scene.fingers > BLOCK_HALF + 0.006).all(-1, keepdim=True)
    return aligned & resting & released


def progress(scene: SceneState) -> Tensor:
    upper, lower = _pairs(scene)
    reached = near(gap(scene.end_effector[:, None], upper), 0.1)
    return 0.4 * reached + 0.6 * near(gap(upper, lift(lower, 2 * BLOCK_HALF)), 0.15)


def expert(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Grasp, carry over the other block, put down, release."""
    pairs = constant(PAIRS, candidate)[candidate]
    upper, lower = of_candidate(scene.blocks, pairs[:, 0]), of_candidate(scene.blocks, pairs[:, 1])
    approach, held = grasp_block(scene, upper)
    goal, yaw = lift(lower[:, :3], 2 * BLOCK_HALF), end_effector_yaw(scene)
    over = carry(scene, upper[:, :3], goal, yaw, clearance=0.05, tolerance=0.01)
    offset = upper[:, :3] - goal
    resting = (offset[:, :2].norm(dim=1) < 0.018) & (offset[:, 2].abs() < 0.006)
    release = Waypoint(goal=scene.end_effector, yaw=yaw, gripper=-torch.ones_like(yaw))
    return release.where(resting, over.where(held, approach))


STACK = Task(
    name="stack",
    objects=("blocks",),
    candidates=PAIRS,
    place=lambda rng, ood: scattered_blocks(rng, ood=ood),
    achieved=achieved,
    progress=progress,
    expert=expert,
    phrasings=expand(
        "[stack|put|place] the {0} block on [|top of] the {1} [block|one]",
        "please [stack|put] the {0} block on the {1} block",
    ),
    ood_phrasings=expand("build a tower: {0} [above|over] {1}", "set the {0} block down upon the {1} [block|one]"),
    held_out=shifted_pairs(3),
    max_steps=96,
)
