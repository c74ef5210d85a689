"""Messages of every kind of output, and values from every kind of input."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from real_robot.control.embodiment import JointSteps
from real_robot.control.loop import Action, ControlLoop
from real_robot.control.thread import ControlThread
from real_robot.robot_file import Robot, load_robot
from real_robot.safety.commands import Measurement, PathPoint, SafeCommand
from tests.ros.cell import ROOT, Cell

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),  # of a parser that rclpy imports
]
ROBOT = load_robot(ROOT / "configs/robots/fake_arm.yaml")
READY = (0.0, -0.5, 0.0, -2.0, 0.0, 1.6, 0.8, 0.02)
SPEEDS = (0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -0.01)
OUT = SafeCommand(1, READY, SPEEDS, (0.0,) * 8, True, ())
PATH = [
    PathPoint(7.0, READY, SPEEDS, [1.0] * 8),
    PathPoint(7.01, [q + 0.001 for q in READY], [0.05] * 8, [0.5] * 8),
    PathPoint(7.03, [q + 0.0012 for q in READY], [0.0] * 8, [0.0] * 8),
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cell = Cell(tmp_path_factory.mktemp("io"), domain=20 + (os.getpid() + 20) % 80)
    with cell.environment():
        import rclpy

        context = rclpy.Context()
        rclpy.init(context=context)
        node = rclpy.create_node("io", context=context)
        yield node
        node.destroy_node()
        rclpy.shutdown(context=context)


def received(newest: Any, meanwhile: Callable[[], None], seconds: float = 20.0) -> Any:
    """The first message on a topic while ``meanwhile`` is done again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        meanwhile()
        time.sleep(0.02)
        if taken := newest.take():
            return taken[0]
    raise AssertionError(f"nothing on {newest.topic}")


def with_output(kind: str) -> Robot:
    ros = dataclasses.replace(
        ROBOT.ros,
        command=f"/{kind}",
        command_type=kind,
        command_frame="base",
        gripper="/gripper",  # type: ignore[arg-type]
    )
    return dataclasses.replace(ROBOT, ros=ros)


def test_a_trajectory_contains_its_stop(node: Any) -> None:
    from trajectory_msgs.msg import JointTrajectory

    from real_robot.ros.messages import LatestMessage
    from real_robot.ros.registry import build_output

    robot = with_output("joint_trajectory")
    output, topic = build_output(node, robot), LatestMessage(node, JointTrajectory, "/joint_trajectory")
    message = received(topic, lambda: output.send(OUT, PATH))
    assert list(message.joint_names) == [axis.name for axis in robot.limits.axes]
    assert list(message.points[0].positions) == list(READY)
    assert list(message.points[0].velocities) == list(SPEEDS)
    assert list(message.points[-1].velocities) == [0.0] * 8
    times = [point.time_from_start.nanosec for point in message.points]
    assert times == [0, 10_000_000, 30_000_000]
    assert list(message.points[0].accelerations) == [1.0] * 8
    # the time of the first point, 7 s on the monotonic clock, on the clock that the controller reads
    stamp_s = message.header.stamp.sec + 1e-9 * message.header.stamp.nanosec
    assert time.time() - stamp_s == pytest.approx(time.monotonic() - 7.0, abs=0.5)
    assert output.problem() == ""
    other = node.create_publisher(JointTrajectory, "/joint_trajectory", 1)
    deadline = time.monotonic() + 5.0
    while not output.problem() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert output.problem() == "1 other publishers on /joint_trajectory: only one node may move the arm"
    node.destroy_publisher(other)
    output.close()
    topic.close()


def test_positions_and_twists(node: Any) -> None:
    from geometry_msgs.msg import TwistStamped
    from std_msgs.msg import Float64MultiArray

    from real_robot.ros.messages import LatestMessage
    from real_robot.ros.registry import build_output
    from real_robot.safety.kinematics import EndEffectorPoint

    robot = with_output("float64_multi_array")
    output, topic = build_output(node, robot), LatestMessage(node, Float64MultiArray, "/float64_multi_array")
    assert list(received(topic, lambda: output.send(OUT, PATH)).data) == list(READY)
    output.close()

    robot = with_output("float64_velocities")
    output, topic = build_output(node, robot), LatestMessage(node, Float64MultiArray, "/float64_velocities")
    assert list(received(topic, lambda: output.send(OUT, PATH)).data) == list(SPEEDS)
    output.close()

    robot = with_output("twist_stamped")
    output = build_output(node, robot)
    twists, gripper = (
        LatestMessage(node, TwistStamped, "/twist_stamped"),
        LatestMessage(node, Float64MultiArray, "/gripper"),
    )
    message = received(twists, lambda: output.send(OUT, PATH))
    assert message.header.frame_id == "base"
    assert message.header.stamp.sec > 0
    box = robot.limits.workspace
    assert box is not None
    x, y, _ = EndEffectorPoint(box.frames, box.end_effector, robot.limits.axes)(READY)
    # joint 1 turns about the vertical axis through the base
    linear, angular = message.twist.linear, message.twist.angular
    np.testing.assert_allclose([linear.x, linear.y, linear.z], [-0.1 * y, 0.1 * x, 0.0], atol=1e-9)
    np.testing.assert_allclose([angular.x, angular.y, angular.z], [0.0, 0.0, 0.1], atol=1e-9)
    assert list(received(gripper, lambda: output.send(OUT, PATH)).data) == [READY[7]]
    output.close()


class Swinging:
    """An arm that is where it was sent, and a source of actions that moves its first and its last joint but one."""

    def __init__(self, robot: Robot, start: Sequence[float]) -> None:
        self.problem = self.error = ""
        self._start = list(start)
        self._moves = np.zeros(len(start), dtype=np.float32)
        self._moves[[0, -2]] = 1.0
        embodiment = JointSteps(((-1.0, 1.0),) * len(start), (0.02,) * len(start))
        self.loop = ControlLoop(robot.limits, control_hz=20.0, embodiment=embodiment, source=self, lead_s=robot.lead_s)

    def measure(self) -> Measurement:
        if self.error:
            raise RuntimeError(self.error)
        now_s = time.monotonic()
        return Measurement(self.loop.filter.sent_position(now_s) if self.loop.live else self._start, now_s)

    def fresh(self, max_age_s: float) -> bool:
        return True

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        return Action(np.sin(0.3 * tick) * self._moves, measured.stamp_s)

    def executed(self, tick: int, action: np.ndarray) -> None: ...

    def clear(self) -> None: ...


def with_velocities(node: Any, kind: str) -> tuple[Robot, Sequence[float], Any]:
    """A robot with an output of this kind (the base is beside arms whose controllers take times), where it stands, and
    what arrives on the topic."""
    from geometry_msgs.msg import Twist, TwistStamped
    from std_msgs.msg import Float64MultiArray

    from real_robot.ros.messages import LatestMessage

    robot, start = with_output(kind), list(READY)
    if kind == "base_twist":
        robot, start = load_robot(ROOT / "configs/robots/two_arms_on_base.yaml"), [0.0] * 7
    types = {"float64_velocities": Float64MultiArray, "twist_stamped": TwistStamped, "base_twist": Twist}
    return robot, start, LatestMessage(node, types[kind], robot.controllers[-1].command)


def speed_of(message: Any) -> float:
    """The highest velocity in a message."""
    if hasattr(message, "data"):
        return max(abs(v) for v in message.data)
    twist = getattr(message, "twist", message)
    return max(abs(getattr(vector, axis)) for vector in (twist.linear, twist.angular) for axis in "xyz")


def wait_for_speed(topic: Any, good: Callable[[float], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + 20.0
    while (taken := topic.take()) is None or not good(speed_of(taken[0])):
        assert time.monotonic() < deadline
        meanwhile()
        time.sleep(0.005)


VELOCITIES = ["float64_velocities", "twist_stamped", "base_twist"]


@pytest.mark.parametrize("end", ["pause", "stop", "error"])
@pytest.mark.parametrize("kind", VELOCITIES)
def test_the_last_velocity_that_is_sent_is_zero(node: Any, kind: str, end: str) -> None:
    from real_robot.ros.registry import build_output

    robot, start, topic = with_velocities(node, kind)
    output, arm = build_output(node, robot), Swinging(robot, start)
    control = ControlThread(arm.loop, arm, output)
    control.start()
    wait_for_speed(topic, lambda speed: speed > 0.02)
    if end == "error":
        arm.error = "no such joint"
        wait_until(lambda: not control.running)
    else:
        control.rest() if end == "pause" else control.stop("test")
        wait_until(lambda: not control.loop.live)
    time.sleep(0.2)
    assert speed_of(topic.take()[0]) == 0.0
    control.brake()
    output.close()
    topic.close()


@pytest.mark.parametrize("kind", VELOCITIES)
def test_an_output_of_velocities_is_closed_with_zero(node: Any, kind: str) -> None:
    from real_robot.ros.registry import build_output

    robot, start, topic = with_velocities(node, kind)
    output, speeds = build_output(node, robot), [0.1] * len(start)
    moving = SafeCommand(1, tuple(start), tuple(speeds), (0.0,) * len(start), True, ())
    path = [PathPoint(time.monotonic(), start, speeds, [0.0] * len(start))]
    wait_for_speed(topic, lambda speed: speed > 0.0, lambda: output.send(moving, path))
    output.close()
    wait_for_speed(topic, lambda speed: speed == 0.0)
    topic.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_connection_that_drove_nothing_is_closed(node: Any) -> None:
    from real_robot.ros.connection import RobotConnection

    connection = RobotConnection(ROBOT, name="unused")
    connection.close()
    assert not connection.node.context.ok()


@pytest.mark.skipif(find_spec("control_msgs") is not None, reason="this Python has control_msgs")
@pytest.mark.parametrize("kind", ["joint_jog", "follow_joint_trajectory"])
def test_an_output_names_its_missing_ros_package(node: Any, kind: str) -> None:
    from real_robot.ros.registry import build_output

    robot = with_output(kind)
    with pytest.raises(ValueError, match="control_msgs; on a ROS 2 machine: apt install"):
        build_output(node, robot)


@pytest.mark.parametrize("text", ["put the lid on the pot's rim", 'say "stop": {now} # here', "5", ""])
def test_texts_with_quotes_reach_the_node_unchanged(text: str) -> None:
    """As the launch file and ``vla-rl deploy`` pass them."""
    import rclpy

    from real_robot.ros.commands import ros_arguments

    context = rclpy.Context()
    rclpy.init(context=context, args=ros_arguments({"instruction": text, "store": Path("/tmp/an operator's store")}))
    node = rclpy.create_node("quoted", context=context)
    for name, wanted in (("instruction", text), ("store", "/tmp/an operator's store")):
        assert node.declare_parameter(name, "unset").value == wanted
    node.destroy_node()
    rclpy.shutdown(context=context)


def test_an_episode_of_the_node_has_a_seed_of_its_own_unless_one_is_set() -> None:
    import rclpy
    from rclpy.parameter import Parameter

    from real_robot.ros.node import PolicyNode

    rclpy.init(args=[])
    try:
        policy = PolicyNode()
        policy.set_parameters([Parameter("instruction", value="pick up the red block")])
        assert len({policy._episode().seed for _ in range(3)}) == 3
        policy.set_parameters([Parameter("seed", value=7)])
        assert policy._episode().seed == 7
        policy.destroy_node()
    finally:
        rclpy.shutdown()


def test_the_fake_arm_makes_up_for_time_without_a_processor(node: Any) -> None:
    from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

    from real_robot.ros.fake_arm.node import FakeArm
    from real_robot.ros.fake_arm.physics import JOINTS

    arm = FakeArm(node.context)
    publisher = node.create_publisher(JointTrajectory, "/joint_trajectory_controller/joint_trajectory", 1)
    arm.advance()
    begin, end = arm.arm.joints.copy(), arm.arm.joints.copy()
    end[5] += 0.5
    message = JointTrajectory(joint_names=list(JOINTS))
    for seconds, joints in ((0.1, begin), (0.5, end)):
        point = JointTrajectoryPoint(positions=joints.tolist(), velocities=[0.0] * 8)
        point.time_from_start.nanosec = int(seconds * 1e9)
        message.points.append(point)
    deadline = time.monotonic() + 20.0
    while abs(arm.arm.joints - begin).max() < 0.01 and time.monotonic() < deadline:
        publisher.publish(message)
        time.sleep(0.15)
        arm.advance()
    time.sleep(0.6)
    arm.advance()
    assert arm.arm.joints == pytest.approx(end, abs=0.02)
    arm.destroy_node()
    node.destroy_publisher(publisher)


def test_frames_as_tf_publishes_them(node: Any) -> None:
    from geometry_msgs.msg import TransformStamped

    from real_robot.ros.frame_input import FrameInput, add_transforms
    from real_robot.ros.frames import FrameTree

    arm, hand = TransformStamped(child_frame_id="arm"), TransformStamped(child_frame_id="hand")
    arm.header.frame_id, hand.header.frame_id = "base", "arm"
    arm.transform.translation.x, hand.transform.translation.x = 1.0, 0.5
    arm.transform.rotation.z = arm.transform.rotation.w = 0.5**0.5  # a quarter turn to the left
    tree = FrameTree()
    add_transforms(tree, [hand, arm])
    np.testing.assert_allclose(tree.position("hand", "base"), (1.0, 0.5, 0.0), atol=1e-9)
    if find_spec("tf2_msgs") is None:
        with pytest.raises(ValueError, match="end_effector_frame needs TFMessage of the ROS package tf2_msgs"):
            FrameInput(node)


def test_joints_by_name_with_external_torques_that_must_stay_fresh(node: Any) -> None:
    from sensor_msgs.msg import JointState

    from real_robot.ros.inputs import RESIDUAL_AGE_S, JointInput

    ros = dataclasses.replace(ROBOT.ros, joint_states="/states", residuals="/torques")
    axes = tuple(dataclasses.replace(axis, name=name) for axis, name in zip(ROBOT.limits.axes, "ab", strict=False))
    limits = dataclasses.replace(ROBOT.limits, axes=axes)
    joints = JointInput(node, dataclasses.replace(ROBOT, ros=ros, limits=limits))
    states, torques = node.create_publisher(JointState, "/states", 1), node.create_publisher(JointState, "/torques", 1)

    def speak(*, torque: bool) -> None:
        message = JointState(name=["b", "a", "c"], position=[2.0, 1.0, 3.0])
        message.header.stamp = node.get_clock().now().to_msg()
        states.publish(message)
        if torque:
            torques.publish(JointState(name=["b"], effort=[7.0]))
        time.sleep(0.02)

    deadline = time.monotonic() + 20.0
    measured = None
    while (measured is None or measured.residuals is None) and time.monotonic() < deadline:
        speak(torque=True)
        measured = joints.measure()
    assert measured is not None
    assert list(measured.positions) == [1.0, 2.0]
    assert measured.residuals is not None
    assert np.isnan(measured.residuals[0])
    assert measured.residuals[1] == 7.0
    assert 0.0 <= time.monotonic() - measured.stamp_s < 5.0
    until = time.monotonic() + RESIDUAL_AGE_S + 0.1
    while time.monotonic() < until:
        speak(torque=False)
        measured = joints.measure()
    assert measured is not None
    assert measured.residuals is None
    assert not joints.fresh(5.0)
    assert joints.problem == "nothing received on /torques"
    joints.close()


def test_messages_that_two_threads_take_stay_in_order(node: Any) -> None:
    """As the control thread and whoever starts, records or shows the arm take them."""
    from sensor_msgs.msg import JointState

    from real_robot.ros.inputs import JointInput

    ros = dataclasses.replace(ROBOT.ros, joint_states="/shared/states", residuals=None)
    joints = JointInput(node, dataclasses.replace(ROBOT, ros=ros))
    states = node.create_publisher(JointState, "/shared/states", 1)
    names, problems, published = [axis.name for axis in ROBOT.limits.axes], set[str](), threading.Event()

    def take() -> None:
        while not published.is_set():
            if joints.measure() is not None:
                problems.add(joints.problem)

    threads, interval_s = [threading.Thread(target=take) for _ in range(2)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            message = JointState(name=names, position=[0.0] * len(names))
            message.header.stamp = node.get_clock().now().to_msg()
            states.publish(message)
    finally:
        published.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval_s)
        joints.close()
    assert problems == {""}


def test_a_message_is_as_old_as_its_receipt_however_late_it_is_taken(node: Any) -> None:
    """As after a break between episodes, in which nobody polls."""
    from sensor_msgs.msg import JointState
    from std_msgs.msg import Bool

    from real_robot.control.human_source import INPUT_AGE_S
    from real_robot.ros.inputs import STOP_INPUT_AGE_S, JointInput, StopInputs
    from real_robot.ros.leader import LeaderTopic
    from real_robot.ros.messages import LatestMessage

    ros = dataclasses.replace(ROBOT.ros, residuals="/idle/torques", emergency_stop="/idle/stop")
    embodiment = JointSteps(((-1.0, 1.0),), (0.1,))
    stops, leader = StopInputs(node, ros), LeaderTopic(node, "/idle/leader", ["a"], embodiment)
    joints = JointInput(node, dataclasses.replace(ROBOT, ros=ros))
    messages = {
        "/idle/stop": Bool(),
        "/idle/leader": JointState(name=["a"], position=[0.5]),
        "/idle/torques": JointState(name=["a"], effort=[7.0]),
    }
    probes = [LatestMessage(node, type(message), topic) for topic, message in messages.items()]
    publishers = [node.create_publisher(type(message), topic, 1) for topic, message in messages.items()]

    def speak() -> None:
        for publisher, message in zip(publishers, messages.values(), strict=True):
            publisher.publish(message)
        time.sleep(0.02)

    deadline = time.monotonic() + 20.0
    while not all(probe.take() for probe in probes):
        assert time.monotonic() < deadline
        speak()
    for _ in range(20):
        speak()
    assert stops.problem() == ""
    assert leader.action([0.0]) is not None
    assert joints._external_torques() is not None
    for _ in range(20):
        speak()
    time.sleep(0.1 + max(STOP_INPUT_AGE_S, INPUT_AGE_S))
    assert stops.problem() == "the emergency stop on /idle/stop is silent"
    assert leader.action([0.0]) is None
    assert joints._external_torques() is None
    for polled in (stops, joints, leader._topic, *probes):
        polled.close()
    for publisher in publishers:
        node.destroy_publisher(publisher)


def test_an_arm_is_not_moved_in_simulated_time(node: Any) -> None:
    from rclpy.parameter import Parameter

    from real_robot.ros.inputs import StopInputs

    stops = StopInputs(node, load_robot(ROOT / "configs/robots/fake_arm.yaml").ros)
    assert stops.problem() == ""
    for simulated in (True, False):
        node.set_parameters([Parameter("use_sim_time", value=simulated)])
        assert ("use_sim_time is true: limits and ages are in real seconds" in stops.problem()) == simulated
    stops.close()


def test_images_of_every_encoding_in_the_size_the_policy_wants(node: Any) -> None:
    import io

    from PIL import Image as PILImage
    from sensor_msgs.msg import CompressedImage, Image

    from real_robot.images import UnreadableImages
    from real_robot.ros.inputs import CameraInput, image_array

    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:, :, 0], pixels[:, :, 2] = 200, 40
    file = io.BytesIO()
    PILImage.fromarray(pixels).save(file, format="png")
    packed = CompressedImage(format="png")
    packed.data.frombytes(file.getvalue())
    padded = Image(height=48, width=64, encoding="bgr8", step=3 * 64 + 8)
    padded.data.frombytes(np.pad(pixels[..., ::-1].reshape(48, -1), ((0, 0), (0, 8))).tobytes())
    for message in (packed, padded):
        assert (image_array(message) == pixels).all()
    with_alpha = Image(height=48, width=64, encoding="bgra8", step=4 * 64)
    with_alpha.data.frombytes(np.dstack([pixels[..., ::-1], pixels[..., :1]]).tobytes())
    assert (image_array(with_alpha) == pixels).all()
    gray = Image(height=2, width=2, encoding="mono8", step=2)
    gray.data.frombytes(bytes([1, 2, 3, 4]))
    assert image_array(gray)[..., 1].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="encoding '16UC1' is not supported"):
        image_array(Image(height=1, width=1, encoding="16UC1", step=2))
    with pytest.raises(ValueError, match="an image of 64 x 48, bgr8, has 0 bytes in lines of 192"):
        image_array(Image(height=48, width=64, encoding="bgr8", step=192))
    with pytest.raises(OSError, match="cannot identify image file"):
        image_array(CompressedImage(format="jpeg"))

    before_s = time.monotonic()
    images, taken_s = CameraInput(node, {}).images((0, 0))  # of a robot without cameras: seen now
    assert images == {}
    assert before_s <= taken_s <= time.monotonic()

    cameras = CameraInput(node, {"left": "/left/compressed", "right": "/right"})
    left = node.create_publisher(CompressedImage, "/left/compressed", 1)
    right = node.create_publisher(Image, "/right", 1)
    assert cameras.images((24, 24)) is None
    deadline, seen = time.monotonic() + 20.0, None
    while seen is None and time.monotonic() < deadline:
        packed.header.stamp = padded.header.stamp = node.get_clock().now().to_msg()
        left.publish(packed)
        right.publish(padded)
        time.sleep(0.02)
        seen = cameras.images((24, 24))
    assert seen is not None
    assert (seen[0]["left"] == pixels[:24, :24]).all()
    assert (seen[0]["right"] == pixels[:24, :24]).all()
    assert time.monotonic() - seen[1] < 5.0
    damaged = CompressedImage(header=packed.header, format="jpeg")

    def arrived() -> bool:
        left.publish(damaged)
        newest = cameras.newest()
        return newest is not None and not newest[0]["left"].data

    wait_until(arrived)
    with pytest.raises(UnreadableImages, match="an image cannot be read: cannot identify image file"):
        cameras.images((24, 24))
    cameras.close()
