"""A scripted expert for robosuite's Door: it grasps the handle, turns it down until the latch is free, and pulls.

It has no memory: the scene alone determines its phase, so it also corrects another's actions. The hand points at the
door, with one finger above the handle's bar and one below it, and rolls with the bar, since the latch springs back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sims.experts.osc_pose import action, turn_to

BEFORE_M = 0.08  # from the bar, where the hand waits until it is aligned
NEAR_M, NEAR_RAD = 0.02, 0.3
HELD_M, HELD_OPENING_M = 0.04, 0.05  # the bar is 0.04 m high and the open gripper 0.08 m wide
FREE_RAD, AJAR_RAD = 1.25, 0.1  # angle of the handle that frees the latch, and of the door that it cannot catch
TURN_RAD, PULL_RAD = 0.5, 0.15  # of the handle and of the door, in one action


def open_door(env: Any) -> np.ndarray:
    """The next action, [7] in -1..1, of a robosuite Door with one Panda and the BASIC controller."""
    data, robot = env.sim.data, env.robots[0]
    site = robot.eef_site_id["right"]
    along, into_door, up = np.array(data.body_xmat[env.object_body_ids["latch"]]).reshape(3, 3).T
    handle = np.array(data.site_xpos[env.door_handle_site_id])
    offset = handle - data.site_xpos[site]
    align = turn_to(np.stack([-up, -along, into_door], -1), np.array(data.site_xmat[site]).reshape(3, 3))
    opening = float(np.ptp([data.get_joint_qpos(joint) for joint in robot.gripper["right"].joints]))
    if np.linalg.norm(offset) < HELD_M and opening < HELD_OPENING_M:
        turn, pivot = _next_turn(env, into_door)
        return action(offset + np.cross(turn, handle - pivot), align + turn, close=True)
    ahead = float(offset @ into_door)
    sideways = float(np.linalg.norm(offset - ahead * into_door))
    if sideways < NEAR_M and np.linalg.norm(align) < NEAR_RAD:
        return action(offset, align, close=abs(ahead) < NEAR_M)
    return action(offset - BEFORE_M * into_door, align, close=False)


def _next_turn(env: Any, into_door: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rotation vector, radians [3], of the held handle, and a point on its axis, meters [3].

    into_door: axis of the handle, a unit vector [3].
    """
    data = env.sim.data
    if data.qpos[env.handle_qpos_addr] < FREE_RAD and data.qpos[env.hinge_qpos_addr] < AJAR_RAD:
        return TURN_RAD * into_door, np.array(data.body_xpos[env.object_body_ids["latch"]])
    hinge = env.sim.model.joint_name2id(env.door.hinge_joint)
    return PULL_RAD * np.array(data.xaxis[hinge]), np.array(data.xanchor[hinge])
