"""A scripted expert for LIBERO's goals "put this on that" and "put this in that", one after another.

It has no memory: the scene alone determines its phase, so it also corrects another's actions. It grasps from above,
where the object is narrowest, and a bowl at its rim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sims.experts.osc_pose import action, turn_to

OPENING_M = 0.072  # between the fingers, with some clearance
ABOVE_M, NEAR_M, LEVEL_M = 0.10, 0.012, 0.015
FINGER_M, RIM_M = 0.03, 0.012  # how deep an object and a bowl's rim reach between the fingers
TIP_M = 0.011  # from the middle of the finger pads to their ends
CLEARANCE_M = 0.05  # under what is carried
CLOSED = ("wooden_cabinet", "white_cabinet", "microwave", "main_table", "desk_caddy")  # or reached by pushing


def has_expert(goal: Sequence[Sequence[str]]) -> bool:
    """Whether every predicate of the goal is one that ``pick_and_place`` brings about: nothing in drawers or ovens."""
    return all(
        len(predicate) == 3
        and predicate[0] in ("on", "in")
        and not (predicate[2].endswith("_region") and predicate[2].startswith(CLOSED))
        for predicate in goal
    )


def pick_and_place(env: Any) -> np.ndarray:
    """The next action, [7] in -1..1, of a LIBERO environment (a BDDLBaseDomain) whose goal ``has_expert``."""
    goal = env.parsed_problem["goal_state"]
    unmet = [predicate for predicate in goal if not env._eval_predicate(predicate)]
    _, name, place = (unmet or goal)[0]
    points = _points(env, name)
    hand, rotation = _hand(env)
    if env._check_grasp(env.robots[0].gripper, env.objects_dict[name].contact_geoms):
        motion, close = _carry(points, _place(env, place))
        return action(motion, _turn(rotation, rotation[:, 0]), close=close)
    grasp, fingers = _grasp(points, hand, rotation[:, 0])
    offset = grasp - hand
    sideways = float(np.hypot(*offset[:2]))
    if sideways > NEAR_M:  # above it first, and not through what stands around it
        height = ABOVE_M * min(1.0, sideways / (3 * NEAR_M))
        lift = hand[2] < points[:, 2].max() + 0.02 and sideways > 3 * NEAR_M
        motion = np.array([0.0, 0.0, ABOVE_M]) if lift else offset + np.array([0.0, 0.0, height])
        return action(motion, _turn(rotation, fingers), close=False)
    return action(2.0 * offset, _turn(rotation, fingers), close=bool(abs(offset[2]) < NEAR_M / 2))


def _carry(points: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, bool]:
    """The motion of a grasped object, meters [3], and whether the gripper stays closed. ``place``: see ``_place``."""
    center = (points.min(0) + points.max(0)) / 2
    sideways = np.append(place[:2] - center[:2], 0.0)
    bottom = float(points[:, 2].min())
    above = place[2] + CLEARANCE_M - bottom
    if np.hypot(*sideways[:2]) < LEVEL_M:
        down = place[2] - bottom
        return sideways + np.array([0.0, 0.0, down]), bool(-down > NEAR_M)
    if above > LEVEL_M:  # up first
        return np.array([0.0, 0.0, above + 0.02]), True
    return sideways + np.array([0.0, 0.0, above + 0.01]), True


def _grasp(points: np.ndarray, hand: np.ndarray, fingers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the hand grasps, [3], and the unit vector between the fingers, [3] horizontal."""
    low, high = points.min(0), points.max(0)
    angles = np.linspace(0.0, np.pi, 24, endpoint=False)
    axes = np.stack([np.cos(angles), np.sin(angles), np.zeros_like(angles)], -1)
    widths = np.ptp(points @ axes.T, axis=0)
    depth = max(high[2] - FINGER_M, low[2] + TIP_M)
    center = np.array([*(low + high)[:2] / 2, depth])
    if widths.min() <= OPENING_M:
        fits = widths <= widths.min() + 0.004
        turned = np.where(fits, np.abs(axes @ fingers), -1.0)  # the least turn of the hand
        return center, axes[int(turned.argmax())]
    rim = points[points[:, 2] > high[2] - 0.012]
    around = rim - center
    around[:, 2] = 0.0
    radius = float(np.median(np.linalg.norm(around, axis=1)))
    directions = np.concatenate([axes, -axes])
    best = directions[int((directions @ _unit(hand - center) + 2.0 * np.abs(directions @ fingers)).argmax())]
    return np.array([*(center + radius * best)[:2], high[2] - RIM_M]), best


def _turn(rotation: np.ndarray, fingers: np.ndarray) -> np.ndarray:
    """Rotation vector, radians [3], to a hand that points down with ``fingers`` between its fingers."""
    across = _unit(fingers * [1.0, 1.0, 0.0])
    across = across if across @ rotation[:, 0] >= 0 else -across
    down = np.array([0.0, 0.0, -1.0])
    wanted = np.stack([across, np.cross(down, across), down], -1)
    return turn_to(wanted, rotation)


def _place(env: Any, name: str) -> np.ndarray:
    """Where the bottom of an object goes, [3]: the middle of a region, or the top of another object."""
    if name in env.object_sites_dict:
        position = np.array(env.sim.data.get_site_xpos(name))
        parent = env.object_sites_dict[name].parent_name
        if parent in env.objects_dict:  # into a basket or a tray, from above its edge
            position[2] = _points(env, parent)[:, 2].max()
        return position
    points = _points(env, name)
    return np.array([*(points.min(0) + points.max(0))[:2] / 2, points[:, 2].max()])


def _hand(env: Any) -> tuple[np.ndarray, np.ndarray]:
    """Position, [3], and rotation matrix, [3, 3], whose columns are the hand's axes; fingers move along the first."""
    site = env.robots[0].eef_site_id
    return np.array(env.sim.data.site_xpos[site]), np.array(env.sim.data.site_xmat[site]).reshape(3, 3)


def _points(env: Any, name: str) -> np.ndarray:
    """Corners of the collision geometry of an object or a fixture, in the frame of the base, [n, 3]."""
    model, data = env.sim.model._model, env.sim.data._data
    thing = env.objects_dict[name] if name in env.objects_dict else env.fixtures_dict[name]
    found = []
    for geom_name in thing.contact_geoms:
        geom = model.geom(geom_name).id
        found.append(_corners(model, geom) @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom])
    return np.concatenate(found)


def _corners(model: Any, geom: int) -> np.ndarray:
    mesh = int(model.geom_dataid[geom])
    if mesh >= 0:
        first = model.mesh_vertadr[mesh]
        return np.asarray(model.mesh_vert[first : first + model.mesh_vertnum[mesh]])
    center, half = model.geom_aabb[geom][:3], model.geom_aabb[geom][3:]
    signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1).T
    return np.asarray(center + signs * half)


def _unit(vector: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(vector))
    return vector / length if length > 1e-9 else np.zeros_like(vector)
