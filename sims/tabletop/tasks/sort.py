"""Two stages: put one named block on the first named mat, and another on the second."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sims.devices.constant import constant
from sims.tabletop.grammar import expand
from sims.tabletop.scene import BLOCK_HALF
from sims.tabletop.scene_state import SceneState, gap, lift, near, of_candidate
from sims.tabletop.task import COLORS, Task
from sims.tabletop.tasks import push
from sims.tabletop.waypoints import Waypoint, carry, end_effector_yaw, grasp_block, retreat

PAIRS = tuple(itertools.permutations(range(3), 2))  # the block for the first mat, the block for the second


def _offsets(scene: SceneState) -> Tensor:
    """[N, pairs, 2]: distance of each block of a pair from its mat."""
    blocks = scene.blocks[:, constant(PAIRS, scene.blocks, torch.int64), :2]
    return gap(blocks, scene.mats[:, None, :, :2])


def achieved(scene: SceneState) -> Tensor:
    on_mat = push.achieved(scene).view(-1, 3, 2)  # every block on every mat, and let go
    return torch.stack([on_mat[:, first, 0] & on_mat[:, second, 1] for first, second in PAIRS], dim=1)


def _put(scene: SceneState, block: Tensor, mat: Tensor) -> tuple[Waypoint, Tensor]:
    """Towards the block on the mat; and whether it lies there, away from the hand."""
    approach, held = grasp_block(scene, block)
    goal, yaw = lift(mat, BLOCK_HALF), end_effector_yaw(scene)
    over = carry(scene, block[:, :3], goal, yaw, clearance=0.09, tolerance=0.015)  # above the other block
    resting = (gap(block[:, :2], mat[:, :2]) < 0.03) & (block[:, 2] < BLOCK_HALF + 0.005)
    released = (scene.fingers > BLOCK_HALF + 0.008).all(1)
    release = Waypoint(goal=scene.end_effector, yaw=yaw, gripper=-torch.ones_like(yaw))
    leave = retreat(scene, gripper=-1.0)
    towards = leave.where(released, release).where(resting, over.where(held, approach))
    return towards, resting & (gap(block[:, :3], scene.end_effector) > 0.055)


def expert(scene: SceneState, candidate: Tensor) -> Waypoint:
    """The first block, then the second."""
    first, second = constant(PAIRS, candidate)[candidate].unbind(1)
    to_first, done = _put(scene, of_candidate(scene.blocks, first), scene.mats[:, 0])
    to_second, _ = _put(scene, of_candidate(scene.blocks, second), scene.mats[:, 1])
    return to_second.where(done, to_first)


def _held_out() -> frozenset[tuple[str, ...]]:
    """Six goals, each with its two clauses in either order."""
    goals = [[COLORS[(i + k) % len(COLORS)] for k in range(4)] for i in range(len(COLORS))]
    return frozenset((*goal[k:], *goal[:k]) for goal in goals for k in (0, 2))


SORT = Task(
    name="sort",
    objects=("blocks", "mats"),
    candidates=tuple((first, 3, second, 4) for first, second in PAIRS),
    place=push.place,
    achieved=achieved,
    progress=lambda scene: near(_offsets(scene), 0.2).mean(2),
    expert=expert,
    phrasings=expand("[put|place] {0} on [the|] {1} mat and {2} on [the|] {3} [mat|]", "sort: {0} to {1}, {2} to {3}"),
    ood_phrasings=expand("{1} mat: {0} [block|cube]; {3} mat: {2} [block|cube]"),
    held_out=_held_out(),
    max_steps=160,
)
