"""Pull the named drawer open, and no other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sims.devices.constant import constant
from sims.tabletop.grammar import expand
from sims.tabletop.placement import CABINET_AREA, CABINET_BAND, CABINET_YAW, DRAWS, Placement, first_accepted, inside
from sims.tabletop.scene import DRAWER_TRAVEL
from sims.tabletop.scene_state import SceneState, gap, lift, near, of_candidate, rotate_z
from sims.tabletop.task import Task
from sims.tabletop.waypoints import Waypoint

OPEN, SHUT = 0.65 * DRAWER_TRAVEL, 0.15 * DRAWER_TRAVEL  # [m]
DEPTH = -0.012  # [m] of the fingertips below the middle of the bar, for the expert
AT_HANDLE = 0.055  # [m] from the end effector to the middle of the bar: a drawer is opened by its handle


def place(rng: np.random.Generator, ood: bool) -> Placement:
    """The cabinet anywhere in its area, turned; outside of the area for ``ood``."""
    margin = CABINET_BAND if ood else 0.0
    low, high = np.array(CABINET_AREA[0]) - margin, np.array(CABINET_AREA[1]) + margin
    point = first_accepted(
        lambda: rng.uniform(low, high, (DRAWS, 2)), lambda points: ~(ood & inside(points, CABINET_AREA))
    )
    return Placement(fixtures={"cabinet": np.append(point, rng.uniform(-CABINET_YAW, CABINET_YAW))})


def achieved(scene: SceneState) -> Tensor:
    at_handle = gap(scene.end_effector[:, None], scene.handles) < AT_HANDLE
    other_is_shut = scene.drawers.flip(1) < SHUT
    return (scene.drawers > OPEN) & at_handle & other_is_shut


def progress(scene: SceneState) -> Tensor:
    reached = near(gap(scene.end_effector[:, None], scene.handles), 0.15)
    return 0.4 * reached + 0.6 * (scene.drawers / OPEN).clamp(0, 1)


def expert(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Put closed fingers behind the bar of the handle and pull."""
    handle, yaw = of_candidate(scene.handles, candidate), scene.cabinet_yaw
    offset = rotate_z(scene.end_effector - handle, -yaw)  # in the cabinet's frame
    inside_bar = (offset[:, 0] > -0.049) & (offset[:, 0] < -0.008) & (offset[:, 1].abs() < 0.026)
    hooked = inside_bar & (offset[:, 2] < 0.002)
    point = handle + rotate_z(torch.zeros_like(handle) + constant((-0.03, 0, DEPTH), handle), yaw)
    away = gap(point[:, :2], scene.end_effector[:, :2])
    approach = lift(point, ((away - 0.006) * 6).clamp(0, 0.09))
    pull = handle + rotate_z(torch.zeros_like(handle) + constant((0.03, 0, DEPTH), handle), yaw)
    goal = torch.where(hooked[:, None], pull, approach)
    return Waypoint(goal=goal, yaw=yaw, gripper=torch.ones_like(away))


OPEN_DRAWER = Task(
    name="open_drawer",
    objects=("drawers",),
    candidates=((0,), (1,)),
    place=place,
    achieved=achieved,
    progress=progress,
    expert=expert,
    phrasings=expand(
        "[open|pull out|pull open] the {0} drawer",
        "pull the {0} drawer [open|out|towards you]",
        "please [open|pull out] the {0} drawer",
    ),
    ood_phrasings=expand("slide out the drawer that is {0}", "get the {0} drawer open [please|now]"),
    held_out=frozenset({("yellow",)}),
    max_steps=64,
)
