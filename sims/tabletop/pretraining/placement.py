"""Random poses of objects, drawers and end effector: scenes beyond the initial states of episodes."""

from __future__ import annotations

import math

import numpy as np

from sims.tabletop.layout import BLOCK_QPOS, DRAWER_QPOS, FINGERS, PEG_QPOS, Layout
from sims.tabletop.scene import BLOCK_HALF, DRAWER_TRAVEL, DRAWER_Y, FINGER_OPEN, HANDLE, NUM_BLOCKS, PEG_HALF

AREA = ((0.38, -0.21), (0.66, 0.21))  # lower and upper corner [m] of the area of objects
SPACE = ((0.34, -0.26, 0.02), (0.7, 0.26, 0.34))  # of the end effector [m]


def scatter_objects(layout: Layout, rng: np.random.Generator) -> None:
    """Other poses of the objects in half of the scenes, drawers closed to fully open, fingers anywhere."""
    objects, qpos, fixtures = layout.task.objects, layout.qpos, layout.fixtures
    qpos[FINGERS] = rng.choice([0.0, FINGER_OPEN, rng.uniform(0, FINGER_OPEN)], p=[0.4, 0.4, 0.2])
    if "drawers" in objects:
        qpos[DRAWER_QPOS] = DRAWER_TRAVEL * rng.uniform(0, 1, 2) * (rng.uniform(size=2) < 0.7)
        if rng.uniform() < 0.5:
            fixtures[2, :2] += rng.uniform((-0.02, -0.04), (0.03, 0.04))
    if rng.uniform() < 0.5:
        return
    if "blocks" in objects:
        blocks = qpos[BLOCK_QPOS].reshape(NUM_BLOCKS, 7)
        blocks[:, :2] = _places(rng, NUM_BLOCKS, gap=0.06)
        if rng.uniform() < 0.2:  # one lies on another
            below, above = rng.permutation(NUM_BLOCKS)[:2]
            blocks[above, :3] = blocks[below, :3] + [*rng.normal(0, 0.006, 2), 2 * BLOCK_HALF]
    if "mats" in objects:
        fixtures[0:2, :2] = _places(rng, 2, gap=0.13)
    if "holes" in objects:
        fixtures[3:5, :2] = _places(rng, 2, gap=0.13)
    if "peg" in objects:
        qpos[PEG_QPOS][:2] = _places(rng, 1, gap=0.0)[0]


def _places(rng: np.random.Generator, count: int, *, gap: float) -> np.ndarray:
    """``count`` places (x, y) [m] in AREA, at least ``gap`` apart."""
    while True:
        places = rng.uniform(*AREA, (count, 2))
        distances = np.linalg.norm(places[:, None] - places[None], axis=-1) + np.eye(count)
        if distances.min() >= gap:
            return places


def _object_positions(layout: Layout) -> list[np.ndarray]:
    """Of all objects on this table [m]."""
    objects, fixtures = layout.task.objects, layout.fixtures
    positions: list[np.ndarray] = []
    if "blocks" in objects:
        positions += list(layout.qpos[BLOCK_QPOS].reshape(NUM_BLOCKS, 7)[:, :3])
    if "peg" in objects:
        positions.append(layout.qpos[PEG_QPOS][:3])
    if "mats" in objects:
        positions += list(fixtures[0:2])
    if "holes" in objects:
        positions += list(fixtures[3:5])
    if "drawers" in objects:
        for opening, y in zip(layout.qpos[DRAWER_QPOS], (DRAWER_Y, -DRAWER_Y), strict=True):
            positions.append(fixtures[2] + [HANDLE[0] + opening, y, HANDLE[1]])
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
    """In a sixth of the scenes the end effector at ``position`` [m] holds a block, or the peg."""
    objects = layout.task.objects
    if not {"blocks", "peg"} & set(objects) or rng.uniform() > 1 / 6:
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
    pose[2] = max(pose[2], PEG_HALF[2] if "peg" in objects else BLOCK_HALF)
    pose[3:] = [math.cos(yaw / 2), 0, 0, math.sin(yaw / 2)]
    layout.qpos[FINGERS] = half + rng.uniform(-0.0005, 0.001)
