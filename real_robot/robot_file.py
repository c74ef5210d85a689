"""The robot file, a YAML file per arm: limits, how the policy drives it, and its ROS topics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from real_robot.calibration import Camera, load_calibration
from real_robot.control.chunk_scheduler import ChunkingConfig, ChunkingMethod
from real_robot.control.embodiment import ActionScales, Embodiment
from real_robot.control.loop import ActionSource, ControlLoop, lead_in_steps
from real_robot.control.mobile_base import check_base
from real_robot.control.registry import EMBODIMENTS
from real_robot.control.scales import SCALE_KEYS, read_scales
from real_robot.safety.limits import RobotLimits, check_choice, check_table, parse_limits, quantity
from sims.config.yaml_tree import read_tree
from sims.errors import UserError

T = TypeVar("T")
EmbodimentName = str  # a key of EMBODIMENTS
CommandType = Literal[
    "joint_trajectory",
    "follow_joint_trajectory",
    "float64_multi_array",
    "float64_velocities",
    "joint_jog",
    "twist_stamped",
    "base_twist",
    "base_twist_stamped",
]
_TIMED = ("joint_trajectory", "follow_joint_trajectory")
_BASES = ("base_twist", "base_twist_stamped")
# of ``command_lead``: docs/safety-filter.md#how-limits-hold-inside-the-controller
MIN_LEAD_TICKS, MIN_LEAD_S = 5, 0.05
# A goal of an action is answered, so only every third tick sends one; the others are as if they were lost.
TICKS_PER_GOAL = 3
_CHOICES = {
    "EmbodimentName": tuple(EMBODIMENTS),
    "CommandType": get_args(CommandType),
    "ChunkingMethod": get_args(ChunkingMethod),
}


class RobotError(UserError):
    """A robot file, robot, bundle or installation with which an arm cannot be driven."""


@dataclass(frozen=True, kw_only=True)
class ControlSection:
    """``embodiment``: what the policy's state and action mean (control/registry.py). ``scales``: from ``joint_range``
    and ``joint_step``, for the embodiments that need them; they are the policy's, independent of the limits.

    ``max_image_age_s``: older images are neither sent to the policy nor recorded. ``server_timeout_s``: a policy server
    that does not answer for longer is treated as lost.
    """

    embodiment: EmbodimentName
    max_image_age_s: float = 0.2
    server_timeout_s: float = 2.0
    chunking: ChunkingConfig = field(default_factory=ChunkingConfig)
    scales: ActionScales = field(default_factory=ActionScales)


_CONTROL_KEYS = {f.name for f in dataclasses.fields(ControlSection)} - {"scales"} | set(SCALE_KEYS)


@dataclass(frozen=True, kw_only=True)
class Controller:
    """One controller, of ``joints``. ``joint_states``: a topic of their own; ``odometry``: in its place, of a base."""

    joints: Sequence[str]
    command: str
    command_type: CommandType = "joint_trajectory"
    joint_states: str = ""
    odometry: str = ""


@dataclass(frozen=True, kw_only=True)
class RosSection:
    """Topics. A camera topic that ends in ``/compressed`` is a CompressedImage, any other an Image (rgb8 or bgr8).

    ``command_type`` (ros/registry.py): the default, a trajectory, carries its own stop. ``follow_joint_trajectory``:
    the same as goals of the action that ``command`` names. ``float64_multi_array``: positions for a
    forward_command_controller, ``float64_velocities``: velocities for one. ``joint_jog`` and ``twist_stamped``:
    velocities of the joints or of the end effector
    [rad/s, m/s] in ``command_frame`` for MoveIt Servo; with a twist, the positions of joints that the kinematic chain
    does not name go to the topic ``gripper``.

    ``more_controllers``: of arms with separate controllers, or of a mobile base (``base_twist`` and
    ``base_twist_stamped``: Twist or TwistStamped in the base's frame, real_robot/control/mobile_base.py); ``command``
    moves the joints that none of them names.

    ``end_effector_frame``: TF's name of the end effector. Before the arm first moves, its published position in
    ``command_frame`` must agree with the kinematic chain of the limits.

    ``calibration``: a file with the cameras' poses (``real_robot.calibration``), relative to the robot file.

    ``residuals``: a JointState topic whose effort is the external torque, for the limits' contact_residual.
    ``emergency_stop``: a Bool topic, true while pressed. ``enabling_device``: a Bool topic, true while it is held.
    Both are published at 10 Hz at least; silence counts as pressed, or released. Either latches the stop.
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
    calibration: str = ""
    residuals: str = ""
    emergency_stop: str = ""
    enabling_device: str = ""
    episode_node: str = ""
    more_controllers: Sequence[Controller] = ()


@dataclass(frozen=True, kw_only=True)
class LeRobotJoint:
    """LeRobot's name of a joint, the position at its value 0 [rad or m], and the change of position per 1."""

    key: str
    at_0: float
    per_unit: float


@dataclass(frozen=True, kw_only=True)
class LeRobotDevice:
    """A teleoperator or a driver of LeRobot. ``config``: settings of its ``type``."""

    type: str
    config: Mapping[str, Any]
    joints: Mapping[str, LeRobotJoint]


@dataclass(frozen=True, kw_only=True)
class LeRobotSection(LeRobotDevice):
    """The driver that moves the arm (``real_robot.lerobot.arm``)."""

    rate_hz: float
    cameras: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Robot:
    """Contents of a robot file. ``calibration``: of the cameras that have one. With ``lerobot``, ``ros`` is empty.
    ``leader``: a teleoperator of LeRobot (``real_robot.lerobot.leader``)."""

    limits: RobotLimits
    control: ControlSection
    ros: RosSection
    lerobot: LeRobotSection | None = None
    leader: LeRobotDevice | None = None
    calibration: Mapping[str, Camera] = field(default_factory=dict)

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """Every joint belongs to one of them."""
        ros, more = self.ros, tuple(self.ros.more_controllers)
        others = {name for controller in more for name in controller.joints}
        joints = [axis.name for axis in self.limits.axes if axis.name not in others]
        return Controller(joints=joints, command=ros.command, command_type=ros.command_type), *more

    @property
    def cameras(self) -> Mapping[str, str]:
        """The policy's name of each: its topic, or LeRobot's name."""
        return (self.lerobot or self.ros).cameras

    def check_cameras(self, names: Iterable[str]) -> None:
        """ValueError unless a policy with the cameras ``names`` has those of this robot."""
        if differing := sorted(set(names) ^ set(self.cameras)):
            section = "ros" if self.lerobot is None else "lerobot"
            raise ValueError(
                f"policy and robot file disagree about the cameras {differing}: the policy has {sorted(names)}, the "
                f"robot {sorted(self.cameras)}; rename them under {section}.cameras"
            )

    def embodiment(self) -> Embodiment:
        """A new one: it remembers where its arm is sent. ValueError if the joints are not the embodiment's."""
        return EMBODIMENTS[self.control.embodiment](self.limits.axes, self.control.scales)

    def control_loop(self, source: ActionSource, embodiment: Embodiment, *, control_hz: float) -> ControlLoop:
        """ValueError if the command rate is not a multiple of ``control_hz``."""
        return ControlLoop(self.limits, control_hz=control_hz, embodiment=embodiment, source=source, lead_s=self.lead_s)

    @property
    def lead_s(self) -> float:
        """How long before its time a point of the motion is sent: 0 where no controller takes times."""
        timed = any(is_timed(controller) for controller in self.controllers)
        return self.limits.command_lead_s if timed else 0.0

    def lead_steps(self, control_hz: float) -> float:
        """``lead_s`` in control steps."""
        return lead_in_steps(self.lead_s, command_hz=self.limits.command_hz, control_hz=control_hz)

    def check_delay(self, action_delay: int, control_hz: float) -> None:
        """ValueError unless the lead allows a policy that was trained with this delay [control steps]."""
        self.control.chunking.for_policy(action_delay, lead_steps=self.lead_steps(control_hz))

    def chunking_for(
        self, *, action_horizon: int, action_delay: int, max_prefix: int, control_hz: float
    ) -> ChunkingConfig:
        """How the chunks of a policy that was trained with this delay [control steps] and prefixes of up to
        ``max_prefix`` actions follow each other. ValueError if lead, ``max_delay`` or the chunks are too long for them.
        """
        lead_steps = self.lead_steps(control_hz)
        chunking = self.control.chunking.for_policy(action_delay, lead_steps=lead_steps)
        chunking.check_prefix(max_prefix, lead_steps=lead_steps)
        oldest_s = chunking.oldest_steps(action_horizon, lead_steps=lead_steps) / control_hz
        if oldest_s > self.limits.max_command_age_s + 1e-9:
            executed = (
                f"all {action_horizon} actions" if chunking.method == "queue" else
                f"control.chunking.execute_steps {chunking.execute_steps}"
            )  # fmt: skip
            raise ValueError(
                f"a chunk would be executed up to {oldest_s:g} s after its observation ({executed} at {control_hz:g} "
                f"Hz, after a delay of up to {chunking.max_delay}), beyond limits.max_command_age of "
                f"{self.limits.max_command_age_s:g} s the arm brakes; execute fewer, or raise max_command_age"
            )
        return chunking


def is_timed(controller: Controller) -> bool:
    """Whether points are sent to it ahead, with their times."""
    return controller.command_type in _TIMED


def load_robot(path: Path) -> Robot:
    """The whole file. ValueError names the file and the place of what is wrong."""
    try:
        document, _ = read_tree(path)
        if "limits" not in document:
            raise ValueError("no 'limits' section; see configs/robots/generic.yaml for a commented one")
        limits = parse_limits(document["limits"])
        driver = "lerobot" if "lerobot" in document else "ros"
        check_table(document, "", required={"limits", "control", driver}, optional={"leader"})
        table = dict(check_table(document["control"], ".control", required={"embodiment"}, optional=_CONTROL_KEYS))
        chunking, scales = table.pop("chunking", {}), {key: table.pop(key, None) for key in SCALE_KEYS}
        control = dataclasses.replace(
            _section(ControlSection, table, ".control"),
            chunking=_section(ChunkingConfig, chunking, ".control.chunking"),
            scales=read_scales(scales, str(table["embodiment"]), limits.axes),
        )
        leader = _device(document["leader"], ".leader", limits) if "leader" in document else None
        if driver == "lerobot":
            unused, arm = RosSection(joint_states="", command="", cameras={}), _lerobot(document["lerobot"], limits)
            robot = Robot(limits=limits, control=control, ros=unused, lerobot=arm, leader=leader)
        else:
            ros = _ros(document["ros"])
            calibration = load_calibration(path.parent / ros.calibration) if ros.calibration else {}
            robot = Robot(limits=limits, control=control, ros=ros, leader=leader, calibration=calibration)
            _check_output(robot)
        _check_lead(robot, given="command_lead" in document["limits"])
        return dataclasses.replace(robot, limits=_with_bases(robot, document["limits"]["joints"]))
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).lstrip('.')}") from error


def read_robot(path: Path) -> Robot:
    """As ``load_robot``, for a command: RobotError, which is shown as one line, in place of ValueError."""
    try:
        return load_robot(path)
    except ValueError as error:
        raise RobotError(str(error)) from error


def _ros(entry: Any) -> RosSection:
    table = dict(entry) if isinstance(entry, Mapping) else {}
    more = table.pop("more_controllers", [])
    if not isinstance(more, list):
        raise ValueError(f".ros.more_controllers: got {more!r}, expected a list of controllers")
    controllers = [_section(Controller, one, f".ros.more_controllers[{i}]") for i, one in enumerate(more)]
    return dataclasses.replace(_section(RosSection, table, ".ros"), more_controllers=tuple(controllers))


def _lerobot(entry: Any, limits: RobotLimits) -> LeRobotSection:
    device = _device(entry, ".lerobot", limits, more=("rate",), optional=("cameras",))
    if any(axis.contact_residual is not None for axis in limits.axes):
        raise ValueError(".limits: LeRobot's drivers measure no external torque; remove contact_residual")
    rate_hz = quantity(entry["rate"], ".lerobot.rate", "rate")
    if not rate_hz > 0.0:
        raise ValueError(f".lerobot.rate: got {entry['rate']!r}; it must be above zero")
    cameras = entry.get("cameras", {})
    _check_value(cameras, "Mapping[str, str]", ".lerobot.cameras")
    return LeRobotSection(**vars(device), rate_hz=rate_hz, cameras=cameras)


def _device(
    entry: Any, where: str, limits: RobotLimits, *, more: Sequence[str] = (), optional: Sequence[str] = ()
) -> LeRobotDevice:
    """``type``, ``config`` and ``joints`` of a section that has ``more`` and ``optional`` keys besides."""
    table = check_table(entry, where, required={"type", "joints", *more}, optional={"config", *optional})
    names = {axis.name for axis in limits.axes}
    entries = check_table(table["joints"], f"{where}.joints", required=names, optional=set())
    joints, keys = dict[str, LeRobotJoint](), set[str]()
    for axis in limits.axes:
        at, kind = f"{where}.joints.{axis.name}", {"rad": "angle", "m": "length"}[axis.unit]
        joint = check_table(entries[axis.name], at, required={"key", "at_0", "at_100"}, optional=set())
        low, high = (quantity(joint[key], f"{at}.{key}", kind) for key in ("at_0", "at_100"))
        if low == high:
            raise ValueError(f"{at}: at_0 and at_100 are the same position")
        _check_value(joint["key"], "str", f"{at}.key")
        if joint["key"] in keys:
            raise ValueError(f"{at}.key: {joint['key']!r} is that of another joint")
        keys.add(joint["key"])
        joints[axis.name] = LeRobotJoint(key=joint["key"], at_0=low, per_unit=0.01 * (high - low))
    config = table.get("config", {})
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}.config: got {config!r}, expected a table of settings")
    return LeRobotDevice(type=str(table["type"]), config=dict(config), joints=joints)


def _check_output(robot: Robot) -> None:
    """Settings that need each other."""
    ros, axes = robot.ros, robot.limits.axes
    if any(axis.contact_residual is not None for axis in axes) and not ros.residuals:
        raise ValueError(".ros.residuals: the limits name a contact_residual, name the topic that measures it")
    if ros.residuals and all(axis.contact_residual is None for axis in axes):
        raise ValueError(".ros.residuals: no joint has a contact_residual, so that no contact stops the arm; give them")
    if ros.gripper and ros.command_type != "twist_stamped":
        raise ValueError(
            ".ros.gripper: only twist_stamped sends positions there; give another controller in more_controllers"
        )
    if ros.enabling_device and ros.enabling_device == ros.emergency_stop:
        raise ValueError(f".ros.enabling_device: {ros.enabling_device} is the emergency stop, true while it is pressed")
    if ros.end_effector_frame and robot.limits.workspace is None:
        raise ValueError(".ros.end_effector_frame: needs limits.workspace.chain to compare with")
    if ros.calibration and robot.limits.workspace is None:
        raise ValueError(".ros.calibration: needs limits.workspace.chain to know where the end effector is")
    for name in robot.calibration:
        check_choice(name, ros.cameras, f".ros.calibration: {ros.calibration}: camera")
    _check_controllers(robot)
    if ros.command_type != "twist_stamped":
        return
    if robot.limits.workspace is None:
        raise ValueError(".ros.command_type: twist_stamped needs limits.workspace.chain, the arm's kinematics")
    chain = {frame.joint for frame in robot.limits.workspace.frames}
    others = [name for name in robot.controllers[0].joints if name not in chain]
    if others and not ros.gripper:
        raise ValueError(f".ros.gripper: a twist does not move {others}; name the topic that takes their positions")


def _check_lead(robot: Robot, *, given: bool) -> None:
    """Where points are sent ahead: far enough. ``given``: in the file, which has an effect only there."""
    if given and not robot.lead_s:
        raise ValueError(
            f".limits.command_lead: no controller of this robot takes points with their times, so it has no effect; "
            f"remove it, or use a ros.command_type that does: {' or '.join(_TIMED)}"
        )
    goals = any(controller.command_type == "follow_joint_trajectory" for controller in robot.controllers)
    dt, more = 1.0 / robot.limits.command_hz, TICKS_PER_GOAL - 1 if goals else 0
    least_s = max(MIN_LEAD_TICKS * dt, MIN_LEAD_S) + more * dt
    if robot.lead_s and robot.lead_s < least_s - 1e-9:
        of_goals = f", and {more} ticks more for follow_joint_trajectory" if goals else ""
        raise ValueError(
            f".limits.command_lead: {1000 * robot.lead_s:g} ms are too few, late and lost messages would break limits; "
            f"set it to {1000 * least_s:g} ms at least ({MIN_LEAD_TICKS} ticks, and {1000 * MIN_LEAD_S:g} ms{of_goals})"
        )


def _check_controllers(robot: Robot) -> None:
    """Every joint has one controller that can move it."""
    units, seen = {axis.name: axis.unit for axis in robot.limits.axes}, set[str]()
    topics = set[str]()
    for i, controller in enumerate(robot.controllers):
        where = f".ros.more_controllers[{i - 1}]" if i else ".ros"
        for name in controller.joints:
            check_choice(name, units, f"{where}.joints")
            if name in seen:
                raise ValueError(f"{where}.joints: {name!r} has a controller already")
            seen.add(name)
        if not controller.joints:
            raise ValueError(f"{where}: no joint is left for {controller.command}")
        if controller.command in topics:
            raise ValueError(f"{where}.command: {controller.command} is that of another controller")
        topics.add(controller.command)
        if i and controller.command_type == "twist_stamped":
            raise ValueError(f"{where}.command_type: twist_stamped is for the first arm; use joint_jog")
        if controller.command_type in _BASES:
            _check_base(robot, controller, where, [units[name] for name in controller.joints])
        elif controller.odometry:
            raise ValueError(f"{where}.odometry: {controller.command_type} moves joints, which have joint_states")


def _check_base(robot: Robot, controller: Controller, where: str, units: Sequence[str]) -> None:
    try:
        check_base(controller.joints, units)
    except ValueError as error:
        raise ValueError(f"{where}.joints: {error}") from error
    if robot.limits.contact is not None:
        raise ValueError(f".limits.contact: it would not count the speed of the base ({', '.join(controller.joints)})")
    if controller.odometry and controller.joint_states:
        raise ValueError(f"{where}: odometry or joint_states, not both")


def _with_bases(robot: Robot, joints: Mapping[str, Any]) -> RobotLimits:
    """The limits, with joints of a base as such: at rest too they may be ``step_from_measured`` from where they were
    sent, unless the file gives a ``hold_tolerance``.
    """
    bases = {name for one in robot.controllers if one.command_type in _BASES for name in one.joints}
    axes = []
    for axis in robot.limits.axes:
        if axis.name in bases:
            given = "hold_tolerance" in joints[axis.name]
            tolerance = axis.hold_tolerance if given else axis.step_from_measured
            axis = dataclasses.replace(axis, hold_tolerance=tolerance, drives=True)
        axes.append(axis)
    return dataclasses.replace(robot.limits, axes=tuple(axes))


def _section(kind: type[T], table: Any, where: str) -> T:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    required = {
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    check_table(table, where, required=required, optional=set(fields) - required)
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
        "float": isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and isfinite(value),
        "Sequence[str]": isinstance(value, list) and all(isinstance(v, str) for v in value),
        "Mapping[str, str]": isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values()),
    }[annotation]
    if not good:
        expected = "float, finite and above zero" if annotation == "float" else annotation
        raise ValueError(f"{where}: got {value!r}, expected {expected}")
