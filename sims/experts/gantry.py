"""A scripted expert of the gantry: every block that a task names, one after the other, over the wall to its pad."""

from typing import Any

import numpy as np

OPEN, CLOSED = 1.0, -1.0
ABOVE = 0.13  # [m] height at which the hand crosses the wall
STEP = 0.02  # [m] of a full action


def act(scene: Any) -> np.ndarray:
    """The next action of a running MujocoScene: x, y, z, gripper. No memory: the scene alone determines it."""
    hand = scene.position("hand")
    pairs = [condition.names for condition in scene.goal if condition.kind == "near" and not scene.holds(condition)]
    if not pairs:
        return motion(np.array([0.0, 0.0, ABOVE - hand[2]]), OPEN)
    block, pad = map(scene.position, pairs[0])
    if np.linalg.norm(block - hand) < 0.015 and scene.joint("finger") < 0.022:
        return carry(pad - hand)
    return fetch(block - hand, hand[2])


def fetch(offset: np.ndarray, height: float) -> np.ndarray:
    """Above the block first, then down; grasp where it is between the fingers."""
    sideways = np.linalg.norm(offset[:2])
    if sideways > 0.01:
        low = height < ABOVE - 0.02 and sideways > 0.03
        return motion(np.array([0.0, 0.0, STEP]) if low else np.append(offset[:2], ABOVE - height), OPEN)
    return motion(offset, CLOSED if abs(offset[2]) < 0.006 else OPEN)


def carry(offset: np.ndarray) -> np.ndarray:
    """Up, over the pad, down; let go at the bottom. ``offset``: from the hand to the pad."""
    if np.linalg.norm(offset[:2]) < 0.01:
        return motion(offset + np.array([0.0, 0.0, 0.021]), OPEN if offset[2] > -0.026 else CLOSED)
    if -offset[2] < ABOVE - 0.02:
        return motion(np.array([0.0, 0.0, STEP]), CLOSED)
    return motion(np.append(offset[:2], ABOVE + offset[2]), CLOSED)


def motion(offset: np.ndarray, gripper: float) -> np.ndarray:
    return np.append(np.clip(0.6 * offset / STEP, -1, 1), gripper)
