"""Waypoints of scripted experts, and motions that several experts share.

They depend on the present scene only, so an expert can take over an episode at any time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sims.tabletop.scene import BLOCK_HALF
from sims.tabletop.scene_state import SceneState, gap, lift, quaternion_yaw
from sims.tensor_dataclass import TensorDataclass

HOVER = 0.10  # [m] above an object before descending onto it


@dataclass(frozen=True, kw_only=True)
class Waypoint(TensorDataclass):
    """Goal of the end effector: position [m], yaw [rad], and gripper (-1 open, +1 closed)."""

    goal: Float[Tensor, "N 3"]
    yaw: Float[Tensor, " N"]
    gripper: Float[Tensor, " N"]


def fold(angle: Tensor, period: float) -> Tensor:
    """The equivalent angle in [-period / 2, period / 2)."""
    return torch.remainder(angle + period / 2, period) - period / 2


def end_effector_yaw(scene: SceneState) -> Float[Tensor, " N"]:
    return torch.atan2(scene.rotation[:, 1, 0], scene.rotation[:, 0, 0])


def grasp(
    scene: SceneState, point: Float[Tensor, "N 3"], yaw: Float[Tensor, " N"], half_width: float
) -> tuple[Waypoint, Bool[Tensor, " N"]]:
    """Approach ``point`` from above with open fingers and close them; and whether the object is held."""
    away = gap(point[:, :2], scene.end_effector[:, :2])
    low = scene.end_effector[:, 2] < point[:, 2] + 0.012
    # The smaller the horizontal distance, the lower the goal.
    goal = lift(point, ((away - 0.008) * 5).clamp(0, HOVER))
    held = (gap(point, scene.end_effector) < 0.022) & (scene.fingers < half_width + 0.0025).all(1)
    close = (away < 0.013) & low
    return Waypoint(goal=goal, yaw=yaw, gripper=torch.where(close, 1.0, -1.0)), held


def grasp_block(scene: SceneState, block: Float[Tensor, "N 7"]) -> tuple[Waypoint, Bool[Tensor, " N"]]:
    yaw = fold(quaternion_yaw(block[:, 3:]), math.pi / 2)
    return grasp(scene, block[:, :3], yaw, BLOCK_HALF)


def carry(
    scene: SceneState,
    held: Float[Tensor, "N 3"],
    goal: Float[Tensor, "N 3"],
    yaw: Float[Tensor, " N"],
    *,
    clearance: float,
    tolerance: float,
) -> Waypoint:
    """Move the held object at ``held`` over ``goal``, then down to it: up, across, down."""
    across = gap(held[:, :2], goal[:, :2])
    height = torch.where(across < tolerance, 0.0, clearance)
    low = (held[:, 2] < goal[:, 2] + clearance - 0.02) & (across > 3 * tolerance)
    wanted = lift(goal, height)
    wanted[:, :2] = torch.where(low[:, None], held[:, :2], wanted[:, :2])
    return Waypoint(goal=wanted + scene.end_effector - held, yaw=yaw, gripper=torch.ones_like(across))


def retreat(scene: SceneState, gripper: float) -> Waypoint:
    """Straight up from where the end effector is, with this gripper command."""
    yaw = end_effector_yaw(scene)
    return Waypoint(goal=lift(scene.end_effector, 0.05), yaw=yaw, gripper=torch.full_like(yaw, gripper))
