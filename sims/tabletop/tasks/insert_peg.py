"""Put the peg into the named hole and let go."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from sims.tabletop.grammar import expand
from sims.tabletop.placement import BACK, DRAWS, FRONT, OOD_BACK, OOD_FRONT, Placement, apart, first_accepted, with_yaw
from sims.tabletop.scene import HOLE_HEIGHT, PEG_HALF
from sims.tabletop.scene_state import SceneState, gap, lift, near, of_candidate, quaternion_yaw
from sims.tabletop.task import Task
from sims.tabletop.waypoints import Waypoint, carry, end_effector_yaw, fold, grasp

HOLE_YAW = 0.25  # [rad] largest turn of a hole


def place(rng: np.random.Generator, ood: bool) -> Placement:
    """The peg in front, two holes behind it."""
    front, back = (OOD_FRONT, OOD_BACK) if ood else (FRONT, BACK)
    peg = with_yaw(rng, rng.uniform(*front, (1, 2)), math.pi / 4)[0]
    points = first_accepted(lambda: rng.uniform(*back, (DRAWS, 2, 2)), lambda points: apart(points, 0.15))
    holes = with_yaw(rng, points, HOLE_YAW)
    return Placement(peg=peg, fixtures={"hole0": holes[0], "hole1": holes[1]})


def achieved(scene: SceneState) -> Tensor:
    centered = gap(scene.peg[:, None, :2], scene.holes[..., :2]) < 0.014
    upright = 1 - 2 * scene.peg[:, 4:6].square().sum(-1)  # cosine of the tilt
    lower_end = scene.peg[:, 2] - PEG_HALF[2] * upright.abs()  # a peg that lies on the hole has its center as low
    released = (scene.fingers > PEG_HALF[0] + 0.006).all(-1, keepdim=True)
    return centered & (lower_end < 0.015)[:, None] & released


def progress(scene: SceneState) -> Tensor:
    reached = near(gap(scene.end_effector, scene.peg[:, :3]), 0.1)[:, None]
    return 0.4 * reached + 0.6 * near(gap(scene.peg[:, None, :3], lift(scene.holes, PEG_HALF[2])), 0.15)


def expert(scene: SceneState, candidate: Tensor) -> Waypoint:
    """Grasp near the top, align the peg with the hole, carry it there, lower it, let go."""
    hole = of_candidate(scene.fixtures[:, 3:5], candidate)
    peg, peg_yaw, yaw = scene.peg[:, :3], quaternion_yaw(scene.peg[:, 3:]), end_effector_yaw(scene)
    approach, held = grasp(scene, lift(peg, 0.022), fold(peg_yaw, math.pi / 2), PEG_HALF[0])
    aligned = yaw - fold(peg_yaw - hole[:, 3], math.pi / 2)
    goal = lift(hole[:, :3], PEG_HALF[2] + 0.005)
    over = carry(scene, peg, goal, aligned, clearance=HOLE_HEIGHT + 0.02, tolerance=0.006)
    inserted = (gap(peg[:, :2], hole[:, :2]) < 0.012) & (peg[:, 2] < PEG_HALF[2] + 0.012)
    release = Waypoint(goal=scene.end_effector, yaw=yaw, gripper=-torch.ones_like(yaw))
    return release.where(inserted, over.where(held, approach))


INSERT_PEG = Task(
    name="insert_peg",
    objects=("peg", "holes"),
    candidates=((0,), (1,)),
    place=place,
    achieved=achieved,
    progress=progress,
    expert=expert,
    phrasings=expand(
        "[put|drop|place] the peg [in|into] the {0} hole",
        "[insert|push] the peg into the {0} hole",
        "please put the peg in the {0} hole",
        "plug the {0} hole with the peg",
    ),
    ood_phrasings=expand("[let|get] the peg down the {0} hole", "fit the wooden stick into the {0} [socket|hole]"),
    held_out=frozenset({("blue",)}),
    max_steps=96,
)
