"""Initial state, instruction and appearance of an episode, all sampled from (seed, task) alone.

Coordinates as in scene.py. Appearance and positions have a training range, and a range beyond it for the
out-of-distribution splits.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from sims.tabletop.scene import BLOCK_HALF, MOCAP, NUM_BLOCKS, PARKED_X, PEG_HALF
from sims.tabletop.tasks import COLORS, TASKS, Split, Task

NQ, NV = 39, 35
ARM, FINGERS = slice(0, 7), slice(7, 9)
BLOCK_QPOS, PEG_QPOS, DRAWER_QPOS = slice(9, 30), slice(30, 37), slice(37, 39)
BLOCK_DOF, PEG_DOF = 9, 27  # first velocity of each

SCATTER = ((0.42, -0.18), (0.58, 0.18))  # lower and upper corner of the area of scattered blocks in training
SCATTER_BAND = 0.05  # width of the band around it for ood_position

# End effector at (0.45, 0, 0.21), pointing down.
START_JOINTS = (0.0, -0.1085, 0.0, -2.5345, 0.0, 2.426, math.pi / 4)

RGB = {
    "red": (0.86, 0.11, 0.11),
    "green": (0.13, 0.62, 0.2),
    "blue": (0.12, 0.28, 0.86),
    "yellow": (0.98, 0.8, 0.08),
    "purple": (0.56, 0.18, 0.7),
    "cyan": (0.1, 0.78, 0.82),
}
_SURFACE = ((0.86, 0.86, 0.85), (0.78, 0.8, 0.82), (0.68, 0.69, 0.7), (0.82, 0.79, 0.75))
_OOD_SURFACE = ((0.25, 0.27, 0.3), (0.42, 0.34, 0.28), (0.38, 0.44, 0.38))


@dataclass(frozen=True, kw_only=True)
class Appearance:
    """RGB in 0..1; camera offsets [m] and small rotation vector [rad] of (agent, wrist)."""

    blocks: np.ndarray  # [3, 3]
    pair: np.ndarray  # [2, 3]: mats, drawer fronts or hole rims
    surface: np.ndarray  # [3], under the objects
    light_direction: np.ndarray  # [3]
    light: float
    camera_offset: np.ndarray  # [2, 3]
    camera_turn: np.ndarray  # [2, 3]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The initial state of an episode, its instruction, and the candidate that the instruction names."""

    task: Task
    instruction: str
    colors: tuple[str, ...]  # of the task's colored objects
    candidate: int
    qpos: np.ndarray  # [NQ]
    fixtures: np.ndarray  # [len(MOCAP), 3]
    parked: np.ndarray  # [NUM_BLOCKS + 1] bool: blocks, peg
    appearance: Appearance


def sample_layout(task_name: str, seed: int, *, split: Split, appearance: float) -> Layout:
    """The layout of ``(task_name, seed)``. ``appearance`` scales the randomization of light, table and cameras."""
    task = TASKS[task_name]
    rng = np.random.default_rng([seed, list(TASKS).index(task_name)])
    colors, candidate = _sample_instruction(task, rng, split)
    phrasings = task.ood_phrasings if split == "ood_phrasing" else task.phrasings
    phrase = phrasings[rng.integers(len(phrasings))]
    qpos, fixtures = _sample_poses(task, rng, ood=split == "ood_position")
    parked = np.array(["blocks" not in task.objects] * NUM_BLOCKS + ["peg" not in task.objects])
    return Layout(
        task=task,
        instruction=phrase.format(*(colors[slot] for slot in task.candidates[candidate])),
        colors=colors,
        candidate=candidate,
        qpos=qpos,
        fixtures=fixtures,
        parked=parked,
        appearance=_sample_appearance(task, colors, rng, amount=appearance, ood=split == "ood_appearance"),
    )


def _sample_instruction(task: Task, rng: np.random.Generator, split: Split) -> tuple[tuple[str, ...], int]:
    """Colors of the slots and the named candidate, such that their combination is (or is not) held out."""
    candidate = int(rng.integers(len(task.candidates)))
    slots = task.candidates[candidate]
    wanted = split == "ood_combination"
    combinations = [c for c in itertools.permutations(COLORS, len(slots)) if (c in task.held_out) == wanted]
    named = combinations[rng.integers(len(combinations))]
    others = iter(rng.permutation([color for color in COLORS if color not in named]))
    by_slot = dict(zip(slots, named, strict=True))
    return tuple(str(by_slot[s]) if s in by_slot else str(next(others)) for s in range(task.num_colors)), candidate


def _place(rng: np.random.Generator, points: list[list[float]], *, jitter: float, ood: bool) -> np.ndarray:
    """``points`` (x, y), each moved by up to ``jitter`` [m]; if ``ood``, all shifted together beyond that."""
    moved = np.array(points) + rng.uniform(-jitter, jitter, (len(points), 2))
    if not ood:
        return moved
    return moved + rng.choice([-1.0, 1.0], 2) * rng.uniform(2 * jitter, 2 * jitter + 0.01, 2)


def _scatter(rng: np.random.Generator, *, ood: bool) -> list[list[float]]:
    """Block centers (x, y) at least 0.12 m apart; if ``ood``, in a band around the training area."""
    (x0, y0), (x1, y1) = SCATTER
    margin = SCATTER_BAND if ood else 0.0
    while True:
        points: list[list[float]] = []
        for x, y in rng.uniform((x0 - margin, y0 - margin), (x1 + margin, y1 + margin), (16, 2)).tolist():
            inside = x0 <= x <= x1 and y0 <= y <= y1
            if inside != ood and all(math.dist((x, y), other) > 0.12 for other in points):
                points.append([x, y])
            if len(points) == NUM_BLOCKS:
                return points


def _sample_poses(task: Task, rng: np.random.Generator, *, ood: bool) -> tuple[np.ndarray, np.ndarray]:
    """Initial qpos and fixture positions; objects that the task does not use are parked out of sight."""
    fixtures = np.array([[PARKED_X + 0.5 * i, 0.0, 0.5] for i in range(len(MOCAP))])
    qpos = np.zeros(NQ)
    qpos[ARM] = np.array(START_JOINTS) + rng.uniform(-0.03, 0.03, 7)
    qpos[FINGERS] = 0.04
    blocks = qpos[BLOCK_QPOS].reshape(NUM_BLOCKS, 7)
    blocks[:, :3] = [[PARKED_X, 1.0 + 0.3 * i, 0.5] for i in range(NUM_BLOCKS)]
    blocks[:, 3] = 1.0
    qpos[PEG_QPOS] = [PARKED_X, -1.0, 0.5, 1, 0, 0, 0]
    if "mats" in task.objects:
        blocks_xy = [[0.43, -0.15], [0.43, 0.0], [0.43, 0.15]]
        places = _place(rng, [*blocks_xy, [0.6, 0.11], [0.6, -0.11]], jitter=0.018, ood=ood)
        blocks[:, :2], fixtures[0:2, :2] = places[:3], places[3:]
    elif "blocks" in task.objects:
        blocks[:, :2] = _scatter(rng, ood=ood)
    if "blocks" in task.objects:
        yaw = rng.uniform(-math.pi / 4, math.pi / 4, NUM_BLOCKS)
        blocks[:, 2] = BLOCK_HALF
        blocks[:, 3], blocks[:, 6] = np.cos(yaw / 2), np.sin(yaw / 2)
    if "drawers" in task.objects:
        fixtures[2, :2] = _place(rng, [[0.36, 0.0]], jitter=0.025, ood=ood)
    if "peg" in task.objects:
        places = _place(rng, [[0.42, 0.0], [0.57, 0.11], [0.57, -0.11]], jitter=0.025, ood=ood)
        turn = rng.uniform(-math.pi / 4, math.pi / 4)
        qpos[PEG_QPOS] = [*places[0], PEG_HALF[2], math.cos(turn / 2), 0, 0, math.sin(turn / 2)]
        fixtures[3:5, :2] = places[1:]
    fixtures[fixtures[:, 0] < PARKED_X, 2] = 0.0
    return qpos, fixtures


def _sample_appearance(
    task: Task, colors: tuple[str, ...], rng: np.random.Generator, *, amount: float, ood: bool
) -> Appearance:
    rgb = np.array([RGB[color] for color in colors])
    rgb = np.clip(rgb + amount * rng.uniform(-0.04, 0.04, rgb.shape), 0, 1)
    num_blocks = NUM_BLOCKS if "blocks" in task.objects else 0
    surfaces = np.array(_OOD_SURFACE if ood else _SURFACE)
    tint = rng.uniform(-0.06, 0.06) + rng.uniform(-0.015, 0.015, 3)
    surface = surfaces[0] + amount * (surfaces[rng.integers(len(surfaces))] - surfaces[0] + tint)
    wide = 2.0 if ood else 1.0
    direction = np.array([-0.5, 0.3, -0.8]) + amount * wide * rng.uniform(-0.25, 0.25, 3)
    return Appearance(
        blocks=rgb[:num_blocks] if num_blocks else np.ones((NUM_BLOCKS, 3)),
        pair=rgb[num_blocks:] if len(rgb) > num_blocks else np.ones((2, 3)),
        surface=surface,
        light_direction=direction / np.linalg.norm(direction),
        light=float(0.5 + amount * wide * rng.uniform(-0.1, 0.1)),
        camera_offset=amount * wide * rng.uniform(-0.012, 0.012, (2, 3)) * np.array([[1.0], [0.25]]),
        camera_turn=amount * wide * rng.uniform(-0.015, 0.015, (2, 3)),
    )
