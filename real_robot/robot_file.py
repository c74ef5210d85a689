"""A robot file: limits, how the policy drives this arm, and which ROS topics carry it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml

from real_robot.control.chunk_scheduler import ChunkingConfig, ChunkingMethod
from real_robot.safety.filter import RobotLimits
from real_robot.safety.limits import check_choice, load_limits

T = TypeVar("T")
EmbodimentName = Literal["joint_positions", "joint_steps", "panda_tool"]
CommandType = Literal[
    "joint_trajectory", "follow_joint_trajectory", "float64_multi_array", "joint_jog", "twist_stamped"
]
_CHOICES = {
    "EmbodimentName": get_args(EmbodimentName),
    "CommandType": get_args(CommandType),
    "ChunkingMethod": get_args(ChunkingMethod),
}


@dataclass(frozen=True, kw_only=True)
class ControlSection:
    """``embodiment``: what the policy's numbers mean.

    ``server_timeout_s``: a policy server that is silent for longer is treated as dead.
    """

    embodiment: EmbodimentName
    max_image_age_s: float = 0.2
    server_timeout_s: float = 2.0
    chunking: ChunkingConfig = field(default_factory=ChunkingConfig)


@dataclass(frozen=True, kw_only=True)
class RosSection:
    """Topics. A camera topic that ends in ``/compressed`` is a CompressedImage, any other an Image (rgb8 or bgr8).

    ``command_type``: a trajectory carries its own stop, so it is the default. ``follow_joint_trajectory``: the same as
    goals of the action that ``command`` names. ``float64_multi_array``: positions for a forward_command_controller.
    ``joint_jog`` and ``twist_stamped``: the joints' or the tool's velocity [rad/s, m/s] in ``command_frame`` for MoveIt
    Servo; joints that the kinematic chain does not name go as positions to the topic ``gripper`` beside a twist.

    ``tool_frame``: TF's name of the tool point. Before the arm first moves, its published place in ``command_frame``
    must be where the kinematic chain of the limits puts it.

    ``residuals``: a JointState topic whose effort is the external torque, for the limits' contact_residual.
    ``scene``: the node that prepares episodes: parameters ``task`` and ``seed``, service ``~/reset``, topics
    ``~/instruction``, ``~/success`` and ``~/failure``.
    """

    joint_states: str
    command: str
    cameras: Mapping[str, str]
    command_type: CommandType = "joint_trajectory"
    command_frame: str = "base_link"
    gripper: str = ""
    tool_frame: str = ""
    residuals: str = ""
    scene: str = ""


@dataclass(frozen=True, kw_only=True)
class Robot:
    limits: RobotLimits
    control: ControlSection
    ros: RosSection


def load_robot(path: Path) -> Robot:
    """Everything in the file. ValueError names the file and the place of what is wrong."""
    limits = load_limits(path)
    document = yaml.safe_load(path.read_text())
    try:
        check_keys(document, "", required={"limits", "control", "ros"}, optional=set())
        chunking = document["control"].pop("chunking", {}) if isinstance(document["control"], dict) else {}
        control = _section(ControlSection, document["control"], ".control")
        control = dataclasses.replace(control, chunking=_section(ChunkingConfig, chunking, ".control.chunking"))
        robot = Robot(limits=limits, control=control, ros=_section(RosSection, document["ros"], ".ros"))
        _check_output(robot)
        return robot
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).lstrip('.')}") from error


def _check_output(robot: Robot) -> None:
    """A twist needs to know how joints move the tool, and another way to the joints that do not."""
    ros, axes = robot.ros, robot.limits.axes
    if any(axis.contact_residual is not None for axis in axes) and not ros.residuals:
        raise ValueError(".ros.residuals: the limits name a contact_residual, so name the topic that measures it")
    if ros.tool_frame and robot.limits.workspace is None:
        raise ValueError(".ros.tool_frame: there is no limits.workspace.chain to compare it with")
    if ros.command_type != "twist_stamped":
        return
    if robot.limits.workspace is None:
        raise ValueError(".ros.command_type: twist_stamped needs limits.workspace.chain, the arm's kinematics")
    chain = {frame.joint for frame in robot.limits.workspace.frames}
    others = [axis.name for axis in axes if axis.name not in chain]
    if others and not ros.gripper:
        raise ValueError(f".ros.gripper: a twist does not move {others}; name the topic that takes their positions")


def check_keys(table: Any, where: str, *, required: set[str], optional: set[str]) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: expected a table")
    for key in table:
        check_choice(key, required | optional, f"{where}.{key}")
    if missing := required - set(table):
        raise ValueError(f"{where}: missing {sorted(missing)}")


def _section(kind: type[T], table: Any, where: str) -> T:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    required = {
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    check_keys(table, where, required=required, optional=set(fields) - required)
    for key, value in table.items():
        _check_value(value, str(fields[key].type), f"{where}.{key}")
    return kind(**table)


def _check_value(value: Any, annotation: str, where: str) -> None:
    if annotation in _CHOICES:
        check_choice(value, _CHOICES[annotation], where)
        return
    good = {
        "str": isinstance(value, str) and value,
        "int": isinstance(value, int) and not isinstance(value, bool) and value >= 0,
        "float": isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
        "Mapping[str, str]": isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values()),
    }[annotation]
    if not good:
        raise ValueError(f"{where}: got {value!r}, expected {annotation}")
