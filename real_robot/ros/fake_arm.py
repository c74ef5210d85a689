"""A Panda that is not there: tabletop physics behind the ROS topics of a real one, with faults on request.

Publishes ``/joint_states`` at 500 Hz and two cameras, follows ``joint_trajectory_controller/joint_trajectory`` the way
ros2_control's controller does (cubic splines through positions and velocities, new trajectories replace old ones, hold
at the end). ``~/reset`` begins the episode named by the parameters ``task`` and ``seed``; ``~/instruction`` says what
is asked, ``~/success`` and ``~/failure`` whether that, or something else, was done. ``joint_fault`` and
``camera_fault`` spoil what is published.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence

import mujoco
import numpy as np
import rclpy
import torch
from builtin_interfaces.msg import Time
from numpy.typing import NDArray
from rcl_interfaces.msg import ParameterDescriptor
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from real_robot.priority import take_priority
from real_robot.ros import fake_cameras
from real_robot.ros.fake_cameras import Scenery, begin_episode, start_cameras
from real_robot.ros.ros_io import LATCHED_QOS
from sims.tabletop.kinematics import Panda
from sims.tabletop.layout import ARM, BLOCK_QPOS, DRAWER_QPOS, FINGERS, PEG_QPOS
from sims.tabletop.scene import BLOCKS, LAG_S, MOCAP, build_mjcf
from sims.tabletop.tasks import TASKS, SceneState, check_task

JOINT_HZ = 500
CAMERA_HZ = 30
PRIORITY = 80
NAMES = (*(f"joint{i}" for i in range(1, 8)), "finger")
JOINT_FAULTS = (
    "none",
    "silent",
    "frozen",
    "drop",
    "delay",
    "reorder",
    "duplicate",
    "nan",
    "shuffled",
    "old_clock",
    "future_clock",
    "renamed",
    "beyond_limit",
    "flood",
)


class Trajectory:
    """Cubic Hermite splines through timed points; holds the last one at rest."""

    def __init__(self, start: NDArray[np.float64], speed: NDArray[np.float64], now_s: float) -> None:
        self.times = np.array([now_s])
        self.positions, self.speeds = start[None], speed[None]

    def follow(
        self, times: Sequence[float], positions: NDArray[np.float64], speeds: NDArray[np.float64], now_s: float
    ) -> None:
        """From where the old trajectory is now, through these points."""
        here, speed = self.sample(now_s)
        self.positions = np.concatenate([here[None], positions])
        self.speeds = np.concatenate([speed[None], speeds])
        self.times = np.concatenate([[now_s], now_s + np.asarray(times)])

    def sample(self, now_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Position and speed of every joint at ``now_s``."""
        k = int(np.searchsorted(self.times, now_s, side="right")) - 1
        if k < 0 or k >= len(self.times) - 1:
            return self.positions[-1], np.zeros_like(self.speeds[-1])
        h = self.times[k + 1] - self.times[k]
        s = (now_s - self.times[k]) / h
        p, q, v, w = self.positions[k], self.positions[k + 1], self.speeds[k] * h, self.speeds[k + 1] * h
        position = p + s * (v + s * (3 * (q - p) - 2 * v - w + s * (2 * (p - q) + v + w)))
        speed = (v + s * (2 * (3 * (q - p) - 2 * v - w) + s * 3 * (2 * (p - q) + v + w))) / h
        return position, speed


class TabletopArm:
    """One row of the tabletop suite in steps of 2 ms, driven by joint positions."""

    def __init__(self) -> None:
        self._model = mujoco.MjModel.from_xml_string(build_mjcf())
        self._model.opt.timestep = 1.0 / JOINT_HZ
        self._data = mujoco.MjData(self._model)
        self._panda = Panda()
        self.begin("pick", 0)

    def begin(self, task: str, seed: int) -> None:
        """The episode of (task, seed), as in the suite."""
        self.task, self.seed = task, seed
        self.episode = episode = begin_episode(task, seed)
        data = self._data
        mujoco.mj_resetData(self._model, data)
        data.qpos[:] = episode.qpos
        data.mocap_pos[: len(MOCAP)] = episode.fixtures
        for parked, name in zip(episode.parked, (*BLOCKS, "peg"), strict=True):
            body = self._model.body(name)
            data.xfrc_applied[body.id, 2] = parked * body.mass[0] * -self._model.opt.gravity[2]
        self.drive(self.joints, np.zeros(8))

    @property
    def joints(self) -> NDArray[np.float64]:
        """Seven arm joints [rad] and one finger [m]."""
        return np.append(self._data.qpos[ARM], abs(self._data.qpos[FINGERS]).mean())

    @property
    def speeds(self) -> NDArray[np.float64]:
        return self._data.qvel[:8].copy()

    @property
    def qpos(self) -> NDArray[np.float64]:
        return self._data.qpos.copy()

    def drive(self, positions: NDArray[np.float64], speeds: NDArray[np.float64]) -> None:
        """Servo set points; the speed term cancels the servos' lag."""
        arm = positions[:7] + LAG_S * speeds[:7]
        self._data.ctrl[:] = [*arm, positions[7], positions[7]]

    def step(self) -> None:
        mujoco.mj_step(self._model, self._data)

    def outcome(self, positions: NDArray[np.float64]) -> tuple[bool, bool]:
        """Whether at these ``qpos`` what was asked for is done, and whether something else is done instead."""
        qpos = torch.from_numpy(positions)[None]
        position, rotation, _ = self._panda.forward(qpos[:, ARM])
        single = qpos.float()
        scene = SceneState(
            end_effector=position.float(),
            rotation=rotation.float(),
            fingers=single[:, FINGERS],
            blocks=single[:, BLOCK_QPOS].view(-1, 3, 7),
            peg=single[:, PEG_QPOS],
            drawers=single[:, DRAWER_QPOS],
            fixtures=torch.from_numpy(self.episode.fixtures)[None].float(),
        )
        candidate = torch.tensor([self.episode.candidate])
        success, ended = check_task(TASKS[self.episode.task.name], scene, candidate)
        return bool(success), bool(ended & ~success)


class FakeArm(Node):
    """The arm's ROS side. ``run`` is its real-time loop; callbacks come from an executor in another thread."""

    def __init__(self) -> None:
        super().__init__("fake_arm")
        self.declare_parameter("task", "pick", ParameterDescriptor(description=f"one of {list(TASKS)}"))
        self.declare_parameter("seed", 0)
        self.declare_parameter("image_height", 480)
        self.declare_parameter("image_width", 640)
        self.declare_parameter("camera_hz", CAMERA_HZ)
        self.declare_parameter("joint_fault", "none", ParameterDescriptor(description=f"one of {JOINT_FAULTS}"))
        self.declare_parameter("camera_fault", "none", ParameterDescriptor(description=f"one of {fake_cameras.FAULTS}"))
        self._states = self.create_publisher(JointState, "/joint_states", QoSProfile(depth=10))
        self._outcome = [self.create_publisher(Bool, f"~/{name}", LATCHED_QOS) for name in ("success", "failure")]
        self._instruction = self.create_publisher(String, "~/instruction", LATCHED_QOS)
        self._sub = self.create_subscription(
            JointTrajectory, "/joint_trajectory_controller/joint_trajectory", self._on_trajectory, 1
        )
        self._service = self.create_service(Trigger, "~/reset", self._on_reset)
        self._timer = self.create_timer(0.05, self._judge)
        self._lock = threading.Lock()
        self._arm = TabletopArm()
        self._scenery = Scenery()
        self._held: list[JointState] = []
        self.ending = threading.Event()
        self._begin()

    def run(self) -> None:
        """Physics and joint states on absolute 2 ms ticks until ``ending``."""
        due_s, tick = time.monotonic(), 0
        while not self.ending.is_set():
            due_s += 1.0 / JOINT_HZ
            time.sleep(max(0.0, due_s - time.monotonic()))
            if time.monotonic() - due_s > 0.1:
                due_s = time.monotonic()  # this machine cannot keep up: slow down rather than burst
            with self._lock:
                self._arm.drive(*self._trajectory.sample(time.monotonic()))
                self._arm.step()
                joints, speeds = self._arm.joints, self._arm.speeds
                if tick % 8 == 0:
                    fault = str(self.get_parameter("camera_fault").value)
                    self._scenery.show(self._arm.task, self._arm.seed, self._arm.qpos, fault)
            tick += 1
            self._publish_joints(joints, speeds, tick)

    def start_cameras(self) -> None:
        height, width, hz = (
            int(self.get_parameter(n).value or 0) for n in ("image_height", "image_width", "camera_hz")
        )
        self.cameras = start_cameras(self._scenery, (height, width), hz)

    def _judge(self) -> None:
        with self._lock:
            qpos = self._arm.qpos
        self._say(self._arm.outcome(qpos))

    def _begin(self) -> None:
        task, seed = str(self.get_parameter("task").value), int(self.get_parameter("seed").value or 0)
        with self._lock:
            self._arm.begin(task, seed)
            self._trajectory = Trajectory(self._arm.joints, np.zeros(8), time.monotonic())
        self._instruction.publish(String(data=self._arm.episode.instruction))
        self._say((False, False))

    def _say(self, outcome: tuple[bool, bool]) -> None:
        for publisher, done in zip(self._outcome, outcome, strict=True):
            publisher.publish(Bool(data=done))

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._begin()
        response.success, response.message = True, self._arm.episode.instruction
        return response

    def _on_trajectory(self, message: JointTrajectory) -> None:
        """As joint_trajectory_controller: every joint named, times strictly increasing, else the whole is refused."""
        times = [p.time_from_start.sec + 1e-9 * p.time_from_start.nanosec for p in message.points]
        increasing = all(a < b for a, b in zip([0.0, *times], times, strict=False))
        if sorted(message.joint_names) != sorted(NAMES) or not times or not increasing:
            self.get_logger().error("trajectory refused: wrong joints or times that do not increase")
            return
        order = [list(message.joint_names).index(name) for name in NAMES]
        positions = np.array([point.positions for point in message.points])[:, order]
        speeds = np.array([point.velocities for point in message.points])[:, order]
        with self._lock:
            self._trajectory.follow(times, positions, speeds, time.monotonic())

    def _publish_joints(self, joints: NDArray[np.float64], speeds: NDArray[np.float64], tick: int) -> None:
        fault = self.get_parameter("joint_fault").value
        message = JointState(name=list(NAMES), position=joints.tolist(), velocity=speeds.tolist())
        now = self.get_clock().now()
        message.header.stamp = now.to_msg()
        if fault in ("old_clock", "future_clock"):
            shift_s = -10 if fault == "old_clock" else 10
            message.header.stamp = Time(sec=message.header.stamp.sec + shift_s, nanosec=message.header.stamp.nanosec)
        elif fault == "nan":
            message.position[3] = float("nan")
        elif fault == "beyond_limit":
            message.position[3] = 0.5
        elif fault == "renamed":
            message.name = [f"other_{name}" for name in NAMES]
        elif fault == "shuffled":
            message.name, message.position = list(reversed(message.name)), list(reversed(message.position))
        for one in self._spoiled(fault, message, tick):
            self._states.publish(one)

    def _spoiled(self, fault: object, message: JointState, tick: int) -> list[JointState]:
        """What really goes out this tick."""
        if fault in ("delay", "reorder", "frozen"):
            self._held.append(message)
            if fault == "frozen":
                self._held = self._held[:1]
                return self._held
            if fault == "reorder":
                batch, self._held = (self._held[::-1], []) if len(self._held) == 5 else ([], self._held)
                return batch
            return [self._held.pop(0)] if len(self._held) > JOINT_HZ // 4 else []
        self._held = []
        repeats = {"silent": 0, "drop": int(tick % 10 == 0), "duplicate": 2, "flood": 8}
        return [message] * repeats.get(str(fault), 1)


def main(arguments: list[str] | None = None) -> int:
    """``vla-rl fake-arm``: until SIGINT or SIGTERM."""
    take_priority(PRIORITY)  # a real arm does not wait for a busy computer either
    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    arm = FakeArm()
    arm.start_cameras()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: arm.ending.set())
    executor = SingleThreadedExecutor()
    executor.add_node(arm)
    thread = threading.Thread(target=arm.run, daemon=True)
    thread.start()
    try:
        while not arm.ending.is_set():
            executor.spin_once(timeout_sec=0.1)
    except ExternalShutdownException:
        arm.ending.set()
    thread.join()
    arm.cameras.terminate()
    arm.cameras.join()
    executor.shutdown()
    arm.destroy_node()
    rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
