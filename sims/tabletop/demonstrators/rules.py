"""The next action towards the waypoint of each environment's task."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sims.devices.constant import constant
from sims.tabletop.end_effector_control import POSITION_SCALE, ROTATION_SCALE
from sims.tabletop.kinematics import rotation_matrix, rotation_vector
from sims.tabletop.scene_state import SceneState
from sims.tabletop.tasks.registry import all_tasks
from sims.tabletop.waypoints import Waypoint

POSITION_SPEED = 0.0125  # [m] per control step: 0.25 m/s, the reduced speed of ISO 10218


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
        seen = replace(scene, end_effector=scene.end_effector + offset)
        waypoint = all_tasks()[name].expert(seen, env.candidate[env_ids])
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
    down = constant(((1, 0, 0), (0, -1, 0), (0, 0, -1)), goal)
    wanted = rotation_matrix(torch.stack([zero, zero, yaw], dim=1)) @ down
    turn = rotation_vector(wanted @ rotation.mT)
    motion = torch.cat([move / POSITION_SCALE, (turn / ROTATION_SCALE).clamp(-0.5, 0.5)], dim=1)
    return motion, move.norm(dim=1, keepdim=True) / POSITION_SCALE
