"""Scripted rules of the tasks. They depend on the present scene only, so they can take over an episode at any time.

Each task's rule maps the scene to a waypoint (end-effector position, yaw, gripper); one controller turns waypoints into
actions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sims.tabletop.kinematics import rotation_matrix, rotation_vector
from sims.tabletop.scene import BLOCK_HALF, HOLE_HEIGHT, PEG_HALF
from sims.tabletop.tasks import _STACKS, SceneState
from sims.tensor_dataclass import TensorDataclass

POSITION_SPEED = 0.0125  # [m] per control step: 0.25 m/s, the reduced speed of ISO 10218
HOVER = 0.10  # [m] above an object before descending onto it


@dataclass(frozen=True, kw_only=True)
class Waypoint(TensorDataclass):
    """Goal of the end effector: position [m], yaw [rad], and gripper (-1 open, +1 closed)."""

    goal: Float[Tensor, "N 3"]
    yaw: Float[Tensor, " N"]
    gripper: Float[Tensor, " N"]


def _yaw(quaternion: Float[Tensor, "N 4"]) -> Float[Tensor, " N"]:
    w, x, y, z = quaternion.unbind(-1)
    return torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))


def _fold(angle: Tensor, period: float) -> Tensor:
    """The equivalent angle in [-period / 2, period / 2)."""
    return torch.remainder(angle + period / 2, period) - period / 2


def _end_effector_yaw(scene: SceneState) -> Float[Tensor, " N"]:
    return torch.atan2(scene.rotation[:, 1, 0], scene.rotation[:, 0, 0])


def _pick_slot(values: Float[Tensor, "N slots D"], slot: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
    return values[torch.arange(len(values), device=values.device), slot]


def _lift(goal: Tensor, height: Tensor | float) -> Tensor:
    """``goal`` raised by ``height`` [m]."""
    up = torch.zeros_like(goal)
    up[:, 2] = height
    return goal + up


def _grasp(scene: SceneState, point: Tensor, yaw: Tensor, half_width: float) -> tuple[Waypoint, Tensor]:
    """Approach ``point`` from above with open fingers and close them; and whether the object is held."""
    away = (point - scene.end_effector)[:, :2].norm(dim=1)
    low = scene.end_effector[:, 2] < point[:, 2] + 0.012
    # The smaller the horizontal distance, the lower the goal.
    goal = _lift(point, ((away - 0.008) * 5).clamp(0, HOVER))
    held = ((point - scene.end_effector).norm(dim=1) < 0.022) & (scene.fingers < half_width + 0.0025).all(1)
    close = (away < 0.013) & low
    return Waypoint(goal=goal, yaw=yaw, gripper=torch.where(close, 1.0, -1.0)), held


def _block_grasp(scene: SceneState, block: Tensor) -> tuple[Waypoint, Tensor]:
    yaw = _fold(_yaw(block[:, 3:]), math.pi / 2)
    return _grasp(scene, block[:, :3], yaw, BLOCK_HALF)


def reach(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Fingertips just above the block, coming from above."""
    block = _pick_slot(scene.blocks, candidate)
    away = (block - torch.nn.functional.pad(scene.end_effector, (0, 4)))[:, :2].norm(dim=1)
    goal = _lift(block[:, :3], 0.034 + ((away - 0.02) * 2).clamp(0, 0.06))
    return Waypoint(goal=goal, yaw=torch.zeros_like(away), gripper=torch.ones_like(away))


def pick(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Grasp and raise."""
    block = _pick_slot(scene.blocks, candidate)
    approach, held = _block_grasp(scene, block)
    goal = torch.cat([scene.end_effector[:, :2], torch.full_like(scene.end_effector[:, 2:], 0.2)], dim=1)
    raised = Waypoint(goal=goal, yaw=_end_effector_yaw(scene), gripper=torch.ones_like(approach.gripper))
    return raised.where(held, approach)


def _carry(scene: SceneState, held: Tensor, goal: Tensor, clearance: float, tolerance: float, yaw: Tensor) -> Waypoint:
    """Move the held object at ``held`` over ``goal``, then down to it: up, across, down."""
    across = (held - goal)[:, :2].norm(dim=1)
    height = torch.where(across < tolerance, 0.0, clearance)
    low = (held[:, 2] < goal[:, 2] + clearance - 0.02) & (across > 3 * tolerance)
    wanted = _lift(goal, height)
    wanted[:, :2] = torch.where(low[:, None], held[:, :2], wanted[:, :2])
    return Waypoint(goal=wanted + scene.end_effector - held, yaw=yaw, gripper=torch.ones_like(across))


def stack(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Grasp, carry over the other block, put down, release."""
    pairs = torch.tensor(_STACKS, device=candidate.device)[candidate]
    upper, lower = _pick_slot(scene.blocks, pairs[:, 0]), _pick_slot(scene.blocks, pairs[:, 1])
    approach, held = _block_grasp(scene, upper)
    goal = _lift(lower[:, :3], 2 * BLOCK_HALF)
    carry = _carry(scene, upper[:, :3], goal, 0.05, 0.01, _end_effector_yaw(scene))
    offset = upper[:, :3] - goal
    resting = (offset[:, :2].norm(dim=1) < 0.018) & (offset[:, 2].abs() < 0.006)
    release = Waypoint(
        goal=scene.end_effector, yaw=_end_effector_yaw(scene), gripper=-torch.ones_like(approach.gripper)
    )
    return release.where(resting, carry.where(held, approach))


def push(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Push from behind the block with closed fingers, always towards the mat's center."""
    block = _pick_slot(scene.blocks, candidate // 2)[:, :2]
    mat = _pick_slot(scene.mats, candidate % 2)[:, :2]
    ahead = torch.nn.functional.normalize(mat - block, dim=1)
    across = torch.stack([-ahead[:, 1], ahead[:, 0]], dim=1)
    offset = scene.end_effector[:, :2] - block
    along, aside = (offset * ahead).sum(1), (offset * across).sum(1)
    low = scene.end_effector[:, 2] < 0.045
    behind = (along < -BLOCK_HALF) & (aside.abs() < 0.025)
    start = block - ahead * (BLOCK_HALF + 0.045)
    away = (start - scene.end_effector[:, :2]).norm(dim=1)
    height = 0.022 + ((away - 0.015) * 5).clamp(0, 0.08)
    pushing = scene.end_effector[:, :2] + 0.03 * ahead - 1.2 * aside[:, None] * across
    goal = torch.where((low & behind)[:, None], pushing, start)
    height = torch.where(low & behind, 0.022, height)
    yaw = _fold(torch.atan2(ahead[:, 1], ahead[:, 0]), math.pi)
    return Waypoint(goal=torch.cat([goal, height[:, None]], dim=1), yaw=yaw, gripper=torch.ones_like(yaw))


def open_drawer(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Put closed fingers behind the bar of the handle and pull."""
    handle = _pick_slot(scene.handles, candidate)
    offset = scene.end_effector - handle
    inside = (offset[:, 0] > -0.045) & (offset[:, 0] < -0.008) & (offset[:, 1].abs() < 0.03)
    hooked = inside & (offset[:, 2] < 0.012)
    point = handle + handle.new_tensor([-0.026, 0, 0.002])
    away = (point - scene.end_effector)[:, :2].norm(dim=1)
    approach = _lift(point, ((away - 0.006) * 6).clamp(0, 0.09))
    pull = handle + handle.new_tensor([0.03, 0, 0.002])
    goal = torch.where(hooked[:, None], pull, approach)
    return Waypoint(goal=goal, yaw=torch.zeros_like(away), gripper=torch.ones_like(away))


def insert_peg(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Grasp near the top, align the peg with the hole, carry it there, lower it."""
    peg, hole = scene.peg, _pick_slot(scene.holes, candidate)
    yaw = _yaw(peg[:, 3:])
    point = _lift(peg[:, :3], 0.022)
    approach, held = _grasp(scene, point, _fold(yaw, math.pi / 2), PEG_HALF[0])
    goal = _lift(hole, PEG_HALF[2] + 0.005)
    aligned = _end_effector_yaw(scene) - _fold(yaw, math.pi / 2)
    carry = _carry(scene, peg[:, :3], goal, HOLE_HEIGHT + 0.02, 0.006, aligned)
    return carry.where(held, approach)


RULES = {
    "reach": reach,
    "pick": pick,
    "push": push,
    "stack": stack,
    "open_drawer": open_drawer,
    "insert_peg": insert_peg,
}


@runtime_checkable
class ExpertView(Protocol):
    """The part of the environment that a demonstrator reads."""

    @property
    def scene(self) -> SceneState: ...
    @property
    def task_envs(self) -> list[tuple[str, Int[Tensor, " n"]]]: ...
    @property
    def candidate(self) -> Int[Tensor, " N"]: ...
    @property
    def target(self) -> tuple[Float[Tensor, "N 3"], Float[Tensor, "N 3 3"]]: ...
    @property
    def elapsed(self) -> Int[Tensor, " N"]: ...


def next_waypoint(env: ExpertView, error: Float[Tensor, "N 3"]) -> Waypoint:
    """Of every environment's task, if the end effector is perceived displaced by ``error`` [m]."""
    goal = torch.zeros_like(error)
    yaw, gripper = torch.zeros_like(goal[:, 0]), torch.zeros_like(goal[:, 0])
    for name, env_ids in env.task_envs:
        scene, offset = env.scene[env_ids], error[env_ids]
        waypoint = RULES[name](replace(scene, end_effector=scene.end_effector + offset), env.candidate[env_ids])
        goal[env_ids], yaw[env_ids], gripper[env_ids] = waypoint.goal - offset, waypoint.yaw, waypoint.gripper
    return Waypoint(goal=goal, yaw=yaw, gripper=gripper)


def motion_towards(
    env: ExpertView, goal: Float[Tensor, "N 3"], yaw: Float[Tensor, " N"]
) -> tuple[Float[Tensor, "N 6"], Float[Tensor, "N 1"]]:
    """The first six action dimensions, translation at POSITION_SPEED at most and rotation; norm of the translation."""
    position, rotation = env.target
    move = goal - position
    move = move * (POSITION_SPEED / move.norm(dim=1, keepdim=True).clamp(min=POSITION_SPEED))
    zero = torch.zeros_like(yaw)
    down = torch.diag(torch.tensor([1.0, -1.0, -1.0], device=goal.device))
    wanted = rotation_matrix(torch.stack([zero, zero, yaw], dim=1)) @ down
    turn = rotation_vector(wanted @ rotation.mT)
    motion = torch.cat([move / 0.05, (turn / 0.5).clamp(-0.5, 0.5)], dim=1)
    return motion, move.norm(dim=1, keepdim=True) / 0.05
