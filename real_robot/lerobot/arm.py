"""An arm that a LeRobot driver moves, behind the same safety filter as an arm on ROS. Needs no ROS.

The robot file has a section ``lerobot`` in place of ``ros``:

    lerobot:
      type: so101_follower              # as LeRobot or a package named lerobot_robot_... registers it
      config: {port: /dev/ttyACM0, id: my_arm, use_degrees: true}
      rate: 50 Hz                       # of reading and sending
      joints:                           # position of each joint where LeRobot's value is 0 and 100
        shoulder_pan: {key: shoulder_pan.pos, at_0: 0 deg, at_100: 100 deg}
        gripper: {key: gripper.pos, at_0: -0.17 rad, at_100: 1.75 rad}
      cameras: {wrist: wrist}           # the policy's name: LeRobot's

LeRobot's drivers take positions without times and are not thread-safe: one thread reads observations and sends where
the filtered motion is at that moment, interpolated as a trajectory controller does. If nothing new is sent it finishes
the stop. An error in that thread ends the commands; the arm's servos hold where they were sent last, abruptly. So they
do when the driver took so long in motion that the next position would be a jump: the stop latches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from episodes.formats.images import fit_image
from real_robot.control.loop import ControlLoop
from real_robot.control.thread import ControlThread
from real_robot.control.trajectory import Trajectory
from real_robot.images import reading_images
from real_robot.lerobot.devices import DeviceThread
from real_robot.robot_file import Robot, RobotError
from real_robot.safety.commands import Measurement, PathPoint, SafeCommand

# Between two positions of a motion: periods of the rate, and seconds if that is more (two frames of a camera at 30 Hz).
_LATE_PERIODS, _LATE_S = 3.0, 0.07
_STILL = 1e-3  # [rad or m] that is no jump
# After a motion that came too late nothing is taken before the control thread was silent for so long: it has then
# stopped, and begins anew from the measured position.
_SILENT_S = 0.25


class LeRobotArm(DeviceThread):
    """A LeRobot ``Robot`` as joints, controller and cameras of a control thread."""

    def __init__(self, driver: Any, robot: Robot) -> None:
        if robot.lerobot is None:
            raise RobotError("the robot file has no section 'lerobot'")
        super().__init__(driver, robot.lerobot, robot.limits.axes, section="lerobot")
        self._section = robot.lerobot
        self.problem, self.failure = "nothing was read yet", ""
        self._lock = threading.Lock()
        self._measured: Measurement | None = None
        self._images: tuple[dict[str, NDArray[np.uint8]], float] | None = None
        self._trajectory: Trajectory | None = None
        self._end_s = 0.0
        self._last, self._last_s = np.zeros(0), 0.0  # position that was sent last, and when
        self._late, self._late_until_s = "", 0.0

    def _missing(self) -> set[str]:
        return super()._missing() | (set(self._section.cameras.values()) - set(self._made.observation_features))

    # -- JointSource, CommandSink, Cameras -------------------------------------------------------------------------

    def measure(self) -> Measurement | None:
        return self._measured

    def fresh(self, max_age_s: float) -> bool:
        measured = self._measured
        if measured is None:
            return False
        age_s = time.monotonic() - measured.stamp_s
        self.problem = self.failure or ("" if age_s <= max_age_s else f"joints are {age_s:.2f} s old")
        return not self.problem

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        times = [point.time_s for point in path]
        positions, velocities, accelerations = (
            np.array([getattr(point, name) for point in path]) for name in PathPoint._fields[1:]
        )
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._late_until_s:
                self._late_until_s = now_s + _SILENT_S
                return
            if self._trajectory is None or self._has_ended(now_s):  # the arm may have been moved by hand since
                self._trajectory = Trajectory(positions[0], now_s)
                self._last, self._last_s = positions[0], now_s
            self._trajectory.follow(times, positions, velocities, accelerations, now_s)
            self._end_s = times[-1]

    def halt(self) -> None:
        """Nothing: what was sent ends in a stop."""

    def images(self, size: Sequence[int]) -> tuple[Mapping[str, NDArray[np.uint8]], float] | None:
        if self._images is None:
            return None
        images, taken_s = self._images
        with reading_images():
            return {name: fit_image(image, size).numpy() for name, image in images.items()}, taken_s

    def taken_s(self) -> float | None:
        """When the newest images were taken [s, monotonic]; None before the first."""
        return None if self._images is None else self._images[1]

    def thread_problem(self) -> str:
        """Why the driver's thread ended, or sent nothing more, or ""."""
        return self.failure or (self._late if time.monotonic() < self._late_until_s else "")

    # -- the driver's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            due_s = time.monotonic()
            while self._running:
                self._read()
                self._write()
                due_s = max(due_s + 1.0 / self._section.rate_hz, time.monotonic())
                time.sleep(max(0.0, due_s - time.monotonic()))
        except Exception as error:  # of a driver that is not ours; the control thread stops the arm and names it
            self.failure = f"the LeRobot driver failed: {type(error).__name__}: {error}"

    def _read(self) -> None:
        began_s = time.monotonic()
        observation = self._made.get_observation()
        self._measured = Measurement(self._units.positions(observation), began_s)
        images = {name: np.asarray(observation[key]) for name, key in self._section.cameras.items()}
        self._images = images, began_s

    def _write(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            if self._trajectory is None or self._has_ended(now_s):
                return
            positions = self._trajectory.sample(now_s)[0]
            gap_s = now_s - self._last_s
            if gap_s > max(_LATE_PERIODS / self._section.rate_hz, _LATE_S) and self._jumps(positions):
                self._late = f"the LeRobot driver took {gap_s:.2f} s in motion, in which nothing could be sent"
                self._late_until_s, self._trajectory = now_s + _SILENT_S, None
                return
            self._last, self._last_s = positions, now_s
        self._made.send_action(self._units.values(positions.tolist()))

    def _jumps(self, positions: NDArray[np.float64]) -> bool:
        return bool(np.abs(positions - self._last).max() > _STILL)

    def _has_ended(self, now_s: float) -> bool:
        """Whether the end of what was sent has reached the driver."""
        return now_s > self._end_s + 2.0 / self._section.rate_hz


class LeRobotConnection:
    """Joints, cameras and control thread of ``arm``, which is in its ``with`` block, as of an arm on ROS."""

    def __init__(self, arm: LeRobotArm, *, after_tick: Callable[[float], None] = lambda now_s: None) -> None:
        self.joints = self.cameras = self._arm = arm
        self._after_tick = after_tick
        self._control: ControlThread | None = None

    def connect(self, loop: ControlLoop) -> ControlThread:
        """The control thread drives ``loop`` when it is started."""
        arm = self._arm
        self._control = ControlThread(loop, arm, arm, after_tick=self._after_tick, checks=[arm.thread_problem])
        return self._control

    def problem(self) -> str:
        """Why the arm may not move, or ""."""
        return self._arm.thread_problem()

    def close(self) -> None:
        """Brake and hold."""
        if self._control is not None:
            self._control.brake()
