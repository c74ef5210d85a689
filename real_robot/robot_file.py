"""The robot file, a YAML file per arm: limits, how the policy drives it, and its ROS topics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml

from real_robot.control.chunk_scheduler import ChunkingConfig, ChunkingMethod
from real_robot.safety.limits import RobotLimits, check_choice, check_table, load_limits
from sims.errors import UserError

T = TypeVar("T")
EmbodimentName = Literal["joint_positions", "joint_steps", "panda_end_effector"]
CommandType = Literal[
    "joint_trajectory", "follow_joint_trajectory", "float64_multi_array", "joint_jog", "twist_stamped"
]
_CHOICES = {
    "EmbodimentName": get_args(EmbodimentName),
    "CommandType": get_args(CommandType),
    "ChunkingMethod": get_args(ChunkingMethod),
}
_RENAMED_KEYS = {"tool_frame": "end_effector_frame", "scene": "episode_node"}
_RENAMED_VALUES = {"panda_tool": "panda_end_effector"}


class RobotError(UserError):
    """A robot file, robot, bundle or installation with which an arm cannot be driven."""


@dataclass(frozen=True, kw_only=True)
class ControlSection:
    """``embodiment``: what the policy's state and action mean (control/registry.py).

    ``max_image_age_s``: older images are not sent to the policy. ``server_timeout_s``: a policy server that does not
    answer for longer is treated as lost.
    """

    embodiment: EmbodimentName
    max_image_age_s: float = 0.2
    server_timeout_s: float = 2.0
    chunking: ChunkingConfig = field(default_factory=ChunkingConfig)


@dataclass(frozen=True, kw_only=True)
class RosSection:
    """Topics. A camera topic that ends in ``/compressed`` is a CompressedImage, any other an Image (rgb8 or bgr8).

    ``command_type`` (ros/registry.py): the default, a trajectory, carries its own stop. ``follow_joint_trajectory``:
    the same as goals of the action that ``command`` names. ``float64_multi_array``: positions for a
    forward_command_controller. ``joint_jog`` and ``twist_stamped``: velocities of the joints or of the end effector
    [rad/s, m/s] in ``command_frame`` for MoveIt Servo; with a twist, the positions of joints that the kinematic chain
    does not name go to the topic ``gripper``.

    ``end_effector_frame``: TF's name of the end effector. Before the arm first moves, its published position in
    ``command_frame`` must agree with the kinematic chain of the limits.

    ``residuals``: a JointState topic whose effort is the external torque, for the limits' contact_residual.
    ``episode_node``: the node that prepares episodes and reports success: parameters ``task`` and ``seed``, service
    ``~/reset``, topics ``~/instruction``, ``~/success`` and ``~/failure``.
    """

    joint_states: str
    command: str
    cameras: Mapping[str, str]
    command_type: CommandType = "joint_trajectory"
    command_frame: str = "base_link"
    gripper: str = ""
    end_effector_frame: str = ""
    residuals: str = ""
    episode_node: str = ""


@dataclass(frozen=True, kw_only=True)
class Robot:
    """Contents of a robot file."""

    limits: RobotLimits
    control: ControlSection
    ros: RosSection


def load_robot(path: Path) -> Robot:
    """The whole file. ValueError names the file and the place of what is wrong."""
    limits = load_limits(path)
    document = yaml.safe_load(path.read_text())
    try:
        check_table(document, "", required={"limits", "control", "ros"}, optional=set())
        chunking = document["control"].pop("chunking", {}) if isinstance(document["control"], dict) else {}
        control = _section(ControlSection, document["control"], ".control")
        control = dataclasses.replace(control, chunking=_section(ChunkingConfig, chunking, ".control.chunking"))
        robot = Robot(limits=limits, control=control, ros=_section(RosSection, document["ros"], ".ros"))
        _check_output(robot)
        return robot
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).lstrip('.')}") from error


def _check_output(robot: Robot) -> None:
    """Settings that need each other."""
    ros, axes = robot.ros, robot.limits.axes
    if any(axis.contact_residual is not None for axis in axes) and not ros.residuals:
        raise ValueError(".ros.residuals: the limits name a contact_residual, name the topic that measures it")
    if ros.end_effector_frame and robot.limits.workspace is None:
        raise ValueError(".ros.end_effector_frame: needs limits.workspace.chain to compare with")
    if ros.command_type != "twist_stamped":
        return
    if robot.limits.workspace is None:
        raise ValueError(".ros.command_type: twist_stamped needs limits.workspace.chain, the arm's kinematics")
    chain = {frame.joint for frame in robot.limits.workspace.frames}
    others = [axis.name for axis in axes if axis.name not in chain]
    if others and not ros.gripper:
        raise ValueError(f".ros.gripper: a twist does not move {others}; name the topic that takes their positions")


def _section(kind: type[T], table: Any, where: str) -> T:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    required = {
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    check_table(table, where, required=required, optional=set(fields) - required, renamed=_RENAMED_KEYS)
    for key, value in table.items():
        _check_value(value, str(fields[key].type), f"{where}.{key}")
    return kind(**table)


def _check_value(value: Any, annotation: str, where: str) -> None:
    if annotation in _CHOICES:
        if value in _RENAMED_VALUES:
            raise ValueError(f"{where}: {value!r} was renamed to {_RENAMED_VALUES[value]!r}")
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
