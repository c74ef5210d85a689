"""Robot limits from YAML, every number with its unit, checked before an arm may move.

A file says ``velocity: 150 deg/s``, not ``2.6``. Each quantity is checked for the dimension of its kind of joint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, pi
from typing import Any

from real_robot.safety.collisions import BASE, Capsule, Collisions, Obstacle, ObstacleKind, checked_pairs
from real_robot.safety.contact import ContactLimit
from real_robot.safety.kinematics import JointFrame, Vector
from real_robot.safety.stopping import Axis, AxisLimits
from real_robot.safety.workspace import Workspace
from sims.errors import did_you_mean

# unit -> (dimension, factor to SI)
_UNITS = {
    **{"rad": ("angle", 1.0), "deg": ("angle", pi / 180.0), "m": ("length", 1.0), "mm": ("length", 1e-3)},
    **{"s": ("time", 1.0), "ms": ("time", 1e-3), "Hz": ("rate", 1.0), "N": ("force", 1.0), "N m": ("torque", 1.0)},
    **{"N/m": ("stiffness", 1.0), "N/mm": ("stiffness", 1e3), "kg": ("mass", 1.0)},
}
_DERIVATIVES = {"": 0, "/s": 1, "/s^2": 2, "/s^3": 3}
_QUANTITY = re.compile(r"\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*(N m|N/mm?|[A-Za-z]+)(/s(?:\^[23])?)?\s*")
_JOINT_KINDS = {"revolute": ("rad", "angle", "torque"), "prismatic": ("m", "length", "force")}
MAX_STOP_S = 2.0  # limits with a longer stop from full speed are refused


@dataclass(frozen=True, kw_only=True)
class RobotLimits:
    """What the filter enforces. ``command_hz``: rate of the ticks.

    ``max_command_age_s``: of the observation that a command is based on. ``command_lead_s``: how long before its time
    every point of the motion is sent to a trajectory controller; a message may be late, or the messages of some ticks
    lost, for so long (less one tick) without any effect on the motion. ``more_arms``: box and chain of every arm after
    the first, in the same base frame.
    """

    command_hz: float
    axes: tuple[AxisLimits, ...]
    workspace: Workspace | None
    max_command_age_s: float
    max_measurement_age_s: float
    command_lead_s: float = 0.1
    collisions: Collisions | None = None
    more_arms: tuple[Workspace, ...] = ()
    contact: ContactLimit | None = None


def parse_limits(section: Any) -> RobotLimits:
    """The section ``limits`` of a robot file. ValueError names the place, what was found and what is allowed."""
    keys = {"command_rate", "max_command_age", "max_measurement_age", "joints"}
    optional = {"workspace", "more_arms", "collisions", "contact", "command_lead"}
    table = check_table(section, ".limits", required=keys, optional=optional)
    rate = _positive(table["command_rate"], ".limits.command_rate", "rate")
    if not isinstance(table["joints"], Mapping) or not table["joints"]:
        raise ValueError(".limits.joints: expected a table from joint name to its limits")
    workspace = _workspace(table["workspace"], ".limits.workspace") if "workspace" in table else None
    more = _list(table.get("more_arms", []), ".limits.more_arms")
    more_arms = tuple(_workspace(entry, f".limits.more_arms[{i}]") for i, entry in enumerate(more))
    arms = (workspace, *more_arms) if workspace else more_arms
    if more and workspace is None:
        raise ValueError(".limits.more_arms: give the first arm as workspace")
    _check_chains(arms, table["joints"])
    limits = RobotLimits(
        command_hz=rate,
        axes=tuple(_joint(str(name), entry) for name, entry in table["joints"].items()),
        workspace=workspace,
        collisions=_collisions(table["collisions"], arms) if "collisions" in table else None,
        more_arms=more_arms,
        contact=_contact(table["contact"], arms) if "contact" in table else None,
        max_command_age_s=_positive(table["max_command_age"], ".limits.max_command_age", "time"),
        max_measurement_age_s=_positive(table["max_measurement_age"], ".limits.max_measurement_age", "time"),
        command_lead_s=_positive(table.get("command_lead", "100 ms"), ".limits.command_lead", "time"),
    )
    for axis in limits.axes:
        _check_stop(axis, rate)
    return limits


def quantity(value: Any, where: str, dimension: str, derivative: int = 0) -> float:
    """``value`` such as "150 deg/s" in SI. ValueError unless it is ``dimension`` per second^``derivative``."""
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    wanted = [f"{unit}{suffix}" for unit, (kind, _) in _UNITS.items() for suffix, order in _DERIVATIVES.items()
              if kind == dimension and order == derivative]  # fmt: skip
    expected = f"expected a number with its unit, one of {', '.join(wanted)}"
    if match is None:
        raise ValueError(f"{where}: got {value!r}; {expected}")
    number, unit, suffix = match.groups()
    kind, factor = _UNITS.get(unit, ("unknown", 0.0))
    if kind != dimension or _DERIVATIVES[suffix or ""] != derivative:
        raise ValueError(f"{where}: got {value!r}; {expected}")
    try:
        result = float(number) * factor
    except ValueError as error:
        raise ValueError(f"{where}: got {value!r}; {expected}") from error
    if not isfinite(result):
        raise ValueError(f"{where}: got {value!r}; it must be finite")
    return result


def _joint(name: str, entry: Any) -> AxisLimits:
    where = f".limits.joints.{name}"
    keys = {"kind", "position", "velocity", "acceleration", "jerk", "step_from_measured"}
    table = check_table(entry, where, required=keys, optional={"contact_residual", "hold_tolerance"})
    check_choice(table["kind"], _JOINT_KINDS, f"{where}.kind")
    unit, motion, effort = _JOINT_KINDS[table["kind"]]
    low, high = _sequence(table["position"], f"{where}.position", 2)
    position = quantity(low, f"{where}.position[0]", motion), quantity(high, f"{where}.position[1]", motion)
    if not position[0] < position[1]:
        raise ValueError(f"{where}.position: the lower limit {low!r} is not below the upper limit {high!r}")
    residual = table.get("contact_residual")
    tolerance = table.get("hold_tolerance", "0.02 rad" if unit == "rad" else "5 mm")
    return AxisLimits(
        name=name,
        unit=unit,
        position=position,
        velocity=_positive(table["velocity"], f"{where}.velocity", motion, 1),
        acceleration=_positive(table["acceleration"], f"{where}.acceleration", motion, 2),
        jerk=_positive(table["jerk"], f"{where}.jerk", motion, 3),
        step_from_measured=_positive(table["step_from_measured"], f"{where}.step_from_measured", motion),
        hold_tolerance=_positive(tolerance, f"{where}.hold_tolerance", motion),
        contact_residual=None if residual is None else _positive(residual, f"{where}.contact_residual", effort),
    )


def _check_stop(axis: AxisLimits, rate_hz: float) -> None:
    """The stop from full speed must be short in time and fit between the position limits."""
    dt = 1.0 / rate_hz
    where = f".limits.joints.{axis.name}"
    rough_s = axis.velocity / axis.acceleration + axis.acceleration / axis.jerk
    if rough_s > MAX_STOP_S:
        raise ValueError(
            f"{where}: stopping from full speed takes about {rough_s:.2f} s, at most {MAX_STOP_S} s are allowed; "
            "lower the velocity, or raise the acceleration or the jerk"
        )
    stop = Axis(axis, dt).stop(axis.velocity * dt, 0.0)
    distance = inf if stop is None else stop[4]
    if distance > axis.position[1] - axis.position[0]:
        raise ValueError(
            f"{where}: stopping from full speed takes {distance:.3f} {axis.unit}, more than the whole range; "
            "lower the velocity"
        )


def _check_chains(arms: Sequence[Workspace], joints: Iterable[str]) -> None:
    """Every frame belongs to a joint of the robot, and no joint to two frames."""
    seen: set[str] = set()
    for k, arm in enumerate(arms):
        for i, frame in enumerate(arm.frames):
            where = f".limits.more_arms[{k - 1}].chain[{i}].joint" if k else f".limits.workspace.chain[{i}].joint"
            check_choice(frame.joint, joints, where)
            if frame.joint in seen:
                raise ValueError(f"{where}: {frame.joint!r} is in a chain already")
            seen.add(frame.joint)


def _workspace(entry: Any, place: str) -> Workspace:
    table = check_table(entry, place, required={"low", "high", "chain"}, optional={"end_effector"})
    low, high = (vector(table[key], f"{place}.{key}", "length") for key in ("low", "high"))
    if not all(a < b for a, b in zip(low, high, strict=True)):
        raise ValueError(f"{place}: low {low} is not below high {high} in every direction")
    if not isinstance(table["chain"], list) or not table["chain"]:
        raise ValueError(f"{place}.chain: expected a list of joint frames from the base to the end effector")
    frames = []
    for i, link in enumerate(table["chain"]):
        where = f"{place}.chain[{i}]"
        link = check_table(link, where, required={"joint", "xyz"}, optional={"rpy"})
        rpy = vector(link["rpy"], f"{where}.rpy", "angle") if "rpy" in link else (0.0, 0.0, 0.0)
        frames.append(JointFrame(joint=str(link["joint"]), xyz=vector(link["xyz"], f"{where}.xyz", "length"), rpy=rpy))
    offset = table.get("end_effector", ["0 m"] * 3)
    end_effector = vector(offset, f"{place}.end_effector", "length")
    return Workspace(low=low, high=high, frames=tuple(frames), end_effector=end_effector)


def _collisions(entry: Any, arms: Sequence[Workspace]) -> Collisions:
    if not arms:
        raise ValueError(".limits.collisions: needs workspace.chain, the arm's kinematics")
    table = check_table(entry, ".limits.collisions", required={"margin", "links"}, optional={"obstacles", "also"})
    joints = [BASE, *(frame.joint for arm in arms for frame in arm.frames)]
    also = []
    for i, pair in enumerate(_list(table.get("also", []), ".limits.collisions.also")):
        where = f".limits.collisions.also[{i}]"
        first, second = (check_choice(name, joints, where) for name in _sequence(pair, where, 2))
        also.append((first, second))
    links = _list(table["links"], ".limits.collisions.links")
    collisions = Collisions(
        margin=_positive(table["margin"], ".limits.collisions.margin", "length"),
        chains=tuple(arm.frames for arm in arms),
        capsules=tuple(_capsule(link, joints, f".limits.collisions.links[{i}]") for i, link in enumerate(links)),
        obstacles=tuple(
            _obstacle(obstacle, f".limits.collisions.obstacles[{i}]")
            for i, obstacle in enumerate(_list(table.get("obstacles", []), ".limits.collisions.obstacles"))
        ),
        also=tuple(also),
    )
    if not checked_pairs(collisions):
        raise ValueError(".limits.collisions: no two of these shapes can come closer; name more links, or obstacles")
    return collisions


def _contact(entry: Any, arms: Sequence[Workspace]) -> ContactLimit:
    if not arms:
        raise ValueError(".limits.contact: needs workspace.chain, the arm's kinematics")
    dimensions = {"force": "force", "stiffness": "stiffness", "body_mass": "mass", "moving_mass": "mass"}
    table = check_table(entry, ".limits.contact", required=set(dimensions), optional={"payload"})
    values = {key: _positive(table[key], f".limits.contact.{key}", dimension) for key, dimension in dimensions.items()}
    return ContactLimit(**values, payload=quantity(table.get("payload", "0 kg"), ".limits.contact.payload", "mass"))


def _capsule(entry: Any, joints: Sequence[str], where: str) -> Capsule:
    table = check_table(entry, where, required={"joint", "from", "radius"}, optional={"to"})
    start = vector(table["from"], f"{where}.from", "length")
    return Capsule(
        joint=check_choice(table["joint"], joints, f"{where}.joint"),
        start=start,
        end=vector(table["to"], f"{where}.to", "length") if "to" in table else start,
        radius=_positive(table["radius"], f"{where}.radius", "length"),
    )


def _obstacle(entry: Any, where: str) -> Obstacle:
    kinds = {"plane": set(), "box": {"size"}, "sphere": {"radius"}}
    if not isinstance(entry, Mapping) or "kind" not in entry:
        raise ValueError(f"{where}: expected a table with the key 'kind', one of {sorted(kinds)}")
    kind: ObstacleKind = check_choice(entry["kind"], kinds, f"{where}.kind")
    table = check_table(entry, where, required={"kind", "position", *kinds[kind]}, optional={"rpy"})
    size: Vector = (0.0, 0.0, 0.0)
    if kind == "sphere":
        radius = _positive(table["radius"], f"{where}.radius", "length")
        size = (radius, radius, radius)
    elif kind == "box":
        x, y, z = (
            _positive(edge, f"{where}.size[{i}]", "length")
            for i, edge in enumerate(_sequence(table["size"], f"{where}.size", 3))
        )
        size = (x, y, z)
    return Obstacle(
        kind=kind,
        position=vector(table["position"], f"{where}.position", "length"),
        rpy=vector(table["rpy"], f"{where}.rpy", "angle") if "rpy" in table else (0.0, 0.0, 0.0),
        size=size,
    )


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: got {value!r}; expected a list")
    return value


def _positive(value: Any, where: str, dimension: str, derivative: int = 0) -> float:
    result = quantity(value, where, dimension, derivative)
    if result <= 0.0:
        raise ValueError(f"{where}: got {value!r}; it must be above zero")
    return result


def vector(value: Any, where: str, dimension: str) -> Vector:
    """Three quantities in SI, as ``quantity``."""
    x, y, z = (quantity(item, f"{where}[{i}]", dimension) for i, item in enumerate(_sequence(value, where, 3)))
    return x, y, z


def _sequence(value: Any, where: str, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{where}: got {value!r}; expected a list of {length}")
    return value


def check_table(value: Any, where: str, *, required: set[str], optional: set[str]) -> Mapping[str, Any]:
    """``value``, if it is a table with these keys. ValueError otherwise."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a table with the keys {sorted(required)}")
    for key in value:
        check_choice(key, required | optional, f"{where}.{key}")
    missing = required - set(value)
    if missing:
        raise ValueError(f"{where}: missing {sorted(missing)}")
    return value


def check_choice(value: Any, allowed: Iterable[str], where: str) -> Any:
    """``value``, if it is allowed; a ValueError names the place ``where``, the allowed values and the nearest."""
    names = sorted(allowed)
    if value not in names:
        raise ValueError(f"{where}: {value!r} is not one of {names}{did_you_mean(str(value), names)}")
    return value
