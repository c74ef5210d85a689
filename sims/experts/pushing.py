"""A scripted expert that pushes one object along the table. It has no memory: the scene alone determines its phase."""

from __future__ import annotations

import numpy as np

HOVER_M = 0.08
BEHIND_M = 0.07
NEAR_M = 0.012
PUSH_M = 0.04  # motion of one push


def push_to(*, end_effector: np.ndarray, target: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """The end effector's next motion, meters [3], with a closed gripper: over the object, down behind it, forward.

    end_effector, target, goal: positions, meters [3], in one frame with z up; ``target`` is the object, which has to
    reach ``goal`` on the table.
    """
    forward = np.append((goal - target)[:2], 0.0)
    forward /= np.linalg.norm(forward)
    offset = target - end_effector
    ahead = float(offset @ forward)
    sideways = np.append(offset[:2], 0.0) - ahead * forward
    if ahead > NEAR_M and np.linalg.norm(sideways) < NEAR_M and abs(offset[2]) < NEAR_M:
        return PUSH_M * forward + sideways
    down = offset - BEHIND_M * forward
    horizontal = float(np.hypot(*down[:2]))
    if horizontal < NEAR_M:
        return down
    if -offset[2] < HOVER_M / 2:  # too low to move over the object
        return np.array([0.0, 0.0, HOVER_M])
    return down + np.array([0.0, 0.0, HOVER_M])
