"""Where the named objects of a scene are, in numbers of the order of one: what an encoder is pretrained to predict."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.devices.constant import constant
from sims.tabletop.scene import BLOCK_HALF, DRAWER_TRAVEL, NUM_BLOCKS, PEG_HALF
from sims.tabletop.scene_state import SceneState, quaternion_yaw
from sims.tabletop.tasks.registry import TASKS

CENTER = (0.5, 0.0, 0.05)  # [m] origin of the positions
SCALE = 0.1  # [m] per unit of a position
NEAR = 0.03  # [m]: an offset d is also given as tanh(d / NEAR), which is steep where precision matters

# Of these tasks; others have no labels.
TASK_NAMES = ("reach", "pick", "push", "stack", "open_drawer", "insert_peg")
# First columns of the offsets from the end effector of the object and of the place where it is to go, of "is grasped".
OBJECT_OFFSET, GOAL_OFFSET, GRASPED = 3, 12, 24
NUM_LANDMARKS = 26 + len(TASK_NAMES)


def landmarks(
    scene: SceneState, task: Int[Tensor, " N"], candidate: Int[Tensor, " N"]
) -> tuple[Float[Tensor, "N landmarks"], Bool[Tensor, "N landmarks"]]:
    """(values, known). ``task`` indexes TASK_NAMES; ``known`` is False for what this task does not have.

    Of the object that the instruction names, and of the place where it is to go: position / SCALE, offset from the end
    effector / SCALE, tanh(offset / NEAR), three numbers each. Then sine and cosine of 4 times the object's yaw; offset
    from object to goal (x, y) / SCALE and its direction; whether the object is grasped (-1, 1); opening of the named
    drawer (0 to 1); the task (-1, 1 each).
    """
    position, quaternion, goal, opening = _named(scene, task, candidate)
    yaw = 4 * quaternion_yaw(quaternion)
    way = (goal - position)[:, :2]
    grasped = ((position - scene.end_effector).norm(dim=1) < 0.045) & (scene.fingers < BLOCK_HALF + 0.003).all(1)
    grasped &= (scene.fingers > PEG_HALF[0] - 0.003).all(1)
    values = torch.cat(
        [
            _relative(position, scene.end_effector),
            _relative(goal, scene.end_effector),
            torch.stack([yaw.sin(), yaw.cos()], dim=1),
            way / SCALE,
            torch.nn.functional.normalize(way, dim=1),
            2 * grasped[:, None].float() - 1,
            opening,
            2 * torch.nn.functional.one_hot(task, len(TASK_NAMES)).float() - 1,
        ],
        dim=1,
    )
    drawer = (task == TASK_NAMES.index("open_drawer"))[:, None]
    return values, _known(drawer, has_goal=(goal != 0).any(1, keepdim=True))


def _named(
    scene: SceneState, task: Tensor, candidate: Tensor
) -> tuple[Float[Tensor, "N 3"], Float[Tensor, "N 4"], Float[Tensor, "N 3"], Float[Tensor, "N 1"]]:
    """Position and quaternion of the named object, position of its goal, opening of the named drawer; else zeros."""
    new, count = scene.end_effector.new_zeros, len(task)
    position, quaternion, goal, opening = new(count, 3), new(count, 4), new(count, 3), new(count, 1)
    for index, name in enumerate(TASK_NAMES):
        rows = (task == index).nonzero().flatten()
        slots = torch.tensor([(*slots, 0)[:2] for slots in TASKS[name].candidates], device=task.device)
        first, second = slots[candidate[rows]].unbind(1)
        if name == "open_drawer":
            position[rows], opening[rows, 0] = scene.handles[rows, first], scene.drawers[rows, first] / DRAWER_TRAVEL
            half = scene.cabinet_yaw[rows] / 2
            quaternion[rows] = torch.nn.functional.pad(half.cos()[:, None], (0, 3))
            quaternion[rows, 3] = half.sin()
        elif name == "insert_peg":
            position[rows], quaternion[rows] = scene.peg[rows, :3], scene.peg[rows, 3:]
            goal[rows] = scene.holes[rows, first]
        else:
            position[rows], quaternion[rows] = scene.blocks[rows, first, :3], scene.blocks[rows, first, 3:]
        if name == "push":
            goal[rows] = scene.mats[rows, second - NUM_BLOCKS]
        if name == "stack":
            goal[rows] = scene.blocks[rows, second, :3]
    return position, quaternion, goal, opening


def _known(drawer: Bool[Tensor, "N 1"], *, has_goal: Bool[Tensor, "N 1"]) -> Bool[Tensor, "N landmarks"]:
    always = torch.ones_like(drawer)
    columns = [(9, always), (9, has_goal), (2, always), (4, has_goal), (1, ~drawer), (1, drawer)]
    return torch.cat([part.expand(-1, width) for width, part in [*columns, (len(TASK_NAMES), always)]], dim=1)


def _relative(position: Float[Tensor, "N 3"], end_effector: Float[Tensor, "N 3"]) -> Float[Tensor, "N 9"]:
    offset = position - end_effector
    return torch.cat([(position - constant(CENTER, position)) / SCALE, offset / SCALE, (offset / NEAR).tanh()], dim=1)
