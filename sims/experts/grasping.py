"""A scripted expert that grasps one object and carries it. It has no memory: the scene alone determines its phase."""

from __future__ import annotations

import numpy as np

HOVER_M = 0.08
NEAR_M = 0.012


def grasp_and_carry(
    *, end_effector: np.ndarray, target: np.ndarray, goal: np.ndarray, holding: bool
) -> tuple[np.ndarray, bool]:
    """The end effector's next motion, meters [3], and whether the gripper should close.

    end_effector, target, goal: positions, meters [3], in one frame with z up; ``target`` is the object, which has to be
    brought to ``goal``. holding: whether the gripper has grasped it.
    """
    if holding:
        return goal - target, True
    offset = target - end_effector
    horizontal = float(np.hypot(*offset[:2]))
    if horizontal > NEAR_M:
        if -offset[2] < HOVER_M / 2 and horizontal > 2 * NEAR_M:  # too low to move sideways
            return np.array([0.0, 0.0, HOVER_M]), False
        return offset + np.array([0.0, 0.0, HOVER_M * min(1.0, horizontal / (4 * NEAR_M))]), False
    return offset, bool(abs(offset[2]) < NEAR_M)
