"""A scripted demonstrator for lifting one object: above it, down, close, carry. The scene alone gives its phase."""

from __future__ import annotations

import numpy as np

HOVER_M = 0.08
NEAR_M = 0.012


def grasp_and_carry(*, tool: np.ndarray, thing: np.ndarray, goal: np.ndarray, holding: bool) -> tuple[np.ndarray, bool]:
    """Where the tool should move, meters [3], and whether the gripper should close.

    tool, thing, goal: positions, meters [3], in one frame with z up; ``goal`` is where ``thing`` is to be.
    """
    if holding:
        return goal - thing, True
    offset = thing - tool
    beside = float(np.hypot(*offset[:2]))
    if beside > NEAR_M:
        if -offset[2] < HOVER_M / 2 and beside > 2 * NEAR_M:  # too low to travel
            return np.array([0.0, 0.0, HOVER_M]), False
        return offset + np.array([0.0, 0.0, HOVER_M * min(1.0, beside / (4 * NEAR_M))]), False
    return offset, bool(abs(offset[2]) < NEAR_M)
