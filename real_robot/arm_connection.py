"""How an arm is connected, by ROS or by LeRobot's driver, as its robot file says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Protocol, runtime_checkable

from real_robot.control.loop import ControlLoop
from real_robot.control.protocols import Cameras, JointSource
from real_robot.control.thread import ControlThread
from real_robot.lerobot.arm import LeRobotArm, LeRobotConnection
from real_robot.lerobot.devices import make_driver
from real_robot.robot_file import Robot
from real_robot.ros.installation import require_ros


@runtime_checkable
class ArmConnection(Protocol):
    """Sensors and controller of an arm: ``real_robot.ros.connection``, ``real_robot.lerobot.arm``."""

    @property
    def joints(self) -> JointSource: ...

    @property
    def cameras(self) -> Cameras: ...

    def connect(self, loop: ControlLoop) -> ControlThread:
        """What drives ``loop`` when it is started."""
        ...

    def problem(self) -> str:
        """Why the arm may not move, or ""."""
        ...

    def close(self) -> None:
        """Brake, hold, and leave the arm."""
        ...


@contextmanager
def connected(
    robot: Robot, *, name: str, after_tick: Callable[[float], None] = lambda now_s: None
) -> Iterator[ArmConnection]:
    """The arm by ROS, as the node ``name``, or by LeRobot's driver, as its file says.

    Who connects a loop closes it before what that loop uses. ``after_tick``: as of ``ControlThread``. RobotError if ROS
    or the driver cannot be used.
    """
    if robot.lerobot is not None:
        with LeRobotArm(make_driver(robot.lerobot), robot) as arm:
            yield LeRobotConnection(arm, after_tick=after_tick)
        return
    require_ros()
    from real_robot.ros.connection import RobotConnection

    with closing(RobotConnection(robot, after_tick=after_tick, name=name)) as connection:
        yield connection
