"""Speed limit of the arm's points for contact with a person: power and force limiting after ISO/TS 15066:2016.

Person and arm are two masses with a spring between them. The energy that a contact transfers is
E = F^2 / (2 k) = mu v^2 / 2, with the permissible force F of the body region, its spring constant k and the reduced
mass mu = 1 / (1 / m_H + 1 / m_R) of the region's effective mass m_H and the arm's m_R = M / 2 + m_L (M: its moving
parts, m_L: gripper and load). So no point of the arm may be faster than v = F / sqrt(mu k).

F, k and m_H depend on the body region and are the user's, from his risk assessment, which this limit does not replace.
Clamping, pressure on small areas and the driver's reaction are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import mujoco
import numpy as np
from numpy.typing import NDArray

from real_robot.safety.collisions import Capsule, Collisions, kinematic_model, reach
from real_robot.safety.stopping import AxisLimits
from real_robot.safety.swept import Motions
from real_robot.safety.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class ContactLimit:
    """``force`` [N] and ``stiffness`` [N/m] of the body region, masses [kg]: of the region, of the arm's moving parts,
    and of gripper and load."""

    force: float
    stiffness: float
    body_mass: float
    moving_mass: float
    payload: float

    @property
    def max_energy_j(self) -> float:
        """Energy that a contact may transfer."""
        return self.force**2 / (2.0 * self.stiffness)

    @property
    def max_speed_m_s(self) -> float:
        reduced_mass = 1.0 / (1.0 / self.body_mass + 1.0 / (0.5 * self.moving_mass + self.payload))
        return self.force / sqrt(reduced_mass * self.stiffness)


class PointSpeeds:
    """An upper bound of the speed of every point of the capsules, from each joint's lever arm.

    A joint that turns at u moves a point by at most its distance from the axis times u, and the joints add up. While
    every joint moves by its path s, a point's distance from any axis changes by at most the travel G = sum of reach
    times s; the reach, the length of the chain from the axis to the point, is never exceeded.
    """

    def __init__(self, collisions: Collisions | None, arms: Sequence[Workspace], axes: Sequence[AxisLimits]) -> None:
        """Points: those of the capsules of ``collisions``, and every arm's end effector."""
        effectors = [Capsule(joint=arm.frames[-1].joint, start=arm.end_effector, end=arm.end_effector, radius=0.0)
                     for arm in arms]  # fmt: skip
        names, joints = [axis.name for axis in axes], [frame.joint for arm in arms for frame in arm.frames]
        capsules = [capsule for capsule in collisions.capsules if capsule.joint in joints] if collisions else []
        links = Collisions(
            margin=0.0, chains=tuple(arm.frames for arm in arms), capsules=(*capsules, *effectors), obstacles=()
        )
        self._order = [names.index(joint) for joint in joints]
        self._model = kinematic_model(replace(links, capsules=()), axes)
        self._data = mujoco.MjData(self._model)
        ends = [(i, end) for i, capsule in enumerate(links.capsules) for end in {capsule.start, capsule.end}]
        self._bodies = np.array([1 + joints.index(links.capsules[i].joint) for i, _ in ends])
        self._local = np.array([end for _, end in ends])[:, :, None]
        self._radius = np.array([links.capsules[i].radius for i, _ in ends])[:, None]
        # [points, joints], as in the model
        self._reach: NDArray[np.float64] = np.stack([reach(links, axes, i, -1) for i, _ in ends])[:, self._order]
        self._slides = np.array([axes[i].unit == "m" for i in self._order])

    def fastest(self, before: Motions, after: Motions) -> float:
        """Bound of the speed [m/tick] from one tick to the next and in the stop from there."""
        speeds, paths = [], []
        joints = zip(before.speeds, before.accels, after.speeds, after.accels, after.stops, strict=True)
        for u, w, v, accel, stop in joints:
            speed = max(abs(u), abs(v), stop[5])
            if w * accel < 0.0:  # fastest within the tick, where the acceleration is zero
                speed = max(speed, abs(u - 0.5 * w * w / (accel - w)))
            speeds.append(speed)
            paths.append(max(speed, stop[4]))
        return self.bound(after.positions, speeds, paths)

    def bound(self, positions: Sequence[float], speeds: Sequence[float], paths: Sequence[float]) -> float:
        """Highest speed [m per unit of time of ``speeds``] of a point while each joint, within ``paths`` [path length]
        of ``positions``, is at most as fast as ``speeds`` (not negative)."""
        data, order = self._data, self._order
        data.qpos[:] = [positions[i] for i in order]
        mujoco.mj_kinematics(self._model, data)
        turn = data.xmat[self._bodies].reshape(-1, 3, 3)
        points = data.xpos[self._bodies] + (turn @ self._local)[:, :, 0]
        from_anchor = points[:, None] - data.xanchor
        along_axis = np.einsum("pjk,jk->pj", from_anchor, data.xaxis)
        square = np.einsum("pjk,pjk->pj", from_anchor, from_anchor) - along_axis**2
        levers = np.where(self._slides, 1.0, np.sqrt(np.maximum(square, 0.0)) + self._radius)
        travel = self._reach @ [paths[i] for i in order]
        nearest = np.minimum(levers + travel[:, None], self._reach)
        return float((nearest @ [speeds[i] for i in order]).max())
