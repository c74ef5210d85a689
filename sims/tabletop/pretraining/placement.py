"""Random poses of objects, drawers and end effector: scenes beyond the initial states of episodes.

Objects stay within the areas of the split ``train`` (sims/tabletop/placement.py).
"""

from __future__ import annotations

import math

import numpy as np

from sims.tabletop.layout import BLOCK_QPOS, DRAWER_QPOS, FINGERS, PEG_QPOS, Layout
from sims.tabletop.placement import AREA, inside, scatter
from sims.tabletop.scene import BLOCK_HALF, DRAWER_TRAVEL, DRAWER_Y, FINGER_OPEN, HANDLE, NUM_BLOCKS, PEG_HALF

SPACE = ((0.34, -0.26, 0.02), (0.7, 0.26, 0.34))  # of the end effector [m]


def scatter_objects(layout: Layout, rng: np.random.Generator) -> None:
    """Other poses of the objects in half of the scenes, drawers closed to fully open, fingers anywhere."""
    objects, qpos, fixtures = layout.task.objects, layout.qpos, layout.fixtures
    qpos[FINGERS] = rng.choice([0.0, FINGER_OPEN, rng.uniform(0, FINGER_OPEN)], p=[0.4, 0.4, 0.2])
    if "drawers" in objects:
        qpos[DRAWER_QPOS] = DRAWER_TRAVEL * rng.uniform(0, 1, 2) * (rng.uniform(size=2) < 0.7)
    if rng.uniform() < 0.5:
        return
    if "blocks" in objects:
        blocks = qpos[BLOCK_QPOS].reshape(NUM_BLOCKS, 7)
        blocks[:, :2] = scatter(rng, NUM_BLOCKS, distance=0.06)
        if rng.uniform() < 0.2:  # one lies on another
            below, above = rng.permutation(NUM_BLOCKS)[:2]
            blocks[above, :3] = blocks[below, :3] + [0, 0, 2 * BLOCK_HALF]
            blocks[above, :2] = np.clip(blocks[above, :2] + rng.normal(0, 0.006, 2), *AREA)
    if "mats" in objects:
        fixtures[0:2, :2] = scatter(rng, 2, distance=0.13)
    if "holes" in objects:
        fixtures[3:5, :2] = scatter(rng, 2, distance=0.13)
    if "peg" in objects:
        qpos[PEG_QPOS][:2] = scatter(rng, 1, distance=0.0)[0]


def _object_positions(layout: Layout) -> list[np.ndarray]:
    """Of all objects on this table [m]."""
    objects, fixtures = layout.task.objects, layout.fixtures
    positions: list[np.ndarray] = []
    if "blocks" in objects:
        positions += list(layout.qpos[BLOCK_QPOS].reshape(NUM_BLOCKS, 7)[:, :3])
    if "peg" in objects:
        positions.append(layout.qpos[PEG_QPOS][:3])
    if "mats" in objects:
        positions += list(fixtures[0:2, :3])
    if "holes" in objects:
        positions += list(fixtures[3:5, :3])
    if "drawers" in objects:
        cosine, sine = math.cos(fixtures[2, 3]), math.sin(fixtures[2, 3])
        for opening, y in zip(layout.qpos[DRAWER_QPOS], (DRAWER_Y, -DRAWER_Y), strict=True):
            x = HANDLE[0] + opening
            positions.append(fixtures[2, :3] + [cosine * x - sine * y, sine * x + cosine * y, HANDLE[1]])
    return positions


def sample_pose(layout: Layout, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Position [m] and rotation from straight down [rad] of the end effector.

    Anywhere, over an object, or low beside one with the fingers mostly closed, as in a push.
    """
    kind = rng.choice(["anywhere", "over", "beside"], p=[0.2, 0.45, 0.35])
    if kind == "anywhere":
        place = rng.uniform(*SPACE)
    else:
        positions = _object_positions(layout)
        several = len(positions) > 1 and "peg" not in layout.task.objects
        named = layout.task.candidates[layout.candidate][0] if several else 0
        place = positions[named if rng.uniform() < 0.6 else rng.integers(len(positions))].copy()
    if kind == "over":
        place += rng.normal(0, rng.choice([0.012, 0.06]), 3)
        place[2] += rng.choice([0.0, rng.exponential(0.06)])
    if kind == "beside":
        angle, away = rng.uniform(-math.pi, math.pi), rng.uniform(0.02, 0.09)
        place += [away * math.cos(angle), away * math.sin(angle), rng.uniform(-0.02, 0.04)]
        if rng.uniform() < 0.8:
            layout.qpos[FINGERS] = 0.0
    yaw = rng.uniform(-1, 1) * rng.choice([0.1, math.pi / 4, math.pi / 2])
    return np.clip(place, *SPACE), np.array([*rng.normal(0, 0.03, 2), yaw])


def put_in_hand(layout: Layout, rng: np.random.Generator, position: np.ndarray, rotation: np.ndarray) -> None:
    """In up to a sixth of the scenes the end effector at ``position`` [m] holds a block, or the peg; only in AREA."""
    objects = layout.task.objects
    if not {"blocks", "peg"} & set(objects) or rng.uniform() > 1 / 6 or not inside(position[:2], AREA):
        return
    if "peg" in objects:
        pose, half, below = layout.qpos[PEG_QPOS], PEG_HALF[0], rng.uniform(0.0, 0.035)
    else:
        # Mostly the named one: whether it is grasped must differ from whether anything is.
        slot = layout.task.candidates[layout.candidate][0] if rng.uniform() < 0.7 else rng.integers(NUM_BLOCKS)
        pose, half, below = layout.qpos[BLOCK_QPOS].reshape(NUM_BLOCKS, 7)[slot], BLOCK_HALF, rng.normal(0, 0.006)
    yaw = math.atan2(rotation[1, 0], rotation[0, 0]) + rng.integers(2) * math.pi / 2
    along = rng.normal(0, 0.006) * rotation[:, 0]
    pose[:3] = position + along - [0, 0, below]
    pose[:2] = np.clip(pose[:2], *AREA)
    pose[2] = max(pose[2], PEG_HALF[2] if "peg" in objects else BLOCK_HALF)
    pose[3:] = [math.cos(yaw / 2), 0, 0, math.sin(yaw / 2)]
    layout.qpos[FINGERS] = half + rng.uniform(-0.0005, 0.001)
