"""Initial state, instruction and appearance of an episode, all sampled from (seed, task) alone.

Coordinates as in scene.py. Appearance and positions (placement.py) have a training range, and a range beyond it for
the out-of-distribution splits.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from sims.tabletop.scene import DISTRACTORS, FINGER_OPEN, NUM_BLOCKS, PARKED_X
from sims.tabletop.scene_state import SceneState
from sims.tabletop.task import COLORS, Split, Task
from sims.tabletop.tasks.registry import all_tasks, seed_of

NQ, NV = 39, 35
ARM, FINGERS = slice(0, 7), slice(7, 9)
BLOCK_QPOS, PEG_QPOS, DRAWER_QPOS = slice(9, 30), slice(30, 37), slice(37, 39)
BLOCK_DOF, PEG_DOF = 9, 27  # first velocity of each

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
# Tints of the surface under the objects, the table and the wall; those of ood_appearance are darker.
_SURFACE = (
    (0.86, 0.86, 0.85),
    (0.78, 0.8, 0.82),
    (0.68, 0.69, 0.7),
    (0.82, 0.79, 0.75),
    (0.72, 0.78, 0.74),
    (0.8, 0.74, 0.78),
)
_TABLE = ((0.72, 0.57, 0.42), (0.62, 0.52, 0.42), (0.66, 0.66, 0.64), (0.8, 0.7, 0.56))
_WALL = ((0.55, 0.6, 0.66), (0.66, 0.64, 0.6), (0.6, 0.66, 0.6), (0.7, 0.7, 0.72))
_OOD_SURFACE = ((0.25, 0.27, 0.3), (0.42, 0.34, 0.28), (0.38, 0.44, 0.38))
_OOD_TABLE = ((0.3, 0.22, 0.18), (0.24, 0.28, 0.34))
_OOD_WALL = ((0.3, 0.34, 0.4), (0.42, 0.36, 0.32))
# Largest change, from that of scene.py: light's direction and brightness, camera position [m] and direction [rad]. In
# ood_appearance every change is between that and twice that.
LIGHT_TURN, LIGHT_CHANGE = 0.3, 0.12
CAMERA_OFFSET, CAMERA_TURN = np.array([[0.018], [0.004]]), 0.018
# Centers of the distractors: between the robot and the workspace.
_BACKGROUND = ((0.2, -0.28), (0.25, 0.28))


@dataclass(frozen=True, kw_only=True)
class Appearance:
    """RGB in 0..1; camera offsets [m] and small rotation vector [rad] of (agent, wrist)."""

    blocks: np.ndarray  # [3, 3]
    pair: np.ndarray  # [2, 3]: mats, drawer fronts or hole rims
    background: np.ndarray  # [3, 3]: the surface under the objects, the table, the wall
    distractors: np.ndarray  # [4, 3] positions [m]
    distractor_rgb: np.ndarray  # [4, 3]
    light_direction: np.ndarray  # [3]
    light: np.ndarray  # [3]
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
    fixtures: np.ndarray  # [len(MOCAP), 4]: position and yaw
    parked: np.ndarray  # [NUM_BLOCKS + 1] bool: blocks, peg
    appearance: Appearance


def sample_layout(task_name: str, seed: int, *, split: Split, appearance: float) -> Layout:
    """The layout of ``(task_name, seed)``.

    ``appearance`` scales the randomization of light, table and cameras; that of ood_appearance is never scaled down.
    """
    ood = split == "ood_appearance"
    amount = max(appearance, 1.0) if ood else appearance
    task = all_tasks()[task_name]
    rng = np.random.default_rng([seed, seed_of(task_name)])
    colors, candidate = _sample_instruction(task, rng, split)
    phrasings = task.ood_phrasings if split == "ood_phrasing" else task.phrasings
    phrase = phrasings[rng.integers(len(phrasings))]
    qpos, fixtures, parked = _sample_poses(task, rng, ood=split == "ood_position")
    return Layout(
        task=task,
        instruction=phrase.format(*(colors[slot] for slot in task.candidates[candidate])),
        colors=colors,
        candidate=candidate,
        qpos=qpos,
        fixtures=fixtures,
        parked=parked,
        appearance=_sample_appearance(task, colors, fixtures, rng, amount=amount, ood=ood),
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


def _sample_poses(task: Task, rng: np.random.Generator, *, ood: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Initial qpos, fixture poses, and which free objects are parked out of sight."""
    qpos = np.zeros(NQ)
    qpos[ARM] = np.array(START_JOINTS) + rng.uniform(-0.03, 0.03, 7)
    qpos[FINGERS] = FINGER_OPEN
    placement = task.place(rng, ood)
    blocks, qpos[PEG_QPOS] = placement.free_poses()
    qpos[BLOCK_QPOS] = blocks.reshape(-1)
    return qpos, placement.fixture_poses(), placement.parked


def _change(rng: np.random.Generator, shape: int | tuple[int, int], *, ood: bool) -> np.ndarray:
    """Uniform in -1..1; if ``ood``, of magnitude 1 to 2."""
    change = rng.uniform(-1, 1, shape)
    return change + np.sign(change) if ood else change


def _sample_appearance(
    task: Task, colors: tuple[str, ...], fixtures: np.ndarray, rng: np.random.Generator, *, amount: float, ood: bool
) -> Appearance:
    rgb = np.array([RGB[color] for color in colors])
    rgb = np.clip(rgb + amount * rng.uniform(-0.04, 0.04, rgb.shape), 0, 1)
    num_blocks = NUM_BLOCKS if "blocks" in task.objects else 0
    direction = np.array([-0.5, 0.3, -0.8]) + amount * LIGHT_TURN * _change(rng, 3, ood=ood)
    tint = rng.uniform(-0.04, 0.04, 3)
    distractors, distractor_rgb = _sample_distractors(rng, fixtures, amount=amount, ood=ood)
    return Appearance(
        blocks=rgb[:num_blocks] if num_blocks else np.ones((NUM_BLOCKS, 3)),
        pair=rgb[num_blocks:] if len(rgb) > num_blocks else np.ones((2, 3)),
        background=_sample_background(rng, amount=amount, ood=ood),
        distractors=distractors,
        distractor_rgb=distractor_rgb,
        light_direction=direction / np.linalg.norm(direction),
        light=0.5 + amount * (LIGHT_CHANGE * _change(rng, 1, ood=ood) + tint),
        camera_offset=amount * CAMERA_OFFSET * _change(rng, (2, 3), ood=ood),
        camera_turn=amount * CAMERA_TURN * _change(rng, (2, 3), ood=ood),
    )


def _sample_background(rng: np.random.Generator, *, amount: float, ood: bool) -> np.ndarray:
    """[3, 3]: tints of surface, table and wall."""
    tints = (_OOD_SURFACE, _OOD_TABLE, _OOD_WALL) if ood else (_SURFACE, _TABLE, _WALL)
    chosen = np.array([tint[rng.integers(len(tint))] for tint in tints])
    plain = np.array([_SURFACE[0], _TABLE[0], _WALL[0]])
    tint = rng.uniform(-0.06, 0.06, (3, 1)) + rng.uniform(-0.015, 0.015, (3, 3))
    return plain + amount * (chosen - plain + tint)


def _sample_distractors(
    rng: np.random.Generator, fixtures: np.ndarray, *, amount: float, ood: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Positions (out of sight where not used) and colors, greyer than those of the objects that are asked for."""
    count = len(DISTRACTORS)
    positions = np.array([[PARKED_X, 0.3 * i, 0.5] for i in range(count)])
    shown = np.array([ood] * count) ^ np.array([True, True, False, False])  # the two shapes of this split
    shown &= rng.uniform(size=count) < 0.7 * min(amount, 1.0)
    places = np.concatenate([rng.uniform(*_BACKGROUND, (count, 2)), np.full((count, 1), 0.03)], axis=1)
    # None inside the cabinet.
    shown &= (np.linalg.norm(places[:, None, :2] - fixtures[None, :, :2], axis=-1) > 0.22).all(1)
    return np.where(shown[:, None], places, positions), 0.45 + rng.uniform(-0.2, 0.2, (count, 3))


def fixture_quaternions(fixtures: np.ndarray) -> np.ndarray:
    """Quaternions [..., 4] of fixture poses (position and yaw) [..., 4]."""
    half = fixtures[..., 3] / 2
    zero = np.zeros_like(half)
    return np.stack([np.cos(half), zero, zero, np.sin(half)], axis=-1)


def scene_state(
    qpos: Float[Tensor, "N nq"],
    fixtures: Float[Tensor, "N 5 4"],
    position: Float[Tensor, "N 3"],
    rotation: Float[Tensor, "N 3 3"],
) -> SceneState:
    """The scene at these joint positions; ``position`` and ``rotation``: of the end effector."""
    qpos = qpos.float()
    return SceneState(
        end_effector=position.float(),
        rotation=rotation.float(),
        fingers=qpos[:, FINGERS],
        blocks=qpos[:, BLOCK_QPOS].view(-1, NUM_BLOCKS, 7),
        peg=qpos[:, PEG_QPOS],
        drawers=qpos[:, DRAWER_QPOS],
        fixtures=fixtures.float(),
    )
