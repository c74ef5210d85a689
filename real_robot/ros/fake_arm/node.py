"""A simulated Panda: tabletop physics behind the ROS topics of a real one, with faults on request.

Publishes ``/joint_states`` at 500 Hz and two cameras, follows ``joint_trajectory_controller/joint_trajectory`` like
ros2_control's controller (``trajectory.py``). ``~/reset`` begins the episode of the parameters ``task`` and ``seed``;
``~/instruction`` publishes its
instruction, ``~/success`` and ``~/failure`` whether the task, or something else, was done. The parameters
``joint_fault`` and ``camera_fault`` corrupt what is published.
"""

from __future__ import annotations

import signal
import threading
import time
from itertools import pairwise

import numpy as np
import rclpy
from builtin_interfaces.msg import Time
from numpy.typing import NDArray
from rcl_interfaces.msg import ParameterDescriptor
from rclpy.context import Context
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from real_robot.control.trajectory import Trajectory
from real_robot.priority import take_priority
from real_robot.ros.fake_arm import cameras
from real_robot.ros.fake_arm.cameras import SharedState, start_cameras
from real_robot.ros.fake_arm.physics import JOINT_HZ, JOINTS, TabletopArm
from real_robot.ros.messages import LATCHED_QOS, LatestMessage
from sims.tabletop.tasks.registry import TASKS

CAMERA_HZ = 30
PRIORITY = 80
MAX_BEHIND_S = 1.0  # time that the physics makes up for
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
    "split",
)


class FakeArm(Node):
    """ROS side of the arm. ``run`` is its real-time loop; services and timers come from an executor in another
    thread."""

    def __init__(self, context: Context | None = None) -> None:
        super().__init__("fake_arm", context=context)
        self.declare_parameter("task", "pick", ParameterDescriptor(description=f"one of {list(TASKS)}"))
        self.declare_parameter("seed", 0)
        self.declare_parameter("image_height", 480)
        self.declare_parameter("image_width", 640)
        self.declare_parameter("camera_hz", CAMERA_HZ)
        self.declare_parameter("joint_fault", "none", ParameterDescriptor(description=f"one of {JOINT_FAULTS}"))
        self.declare_parameter("camera_fault", "none", ParameterDescriptor(description=f"one of {cameras.FAULTS}"))
        self._states = self.create_publisher(JointState, "/joint_states", QoSProfile(depth=10))
        self._outcome = [self.create_publisher(Bool, f"~/{name}", LATCHED_QOS) for name in ("success", "failure")]
        self._instruction = self.create_publisher(String, "~/instruction", LATCHED_QOS)
        topic = "/joint_trajectory_controller/joint_trajectory"
        self._trajectories = LatestMessage(self, JointTrajectory, topic, qos=QoSProfile(depth=1))
        self._service = self.create_service(Trigger, "~/reset", self._on_reset)
        self._timer = self.create_timer(0.05, self._check_success)
        self._simulated_s = 0.0  # time of the physics, on the clock of this node
        self._lock = threading.Lock()
        self.arm = TabletopArm()
        self._shared = SharedState()
        self._held: list[JointState] = []
        self.ending = threading.Event()
        self._begin_episode()

    def run(self) -> None:
        """Joint states on absolute 2 ms ticks until ``ending``; ticks for which this process was too late are left
        out."""
        due_s, tick = time.monotonic(), 0
        while not self.ending.is_set():
            due_s = max(due_s + 1.0 / JOINT_HZ, time.monotonic() - 1.0 / JOINT_HZ)
            time.sleep(max(0.0, due_s - time.monotonic()))
            with self._lock:
                self.advance()
                joints, speeds, measured_s = self.arm.joints, self.arm.speeds, self._simulated_s
                if tick % 8 == 0:
                    fault = str(self.get_parameter("camera_fault").value)
                    self._shared.write(self.arm.task, self.arm.seed, self.arm.qpos, fault)
            tick += 1
            self._publish_joints(joints, speeds, measured_s, tick)

    def advance(self) -> None:
        """Physics up to now along the newest trajectory: an arm goes on while this process waits for a processor."""
        for message in self._trajectories.take_new():
            self._follow(message)
        now_s = self._now_s()
        if not 0.0 <= now_s - self._simulated_s < MAX_BEHIND_S:
            self._simulated_s = now_s
        while self._simulated_s + 1.0 / JOINT_HZ <= now_s:
            self._simulated_s += 1.0 / JOINT_HZ
            position, speed, _ = self._trajectory.sample(self._simulated_s)
            self.arm.drive(position, speed)
            self.arm.step()

    def start_cameras(self) -> None:
        height, width, hz = (
            int(self.get_parameter(n).value or 0) for n in ("image_height", "image_width", "camera_hz")
        )
        self.cameras = start_cameras(self._shared, (height, width), hz)

    def _check_success(self) -> None:
        with self._lock:
            qpos = self.arm.qpos
        self._publish_outcome(self.arm.outcome(qpos))

    def _begin_episode(self) -> None:
        task, seed = str(self.get_parameter("task").value), int(self.get_parameter("seed").value or 0)
        with self._lock:
            self.arm.begin(task, seed)
            self._simulated_s = self._now_s()
            self._trajectory = Trajectory(self.arm.joints, self._simulated_s)
        self._instruction.publish(String(data=self.arm.layout.instruction))
        self._publish_outcome((False, False))

    def _publish_outcome(self, outcome: tuple[bool, bool]) -> None:
        for publisher, done in zip(self._outcome, outcome, strict=True):
            publisher.publish(Bool(data=done))

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._begin_episode()
        response.success, response.message = True, self.arm.layout.instruction
        return response

    def _follow(self, message: JointTrajectory) -> None:
        """As joint_trajectory_controller: refused unless every joint is named and times strictly increase."""
        times = [p.time_from_start.sec + 1e-9 * p.time_from_start.nanosec for p in message.points]
        increasing = all(a < b for a, b in pairwise(times))
        stamp = message.header.stamp
        start_s = stamp.sec + 1e-9 * stamp.nanosec or self._now_s()
        if sorted(message.joint_names) != sorted(JOINTS) or not times or not increasing:
            self.get_logger().error("trajectory refused: wrong joints or times that do not increase")
            return
        if start_s + times[-1] < self._simulated_s:
            return  # it ends in the past
        order = [list(message.joint_names).index(name) for name in JOINTS]
        positions, speeds, accels = (
            np.array([getattr(point, name) for point in message.points])[:, order]
            if all(len(getattr(point, name)) for point in message.points)
            else None
            for name in ("positions", "velocities", "accelerations")
        )
        if positions is None or speeds is None:
            self.get_logger().error("trajectory refused: positions and velocities are needed")
            return
        self._trajectory.follow([start_s + t for t in times], positions, speeds, accels, self._simulated_s)

    def _now_s(self) -> float:
        """The controller's clock."""
        return float(self.get_clock().now().nanoseconds * 1e-9)

    def _publish_joints(
        self, joints: NDArray[np.float64], speeds: NDArray[np.float64], measured_s: float, tick: int
    ) -> None:
        fault = self.get_parameter("joint_fault").value
        message = JointState(name=list(JOINTS), position=joints.tolist(), velocity=speeds.tolist())
        message.header.stamp = Time(sec=int(measured_s), nanosec=int(measured_s % 1.0 * 1e9))
        if fault in ("old_clock", "future_clock"):
            shift_s = -10 if fault == "old_clock" else 10
            message.header.stamp = Time(sec=message.header.stamp.sec + shift_s, nanosec=message.header.stamp.nanosec)
        elif fault == "nan":
            message.position[3] = float("nan")
        elif fault == "beyond_limit":
            message.position[3] = 0.5
        elif fault == "renamed":
            message.name = [f"other_{name}" for name in JOINTS]
        elif fault == "shuffled":
            message.name, message.position = list(reversed(message.name)), list(reversed(message.position))
        for published in self._with_fault(fault, message, tick):
            self._states.publish(published)

    def _with_fault(self, fault: object, message: JointState, tick: int) -> list[JointState]:
        """The messages that are published in this tick."""
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
        if fault == "split":  # as arms whose gripper is another driver: two publishers share the topic
            arm = JointState(header=message.header, name=message.name[:7], position=message.position[:7])
            gripper = JointState(header=message.header, name=message.name[7:], position=message.position[7:])
            return [gripper, arm] if tick % 2 else [arm, gripper]
        repeats = {"silent": 0, "drop": int(tick % 10 == 0), "duplicate": 2, "flood": 8}
        return [message] * repeats.get(str(fault), 1)


def main(arguments: list[str] | None = None) -> int:
    """``vla-rl fake-arm``: until SIGINT or SIGTERM."""
    take_priority(PRIORITY)  # a real arm does not depend on the load of this computer
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
