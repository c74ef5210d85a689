"""The scales of actions and states in a robot file's section ``control``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from real_robot.control.embodiment import ActionScales
from real_robot.control.registry import NEEDED_SCALES
from real_robot.safety.limits import check_table, quantity
from real_robot.safety.stopping import AxisLimits

SCALE_KEYS = ("joint_range", "joint_step")


def read_scales(tables: Mapping[str, Any], embodiment: str, axes: Sequence[AxisLimits]) -> ActionScales:
    """From ``joint_range`` (joint -> [low, high]) and ``joint_step`` (joint -> distance)."""
    for key in NEEDED_SCALES.get(embodiment, ()):
        if tables[key] is None:
            raise ValueError(
                f".control.{key}: missing; {embodiment} needs it for every joint, as in the policy's training"
            )
    names = {axis.name for axis in axes}
    given = {
        key: {} if table is None else check_table(table, f".control.{key}", required=names, optional=set())
        for key, table in tables.items()
    }
    ranges, steps = [], []
    for axis in axes:
        kind = {"rad": "angle", "m": "length"}[axis.unit]
        if given["joint_range"]:
            where, pair = f".control.joint_range.{axis.name}", given["joint_range"][axis.name]
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"{where}: got {pair!r}; expected a list of 2")
            low, high = (quantity(value, where, kind) for value in pair)
            if not low < high:
                raise ValueError(f"{where}: {pair[0]!r} is not below {pair[1]!r}")
            ranges.append((low, high))
        if given["joint_step"]:
            where = f".control.joint_step.{axis.name}"
            steps.append(quantity(given["joint_step"][axis.name], where, kind))
            if steps[-1] <= 0.0:
                raise ValueError(f"{where}: must be above zero")
    return ActionScales(ranges=tuple(ranges), steps=tuple(steps))
