"""An arm that a LeRobot driver moves, behind the same safety filter and policy server as an arm on ROS. Needs no ROS.

    python -m real_robot.lerobot_robot my_arm.yaml --url ws://127.0.0.1:8720 --instruction "pick up the block"

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
the stop. An error in that thread ends the commands; the arm's servos hold where they were sent last, abruptly.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pkgutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from real_robot.control.embodiment import Embodiment
from real_robot.control.loop import ActionSource, ControlLoop
from real_robot.control.registry import build_embodiment
from real_robot.control.thread import ControlThread
from real_robot.control.trajectory import Trajectory
from real_robot.images import fit_image
from real_robot.robot_file import LeRobotSection, Robot, RobotError, load_robot
from real_robot.safety.commands import Measurement, PathPoint, SafeCommand
from real_robot.serving.client import PolicyClient
from real_robot.serving.remote_policy import RemotePolicy


def make_driver(section: LeRobotSection) -> Any:
    """LeRobot's ``Robot`` of this section, not yet connected. RobotError if LeRobot or its type is missing."""
    try:
        import draccus
        from lerobot import robots
        from lerobot.utils.import_utils import register_third_party_plugins
    except ImportError as error:
        raise RobotError(f"LeRobot cannot be imported ({error}). Run: pip install lerobot==0.4.4") from error
    for module in pkgutil.iter_modules(robots.__path__, "lerobot.robots."):  # a type is known when it was imported
        with contextlib.suppress(ImportError):  # of another robot's driver, whose libraries are not installed
            importlib.import_module(module.name)
    register_third_party_plugins()
    try:
        config = draccus.decode(robots.RobotConfig, {"type": section.type, **section.config})
        return robots.make_robot_from_config(config)
    except (draccus.utils.DecodingError, ImportError, TypeError, ValueError) as error:
        raise RobotError(f"lerobot: LeRobot cannot make a {section.type!r} with these settings: {error}") from error


class LeRobotArm:
    """A LeRobot ``Robot`` as joints, controller and cameras of a control thread; use it as a context manager."""

    def __init__(self, driver: Any, robot: Robot) -> None:
        if robot.lerobot is None:
            raise RobotError("the robot file has no section 'lerobot'")
        self._driver, self._section = driver, robot.lerobot
        joints = [robot.lerobot.joints[axis.name] for axis in robot.limits.axes]
        self._keys = [joint.key for joint in joints]
        self._zero, self._scale = (np.array(v) for v in zip(*[(j.at_0, j.per_unit) for j in joints], strict=True))
        self.problem, self.failure = "nothing was read yet", ""
        self._lock = threading.Lock()
        self._measured: Measurement | None = None
        self._images: tuple[dict[str, NDArray[np.uint8]], float] | None = None
        self._trajectory: Trajectory | None = None
        self._end_s = 0.0
        self._running = True
        self._thread = threading.Thread(target=self._run, name="lerobot", daemon=True)

    def __enter__(self) -> LeRobotArm:
        self._driver.connect()
        missing = set(self._keys) - set(self._driver.action_features)
        missing |= set(self._section.cameras.values()) - set(self._driver.observation_features)
        if missing:
            self._driver.disconnect()
            raise RobotError(f"lerobot: {self._section.type} has no {sorted(missing)}")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = False
        self._thread.join()
        self._driver.disconnect()

    # -- JointSource, CommandSink, CameraSource --------------------------------------------------------------------

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
            if self._trajectory is None:
                self._trajectory = Trajectory(positions[0], time.monotonic())
            self._trajectory.follow(times, positions, velocities, accelerations, time.monotonic())
            self._end_s = times[-1]

    def images(self, size: Sequence[int]) -> tuple[Mapping[str, NDArray[np.uint8]], float] | None:
        if self._images is None:
            return None
        images, taken_s = self._images
        return {name: fit_image(image, size).numpy() for name, image in images.items()}, taken_s

    def thread_problem(self) -> str:
        """Why the driver's thread ended, or ""."""
        return self.failure

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
        observation = self._driver.get_observation()
        positions = self._zero + self._scale * [float(observation[key]) for key in self._keys]
        self._measured = Measurement(positions.tolist(), began_s)
        images = {name: np.asarray(observation[key]) for name, key in self._section.cameras.items()}
        self._images = images, began_s

    def _write(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            if self._trajectory is None or now_s > self._end_s + 2.0 / self._section.rate_hz:
                return
            positions = self._trajectory.sample(now_s)[0]
        values = ((positions - self._zero) / self._scale).tolist()
        self._driver.send_action(dict(zip(self._keys, values, strict=True)))


def control_thread(arm: LeRobotArm, robot: Robot, source: ActionSource, *, control_hz: float) -> ControlThread:
    """What drives ``arm`` through the safety filter. Its ``after_tick`` is the source's ``request_chunk``, if any."""
    loop = ControlLoop(
        robot.limits,
        control_hz=control_hz,
        embodiment=_embodiment(robot),
        source=source,
        lead_s=robot.limits.command_lead_s,
    )
    after_tick = source.request_chunk if isinstance(source, RemotePolicy) else lambda now_s: None
    return ControlThread(loop, arm, arm, after_tick=after_tick, checks=[arm.thread_problem])


def _embodiment(robot: Robot) -> Embodiment:
    return build_embodiment(robot.control.embodiment, robot.limits.axes, robot.control.scales)


def run_episode(arm: LeRobotArm, robot: Robot, client: PolicyClient, *, instruction: str, seconds: float) -> str:
    """One episode of the server's policy; returns why the arm stopped before its time, or "".

    RobotError if the server or the joints do not answer.
    """
    deadline = time.monotonic() + 10.0
    while client.hello is None or not arm.fresh(robot.limits.max_measurement_age_s):
        if time.monotonic() > deadline:
            raise RobotError(client.problem or arm.problem or "the policy server does not answer")
        time.sleep(0.01)
    hello, embodiment = client.hello, _embodiment(robot)
    policy = RemotePolicy(
        hello,
        robot.control.chunking,
        embodiment=embodiment,
        client=client,
        cameras=arm,
        max_image_age_s=robot.control.max_image_age_s,
    )
    control = control_thread(arm, robot, policy, control_hz=hello.control_hz)
    client.bind(hello.fingerprint)
    policy.begin_episode(instruction)
    control.start()
    end_s = time.monotonic() + seconds
    try:
        while time.monotonic() < end_s and not control.loop.filter.stopped:
            time.sleep(0.02)
    finally:
        control.brake()
        client.end_episode("unknown")
    return control.loop.filter.stopped or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--url", default="ws://127.0.0.1:8720")
    parser.add_argument("--token-file", type=Path, default=Path("~/.config/vla-rl/token"))
    parser.add_argument("--instruction", required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    robot = load_robot(options.file)
    if robot.lerobot is None:
        parser.error(f"{options.file}: no 'lerobot' section")
    client = PolicyClient(options.url, token=options.token_file.expanduser().read_text().strip())
    try:
        with LeRobotArm(make_driver(robot.lerobot), robot) as arm:
            reason = run_episode(arm, robot, client, instruction=options.instruction, seconds=options.seconds)
            print(reason or "the episode is over; the arm is at rest")
    finally:
        client.close()


if __name__ == "__main__":
    main()
