"""Actions of robosuite's OSC_POSE controller with its default limits, of one arm with a gripper."""

from __future__ import annotations

import numpy as np

ACTION_M, ACTION_RAD = 0.05, 0.5  # end-effector motion of a full action


def action(motion: np.ndarray, turn: np.ndarray, *, close: bool) -> np.ndarray:
    """An action, [7] in -1..1, in the frame of the base. motion: meters [3]. turn: rotation vector, radians [3]."""
    pose = np.concatenate([motion / ACTION_M, turn / ACTION_RAD])
    return np.append(np.clip(pose, -1.0, 1.0), 1.0 if close else -1.0)


def turn_to(wanted: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Rotation vector, radians [3], from the hand's rotation matrix, [3, 3], to the wanted one, [3, 3]."""
    error = wanted @ rotation.T
    axis = np.array([error[2, 1] - error[1, 2], error[0, 2] - error[2, 0], error[1, 0] - error[0, 1]]) / 2
    sine = float(np.linalg.norm(axis))
    return axis / max(sine, 1e-9) * float(np.arctan2(sine, (np.trace(error) - 1) / 2))
