"""Where objects are put at the start of an episode: the training area, and the band around it for ood_position.

In every split but ood_position all objects that a task uses lie in AREA (a cabinet in CABINET_AREA); in ood_position
all of them lie outside it. The scenes for pretraining keep to the training areas too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sims.tabletop.scene import BLOCK_HALF, MOCAP, NUM_BLOCKS, PARKED_X, PEG_HALF

Region = tuple[tuple[float, float], tuple[float, float]]  # lower and upper corner (x, y) [m]

AREA: Region = ((0.39, -0.18), (0.63, 0.18))  # of the centers of blocks, mats, holes and peg
BAND = 0.04  # [m] width of the band around AREA for ood_position
# A front part of AREA and a back part, for what is moved and where to; beyond x of AREA for ood_position.
FRONT: Region = ((0.39, -0.18), (0.48, 0.18))
BACK: Region = ((0.54, -0.18), (0.63, 0.18))
OOD_FRONT: Region = ((0.36, -0.18), (0.385, 0.18))
OOD_BACK: Region = ((0.635, -0.18), (0.66, 0.18))
CABINET_AREA: Region = ((0.27, -0.14), (0.41, 0.14))
CABINET_BAND = 0.025  # [m] width of the band around CABINET_AREA for ood_position
CABINET_YAW = 0.3  # [rad] largest turn of the cabinet
MAX_TRIES, DRAWS = 1000, 32


@dataclass
class Placement:
    """Places of the objects on this table, as far as they are used; None: not there.

    blocks: [3, 3], peg: [3], each x, y [m] and yaw [rad]. fixtures: the same by name in scene.MOCAP.
    """

    blocks: np.ndarray | None = None
    peg: np.ndarray | None = None
    fixtures: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def parked(self) -> np.ndarray:
        """[NUM_BLOCKS + 1] bool: blocks, peg."""
        return np.array([self.blocks is None] * NUM_BLOCKS + [self.peg is None])

    def free_poses(self) -> tuple[np.ndarray, np.ndarray]:
        """Poses of blocks [3, 7] and peg [7]: position, quaternion; parked out of sight where they are not used."""
        blocks = np.array([[PARKED_X, 1.0 + 0.3 * i, 0.5, 1, 0, 0, 0] for i in range(NUM_BLOCKS)])
        peg = np.array([PARKED_X, -1.0, 0.5, 1, 0, 0, 0])
        if self.blocks is not None:
            blocks = np.stack([_pose(place, BLOCK_HALF) for place in self.blocks])
        return blocks, peg if self.peg is None else _pose(self.peg, PEG_HALF[2])

    def fixture_poses(self) -> np.ndarray:
        """[len(MOCAP), 4]: position and yaw; parked out of sight where they are not used."""
        poses = np.array([[PARKED_X + 0.5 * i, 0.0, 0.5, 0.0] for i in range(len(MOCAP))])
        for name, (x, y, yaw) in self.fixtures.items():
            poses[MOCAP.index(name)] = [x, y, 0.0, yaw]
        return poses


def _pose(place: np.ndarray, height: float) -> np.ndarray:
    x, y, yaw = place
    return np.array([x, y, height, math.cos(yaw / 2), 0, 0, math.sin(yaw / 2)])


def inside(points: np.ndarray, region: Region) -> np.ndarray:
    """Whether each point [..., 2] lies in the region, [...]."""
    low, high = np.array(region)
    return np.asarray(((points >= low) & (points <= high)).all(-1))


def apart(points: np.ndarray, distance: float) -> np.ndarray:
    """Whether all points of a draw [draws, n, 2] are at least ``distance`` [m] from each other, [draws]."""
    gaps = np.linalg.norm(points[:, :, None] - points[:, None], axis=-1) + np.eye(points.shape[1])
    return np.asarray(gaps.min(axis=(1, 2)) >= distance)


def first_accepted(sample: Callable[[], np.ndarray], accept: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The first accepted of many draws; ``sample`` gives [draws, ...], ``accept`` says which of them will do."""
    for _ in range(MAX_TRIES):
        draws = sample()
        accepted = np.flatnonzero(accept(draws))
        if len(accepted):
            return np.asarray(draws[accepted[0]])
    raise AssertionError(f"no accepted placement in {MAX_TRIES * DRAWS} draws")


def scatter(rng: np.random.Generator, count: int, *, distance: float, ood: bool = False) -> np.ndarray:
    """``count`` places (x, y), ``distance`` [m] apart, in AREA; if ``ood``, in the band around it."""
    margin = BAND if ood else 0.0
    low, high = np.array(AREA[0]) - margin, np.array(AREA[1]) + margin
    return first_accepted(
        lambda: rng.uniform(low, high, (DRAWS, count, 2)),
        lambda points: apart(points, distance) & ~(ood & inside(points, AREA).any(1)),
    )


def with_yaw(rng: np.random.Generator, points: np.ndarray, limit: float) -> np.ndarray:
    """Points [n, 2] with a random yaw within ``limit`` [rad], [n, 3]."""
    return np.concatenate([points, rng.uniform(-limit, limit, (len(points), 1))], axis=1)


def scattered_blocks(rng: np.random.Generator, *, ood: bool) -> Placement:
    """Three blocks anywhere in the area, with room for fingers between them."""
    return Placement(blocks=with_yaw(rng, scatter(rng, NUM_BLOCKS, distance=0.12, ood=ood), math.pi / 4))
