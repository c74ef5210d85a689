"""Scripted experts. They depend on the present scene only, so they can take over an episode at any time.

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
    """The part of the environment that the expert reads."""

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


JITTER = 0.05  # std of the AR(1) noise on actions of full size
AIM = 0.001  # [m] std of the goal error of an episode
# Error of the end-effector position [m] (left, too low) in tasks where the hand comes from above and hides the object.
OCCLUSION_ERROR = (0.0, 0.021, -0.0125)
FROM_ABOVE = ("reach", "pick", "stack", "open_drawer", "insert_peg")


class ScriptedExpert:
    """Acts by the rule of each environment's task, with errors in proportion to ``noise``.

    With ``noise`` 1 there are two errors: correlated action noise, and, where the hand comes from above and hides the
    object, a position error of 21 mm sideways and 12.5 mm upwards, so that it often fails. A policy that imitates this
    expert has the same error, and reinforcement learning has to remove it.
    """

    def __init__(self, env: ExpertView, *, noise: float, seed: int) -> None:
        self._env, self._noise = env, noise
        device = env.candidate.device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        n = len(env.candidate)
        self._drift = torch.zeros(n, 7, device=device)
        self._offset = torch.zeros(n, 3, device=device)
        self._occlusion_error = noise * torch.tensor(OCCLUSION_ERROR, device=device)
        self._down = torch.diag(torch.tensor([1.0, -1.0, -1.0], device=device))

    def act(self) -> Float[Tensor, "N 7"]:
        """The next action of every environment, in [-1, 1]."""
        env, n = self._env, len(self._drift)
        goal = torch.zeros(n, 3, device=self._drift.device)
        yaw, gripper = torch.zeros_like(goal[:, 0]), torch.zeros_like(goal[:, 0])
        for name, env_ids in env.task_envs:
            scene, error = (
                env.scene[env_ids],
                self._occlusion_error if name in FROM_ABOVE else 0 * self._occlusion_error,
            )
            waypoint = RULES[name](replace(scene, end_effector=scene.end_effector + error), env.candidate[env_ids])
            goal[env_ids], yaw[env_ids], gripper[env_ids] = waypoint.goal - error, waypoint.yaw, waypoint.gripper
        self._draw_noise()
        position, rotation = env.target
        move = goal + self._offset - position
        move = move * (POSITION_SPEED / move.norm(dim=1, keepdim=True).clamp(min=POSITION_SPEED))
        zero = torch.zeros_like(yaw)
        wanted = rotation_matrix(torch.stack([zero, zero, yaw], dim=1)) @ self._down
        turn = rotation_vector(wanted @ rotation.mT)
        action = torch.cat([move / 0.05, (turn / 0.5).clamp(-0.5, 0.5), gripper[:, None]], dim=1)
        # Fast motion is noisier than slow motion.
        size = 0.15 + move.norm(dim=1, keepdim=True) / 0.05
        return (action + size * self._drift).clamp(-1, 1)

    def _draw_noise(self) -> None:
        """Advance the correlated noise; at the start of an episode a new goal error is sampled."""
        shape = (len(self._drift), 10)
        draw = self._noise * torch.randn(shape, generator=self._generator, device=self._drift.device)
        fresh = (self._env.elapsed == 0)[:, None]
        shock = JITTER * draw[:, :7] * draw.new_tensor([1, 1, 1, 0.3, 0.3, 0.3, 0])
        self._drift = torch.where(fresh, shock, 0.8 * self._drift + 0.6 * shock)
        self._offset = torch.where(fresh, AIM * draw[:, 7:], self._offset)
