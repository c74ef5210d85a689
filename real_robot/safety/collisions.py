"""Distances of the links of one or several arms to each other and to declared obstacles.

Every link is covered by capsules, which a robot file names; MuJoCo computes their poses and distances. Checked are
capsules whose joints are at least ``MIN_JOINTS_APART`` apart, as nearer ones touch by construction, the pairs of joints
named in ``also``, capsules of different arms, and every capsule with every obstacle, except what stays in place: bases
and first links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import dist, hypot, inf
from typing import Literal, NamedTuple

import mujoco
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from real_robot.safety.commands import Rejection
from real_robot.safety.kinematics import JointFrame, Vector, rotation
from real_robot.safety.stopping import AxisLimits
from real_robot.safety.swept import POINT_CLEARANCE

BASE = "base"
MIN_JOINTS_APART = 3
# Larger distances are not told apart: they are never too small.
_FAR_M = 1.0
_GEOMS: Mapping[str, mujoco.mjtGeom] = {
    "plane": mujoco.mjtGeom.mjGEOM_PLANE,
    "box": mujoco.mjtGeom.mjGEOM_BOX,
    "sphere": mujoco.mjtGeom.mjGEOM_SPHERE,
}
ObstacleKind = Literal["plane", "box", "sphere"]
Distances = Float[np.ndarray, "pairs"]
Pairs = Int[np.ndarray, "pairs"]  # indices


@dataclass(frozen=True, kw_only=True)
class Capsule:
    """Everything within ``radius`` of the line from ``start`` to ``end`` [m], in the frame of ``joint``, behind it.

    ``joint``: as in the kinematic chain, or ``BASE``.
    """

    joint: str
    start: Vector
    end: Vector
    radius: float


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """In the base frame [m]. ``size``: a box's edges, or a sphere's radius three times.

    Below a plane, against the direction of its z axis, everything is solid.
    """

    kind: ObstacleKind
    position: Vector
    rpy: Vector = (0.0, 0.0, 0.0)
    size: Vector = (0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Collisions:
    """What the arms must keep a distance of ``margin`` [m] from: themselves, each other and the obstacles.

    ``chains``: every arm's joints from the common base on. ``also``: pairs of joints whose capsules are checked too.
    """

    margin: float
    chains: tuple[tuple[JointFrame, ...], ...]
    capsules: tuple[Capsule, ...]
    obstacles: tuple[Obstacle, ...] = ()
    also: tuple[tuple[str, str], ...] = ()


class CollisionClearance:
    """Distance less margin of every pair of shapes that is checked, for a robot whose joints are ``axes``."""

    reason: Rejection = "collision"

    def __init__(self, collisions: Collisions, axes: Sequence[AxisLimits]) -> None:
        names = [axis.name for axis in axes]
        self._margin = collisions.margin
        self._order = [names.index(frame.joint) for chain in collisions.chains for frame in chain]
        self._model = kinematic_model(collisions, axes)
        self._data = mujoco.MjData(self._model)
        self._qpos = self._data.qpos
        pairs = checked_pairs(collisions)
        self._travel = np.stack([_travel_per_joint(collisions, axes, a, b) for a, b in pairs])
        geoms = [self._model.geom(str(i)).id for i in range(self._model.ngeom)]
        self._pairs = [(geoms[a], geoms[b]) for a, b in pairs]
        shapes = [f"{c.joint} (links[{i}])" for i, c in enumerate(collisions.capsules)]
        shapes += [f"{o.kind} (obstacles[{i}])" for i, o in enumerate(collisions.obstacles)]
        self._names = [(shapes[a], shapes[b]) for a, b in pairs]
        # of every pair: where it was last looked at, and its clearance there
        self._seen_at = np.zeros((len(pairs), len(axes)))
        self._seen = np.full(len(pairs), -inf)

    def near(self, positions: Sequence[float], sweeps: Sequence[float]) -> tuple[Pairs, Distances] | None:
        """Only pairs that may have come close since they were last looked at are looked at again."""
        joints, paths = np.array(positions), np.array(sweeps)
        way = np.abs(joints - self._seen_at)
        way += paths
        way *= self._travel
        pairs = (self._seen < way.sum(1) + POINT_CLEARANCE).nonzero()[0]
        if not len(pairs):
            return None
        state = self.at(positions, pairs)
        self._seen[pairs], self._seen_at[pairs] = state, joints
        close = (state < self._travel[pairs] @ paths + POINT_CLEARANCE).nonzero()[0]
        return (pairs[close], state[close]) if len(close) else None

    def at(self, positions: Sequence[float], among: Pairs | None = None) -> Distances:
        model, data = self._model, self._data
        self._qpos[:] = [positions[i] for i in self._order]
        mujoco.mj_kinematics(model, data)
        pairs = self._pairs if among is None else [self._pairs[i] for i in among.tolist()]
        return np.array([mujoco.mj_geomDistance(model, data, a, b, _FAR_M, None) for a, b in pairs]) - self._margin

    def least(self, state: Distances) -> float:
        return float(state.min())

    def left(
        self,
        state: Distances,
        sweeps: Sequence[float],
        other: Distances | None = None,
        among: Pairs | None = None,
    ) -> float:
        clear = state if other is None else state + other
        travel = self._travel if among is None else self._travel[among]
        return float((clear - travel @ np.array(sweeps)).min())

    def between(
        self, first: Distances, last: Distances, sweeps: Sequence[float], among: Pairs
    ) -> tuple[Int[np.ndarray, " close"], Float[np.ndarray, " close"], Float[np.ndarray, " close"]] | None:
        close = (first + last < self._travel[among] @ np.array(sweeps)).nonzero()[0]
        return (among[close], first[close], last[close]) if len(close) else None

    def start_problem(self, positions: Sequence[float]) -> str:
        state = self.at(positions)
        for pair in range(len(state)):
            if self._runs_through(pair):
                state[pair] = min(state[pair], -self._margin)
        nearest = int(state.argmin())
        if state[nearest] >= POINT_CLEARANCE:
            return ""
        first, second = self._names[nearest]
        return (
            f"{first} and {second} are {1e3 * (state[nearest] + self._margin):.0f} mm apart, must be "
            f"{1e3 * (self._margin + POINT_CLEARANCE):.0f} mm (margin of collisions); move the arm away by hand"
        )

    def _runs_through(self, pair: int) -> bool:
        """Whether a capsule's axis enters a box, where the arm was looked at last.

        MuJoCo then gives a positive distance of about one such pair in a hundred.
        """
        capsule, box = self._pairs[pair]
        model, data = self._model, self._data
        if model.geom_type[box] != mujoco.mjtGeom.mjGEOM_BOX:
            return False
        to_box = data.geom_xmat[box].reshape(3, 3).T
        middle = to_box @ (data.geom_xpos[capsule] - data.geom_xpos[box])
        half = to_box @ data.geom_xmat[capsule].reshape(3, 3)[:, 2] * model.geom_size[capsule, 1]
        half[np.abs(half) < 1e-12] = 1e-12
        faces = np.stack([-model.geom_size[box] - middle, model.geom_size[box] - middle]) / half
        enters, leaves = faces.min(0).max(), faces.max(0).min()  # from -1 to 1 along the axis
        return bool(max(enters, -1.0) <= min(leaves, 1.0))


def kinematic_model(collisions: Collisions, axes: Sequence[AxisLimits]) -> mujoco.MjModel:
    """Bodies of the chains; geometries named by their number, capsules before obstacles."""
    units = {axis.name: axis.unit for axis in axes}
    spec = mujoco.MjSpec()
    bodies = {BASE: spec.worldbody}
    for chain in collisions.chains:
        body = spec.worldbody
        for frame in chain:
            body = body.add_body(pos=frame.xyz, quat=_quaternion(frame.rpy))
            slides = units[frame.joint] == "m"
            kind = mujoco.mjtJoint.mjJNT_SLIDE if slides else mujoco.mjtJoint.mjJNT_HINGE
            body.add_joint(type=kind, axis=[0.0, 0.0, 1.0])
            body.mass, body.inertia = 1.0, [1.0, 1.0, 1.0]  # MuJoCo wants them; nothing here depends on them
            body.explicitinertial = True
            bodies[frame.joint] = body
    for i, capsule in enumerate(collisions.capsules):
        length = dist(capsule.start, capsule.end)
        shape = (
            {"type": mujoco.mjtGeom.mjGEOM_CAPSULE, "fromto": [*capsule.start, *capsule.end]}
            if length > 1e-6
            else {"type": mujoco.mjtGeom.mjGEOM_SPHERE, "pos": capsule.start}
        )
        bodies[capsule.joint].add_geom(name=str(i), size=[capsule.radius, 0.0, 0.0], **shape)
    for i, obstacle in enumerate(collisions.obstacles, len(collisions.capsules)):
        size = [0.5 * edge for edge in obstacle.size] if obstacle.kind == "box" else list(obstacle.size)
        spec.worldbody.add_geom(
            name=str(i),
            type=_GEOMS[obstacle.kind],
            pos=obstacle.position,
            quat=_quaternion(obstacle.rpy),
            size=[1.0, 1.0, 1.0] if obstacle.kind == "plane" else size,
        )
    return spec.compile()


def _quaternion(rpy: Vector) -> list[float]:
    quaternion = np.zeros(4)
    mujoco.mju_mat2Quat(quaternion, np.array(rotation(rpy)))
    return quaternion.tolist()


class _Link(NamedTuple):
    """The arm and the place in its chain of a capsule's joint; (-1, -1) for the base of all."""

    arm: int
    place: int


def _links(collisions: Collisions) -> list[_Link]:
    """Of every capsule."""
    known = {BASE: _Link(-1, -1)}
    for arm, chain in enumerate(collisions.chains):
        known |= {frame.joint: _Link(arm, place) for place, frame in enumerate(chain)}
    return [known[capsule.joint] for capsule in collisions.capsules]


def checked_pairs(collisions: Collisions) -> list[tuple[int, int]]:
    """Numbers of the geometries whose distance counts: capsules, then obstacles."""
    links = _links(collisions)
    also = {frozenset(pair) for pair in collisions.also}
    joints = [capsule.joint for capsule in collisions.capsules]

    def counts(a: int, b: int) -> bool:
        (arm, place), (other_arm, other_place) = links[a], links[b]
        if frozenset((joints[a], joints[b])) in also:
            return True
        if arm == other_arm or BASE in (joints[a], joints[b]):
            return abs(place - other_place) >= MIN_JOINTS_APART
        return place > 0 or other_place > 0

    obstacles = range(len(links), len(links) + len(collisions.obstacles))
    pairs = [(a, b) for a, b in combinations(range(len(links)), 2) if counts(a, b)]
    return pairs + [(a, b) for b in obstacles for a in range(len(links)) if links[a].place > 0]


def _travel_per_joint(collisions: Collisions, axes: Sequence[AxisLimits], a: int, b: int) -> NDArray[np.float64]:
    """Upper bound of how far the shapes move against each other [m] per rad or m of each joint's own path."""
    links = _links(collisions)
    if b >= len(links):
        return reach(collisions, axes, a, -1)
    if links[a].arm == links[b].arm:
        far = a if links[a].place > links[b].place else b
        return reach(collisions, axes, far, min(links[a].place, links[b].place))
    return reach(collisions, axes, a, -1) + reach(collisions, axes, b, -1)


def reach(collisions: Collisions, axes: Sequence[AxisLimits], capsule: int, first: int) -> NDArray[np.float64]:
    """The same of one capsule against the link at the place ``first`` of its chain.

    A point that a joint turns moves by at most its distance from the joint's axis, which is at most the length of the
    chain from there to the capsule's farthest point, however the joints between them stand.
    """
    names = [axis.name for axis in axes]
    shape, (arm, place) = collisions.capsules[capsule], _links(collisions)[capsule]
    result = np.zeros(len(axes))
    from_axis = max(hypot(*end[:2]) for end in (shape.start, shape.end)) + shape.radius
    beyond = max(hypot(*end) for end in (shape.start, shape.end)) + shape.radius  # from the origin of the frame
    for at in range(place, first, -1):
        frame = collisions.chains[arm][at]
        axis = axes[names.index(frame.joint)]
        result[names.index(frame.joint)] = from_axis if axis.unit == "rad" else 1.0
        if axis.unit == "m":
            beyond += max(map(abs, axis.position))
        from_axis = hypot(*frame.xyz[:2]) + beyond
        beyond += hypot(*frame.xyz)
    return result
