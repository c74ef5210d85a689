"""``vla-rl robot``: check a robot file, ask the node of a robot, drive an arm by hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from real_robot.arm_connection import connected
from real_robot.control.human_source import Leader
from real_robot.lerobot.devices import make_teleoperator
from real_robot.lerobot.leader import LeRobotLeader
from real_robot.recorder import Recorder
from real_robot.robot_file import Robot, RobotError, read_robot
from real_robot.ros.installation import require_ros
from real_robot.teleop import TeleopSession, run_teleop
from sims.subproc.termination import terminable

LISTEN_S = 5.0
SERVICES = {"begin": ("begin_episode",), "stop": ("stop",), "resume": ("release", "resume"), "end": ("end_episode",)}


def check(path: Path, *, live: bool, images: Path | None = None) -> dict[str, Any]:
    """What the file says, in SI units; ``live``: ``problems`` of what is heard. RobotError if the file is wrong.

    ``images``: a folder for one image of each camera, with a cross where its calibration has the end effector.
    """
    robot = read_robot(path)
    stop_s = max(axis.velocity / axis.acceleration + axis.acceleration / axis.jerk for axis in robot.limits.axes)
    result: dict[str, Any] = {
        "file": str(path),
        "joints": {
            axis.name: f"{axis.position[0]:g} to {axis.position[1]:g} {axis.unit}, {axis.velocity:g} {axis.unit}/s, "
            f"{axis.acceleration:g} {axis.unit}/s^2, {axis.jerk:g} {axis.unit}/s^3"
            for axis in robot.limits.axes
        },
        "embodiment": _tried_embodiment(robot, path),
        "longest_stop_s": round(stop_s, 3),
        "workspace": None
        if robot.limits.workspace is None
        else [*robot.limits.workspace.low, *robot.limits.workspace.high],
        "command": ", ".join(f"{one.command} ({one.command_type})" for one in robot.controllers)
        + f", {robot.lead_s:g} s ahead"
        if robot.lerobot is None
        else f"LeRobot's {robot.lerobot.type} at {robot.lerobot.rate_hz:g} Hz",
        "leader": "none" if robot.leader is None else f"LeRobot's {robot.leader.type}",
        "collisions": None if robot.limits.collisions is None else f"{robot.limits.collisions.margin:g} m apart",
        "contact_speed": None
        if robot.limits.contact is None
        else f"{robot.limits.contact.max_speed_m_s:.3f} m/s, {robot.limits.contact.max_energy_j:.3f} J",
        "cameras": dict(robot.cameras),
        "calibrated": sorted(robot.calibration),
        "emergency_stop": robot.ros.emergency_stop or "none",
        "enabling_device": robot.ros.enabling_device or "none",
        "contact": [axis.name for axis in robot.limits.axes if axis.contact_residual is not None],
    }
    if live:
        result["problems"] = _listen(robot, images)
    return result


def _tried_embodiment(robot: Robot, path: Path) -> str:
    """What an action is, after one in the middle of the joints' ranges.

    RobotError if the embodiment does not fit the joints or lacks scales, which those of other distributions say only
    when they are made or used.
    """
    name, joints = robot.control.embodiment, [sum(axis.position) / 2 for axis in robot.limits.axes]
    where = f"{path}: control.embodiment: {name}"
    try:
        embodiment = robot.embodiment()
        embodiment.begin(joints)
        targets = embodiment.targets(np.zeros(embodiment.action_dim, dtype=np.float32), joints)
        state = embodiment.state(joints)
    except Exception as error:  # whatever a plugin raises
        raise RobotError(f"{where}: {error if isinstance(error, ValueError) else repr(error)}") from error
    if len(targets) != len(joints):
        raise RobotError(f"{where} gives {len(targets)} joint targets, the robot has {len(joints)} joints")
    if state.shape != (embodiment.state_dim,):
        raise RobotError(f"{where} gives a state of shape {state.shape}, its state_dim is {embodiment.state_dim}")
    return f"{name}, action_dim {embodiment.action_dim}, state_dim {embodiment.state_dim}"


def ask(verb: str, *, success: bool) -> dict[str, Any]:
    """``status``: the node's diagnostics; otherwise what it answered. RobotError if there is no node."""
    require_ros()
    from real_robot.ros.operator import Operator

    with closing(Operator()) as operator:
        if verb == "status":
            return operator.status()
        answers = [operator.call(name, data=success if name == "end_episode" else None) for name in SERVICES[verb]]
    refused = next((message for done, message in answers if not done), "")
    return {"refused": refused} if refused else {"done": answers[-1][1] or verb}


def drive(
    path: Path,
    *,
    leader: str,
    control_hz: float,
    store: Path | None = None,
    instruction: str = "",
    image_size: Sequence[int] = (128, 128),
) -> None:
    """A person drives the arm until the key 0. RobotError if the file or the robot cannot be used.

    Terminated, after the arm has braked, if SIGTERM, SIGHUP or SIGINT arrives.
    """
    robot = read_robot(path)
    options: dict[str, Any] = {"control_hz": control_hz, "image_size": image_size, "name": path.stem}
    try:
        with terminable(), teleop_session(robot, leader=leader, store=store, stream=sys.stdin, **options) as session:
            run_teleop(session, instruction, instruction)
    except ValueError as error:
        raise RobotError(str(error)) from error


@contextmanager
def teleop_session(robot: Robot, *, leader: str, store: Path | None, **options: Any) -> Iterator[TeleopSession]:
    """``leader``: the JointState topic of a leader arm; "": the file's section ``leader``, else the keyboard.

    ``store``: an episode store for what is driven; None: nothing is recorded. ``options``: of TeleopSession. RobotError
    or ValueError if the robot or its leader cannot be used.
    """
    axes = robot.limits.axes
    embodiment = robot.embodiment()
    if leader and robot.lerobot is not None:
        raise RobotError("--leader names a topic, which an arm without ROS has not; use the section 'leader'")
    with ExitStack() as stack:
        recorder = Recorder(store) if store else None
        if recorder is not None:
            stack.callback(recorder.join)
            stack.callback(recorder.close)
        device: Leader | None = None
        if robot.leader is not None and not leader:
            device = stack.enter_context(LeRobotLeader(make_teleoperator(robot.leader), robot.leader, axes, embodiment))
        connection = stack.enter_context(
            connected(robot, name="vla_rl_teleop", after_tick=lambda now_s: session.after_tick(now_s))
        )
        if leader:
            from real_robot.ros.connection import RobotConnection
            from real_robot.ros.leader import LeaderTopic

            assert isinstance(connection, RobotConnection)
            device = LeaderTopic(connection.node, leader, [axis.name for axis in axes], embodiment)
        session = TeleopSession(robot, connection, device, embodiment=embodiment, recorder=recorder, **options)
        stack.callback(session.close)
        yield session


def _listen(robot: Robot, images: Path | None) -> list[str]:
    """What is not heard within some seconds, or is not as the file says; ``images`` as in ``check``."""
    if robot.lerobot is not None:
        raise RobotError("--live listens to ROS topics; this robot file has a section 'lerobot' instead of 'ros'")
    require_ros()
    from real_robot.ros.operator import Listener

    with closing(Listener(robot)) as listener:
        deadline_s = time.monotonic() + LISTEN_S
        while (problems := listener.problems()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if images is not None and not problems:
            images.mkdir(parents=True, exist_ok=True)
            for name, image in listener.images().items():
                Image.fromarray(image).save(images / f"{name}.png")
        return problems
