"""A person at a terminal, over real ROS topics: checking, asking the node, and driving the arm by a leader."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from episodes.schema import HUMAN
from episodes.store import EpisodeStore
from real_robot import teleop
from real_robot.operation import teleop_session
from real_robot.robot_file import Robot, load_robot
from tests.real_robot.test_calibration import write
from tests.ros.cell import ROOT, Cell, started_arm

if TYPE_CHECKING:
    from real_robot.teleop import TeleopSession

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),  # of a parser that rclpy imports
    pytest.mark.timeout(300),
]
FILE = ROOT / "configs/robots/fake_arm.yaml"


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    domain = 20 + (os.getpid() + 40) % 80
    with started_arm(tmp_path_factory.mktemp("operation"), domain) as cell:
        yield cell


def command(*arguments: str) -> tuple[int, dict[str, object]]:
    """``vla-rl robot``: exit code and JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "vla_rl.cli", "robot", *arguments, "--json"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


class Speaker:
    """Publishes what ``messages`` (topic -> message) holds at 100 Hz, from a node of its own, until ``close``."""

    def __init__(self, messages: dict[str, Any]) -> None:
        import rclpy

        self.messages, self._ending, self._rclpy = messages, threading.Event(), rclpy
        self._context = rclpy.Context()
        rclpy.init(context=self._context)
        self._node = rclpy.create_node("speaker", context=self._context)
        self._publishers = {topic: self._node.create_publisher(type(m), topic, 1) for topic, m in messages.items()}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(0.01):
            for topic, message in list(self.messages.items()):
                self._publishers[topic].publish(message)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._node.destroy_node()
        self._rclpy.shutdown(context=self._context)


def teleoperated(**ros: str) -> Robot:
    """The fake arm with joint positions as actions; ``ros``: changes of that section."""
    robot = load_robot(FILE)
    scales = dataclasses.replace(robot.control.scales, ranges=tuple(axis.position for axis in robot.limits.axes))
    control = dataclasses.replace(robot.control, embodiment="joint_positions", scales=scales)
    return dataclasses.replace(robot, control=control, ros=dataclasses.replace(robot.ros, **ros))


@contextlib.contextmanager
def session_of(robot: Robot, **options: Any) -> Iterator[TeleopSession]:
    options |= {"leader": "/leader", "control_hz": 20.0, "image_size": (32, 32), "name": "fake_arm"}
    with open(os.devnull) as keys, teleop_session(robot, stream=keys, **options) as session:
        yield session


def leader_at(joints: list[float]) -> Any:
    from sensor_msgs.msg import JointState

    return JointState(name=[axis.name for axis in load_robot(FILE).limits.axes], position=joints)


def test_a_leader_arm_is_followed_through_the_filter_and_recorded(cell: Cell, tmp_path: Path) -> None:
    joints = cell.ask("joints")
    leader = Speaker({"/leader": leader_at(joints)})
    goal = joints[0] + 0.3
    with contextlib.closing(leader), session_of(teleoperated(), store=tmp_path) as session:
        cell.wait(lambda: session._connection.joints.fresh(0.1), 20, "joints")
        session.begin("follow", task="follow")
        leader.messages["/leader"] = leader_at([goal, *joints[1:]])
        cell.wait(lambda: abs(cell.ask("joints")[0] - goal) < 0.02, 30, "the leader's pose")
        leader.messages.clear()  # released: the arm holds
        time.sleep(0.5)
        holds = session.control.loop.counters.holds
        time.sleep(0.5)
        assert session.control.loop.counters.holds > holds
        session.end(success=True)
        cell.wait(lambda: session._recorder is not None and session._recorder.recorded == 1, 60, "the recording")
    (entry,) = EpisodeStore(tmp_path).select()
    episode = EpisodeStore(tmp_path).read(entry.id)
    assert set(episode.actor.tolist()) == {HUMAN}
    assert episode.source == "human"
    assert episode.succeeded
    assert len(episode.observation_steps) > 0.5 * episode.num_steps
    went = episode.action[-1, 0] - episode.action[0, 0]
    assert went * 2.8973 == pytest.approx(0.3, abs=0.05)


def test_the_emergency_stop_and_the_enabling_device_stop_the_arm(cell: Cell) -> None:
    from std_msgs.msg import Bool
    from std_srvs.srv import Trigger

    joints = cell.ask("joints")
    held, loose = {"/estop": Bool(data=False), "/enable": Bool(data=True)}, {"/enable": Bool(data=False)}
    inputs = Speaker(held | {"/leader": leader_at(joints)})
    robot = teleoperated(emergency_stop="/estop", enabling_device="/enable")
    with contextlib.closing(inputs), session_of(robot, store=None) as session:
        loop = session.control.loop
        cell.wait(lambda: session._connection.joints.fresh(0.1) and not session._connection.problem(), 20, "inputs")
        for fault, reason in (
            (loose, "the enabling device is released"),
            ({"/estop": Bool(data=True)}, "the emergency stop is pressed"),
            (None, "the emergency stop on /estop is silent"),
        ):
            stop_at_fault(cell, session, inputs, fault, reason)
            answer = session._connection._on_release(Trigger.Request(), Trigger.Response())
            assert (answer.success, answer.message) == (False, reason)
            with pytest.raises(ValueError, match=reason):
                teleop._do(session, "c", "hold", "hold")
            assert loop.mode == "stopped"
            inputs.messages |= held  # letting go does not move the arm
            time.sleep(0.3)
            assert not loop.live
            session.end(success=False)
            loop.release()
            cell.wait(lambda: not session._connection.problem(), 10, "the inputs")


def test_resume_without_an_episode_is_refused_and_the_stop_is_heard_afterwards(cell: Cell) -> None:
    with (
        contextlib.closing(Speaker({"/leader": leader_at(cell.ask("joints"))})),
        session_of(teleoperated(), store=None) as session,
    ):
        cell.wait(lambda: session._connection.joints.fresh(0.1), 20, "joints")
        cell.wait(lambda: cell.ask("trigger", "/vla_rl_teleop/release") is not None, 20, "the services")
        for _ in ("before the first episode", "after it"):
            assert cell.ask("trigger", "/vla_rl_teleop/resume") == [False, "no episode is under way; begin one"]
            assert not session.control.loop.live
            assert cell.ask("trigger", "/vla_rl_teleop/stop")[0]
            assert session.control.loop.filter.stopped
            assert cell.ask("trigger", "/vla_rl_teleop/release")[0]
            session.begin("hold", task="hold")
            session.end(success=False)


def stop_at_fault(cell: Cell, session: Any, inputs: Speaker, fault: dict[str, Any] | None, reason: str) -> None:
    """An episode that ``fault`` stops; None: the emergency stop falls silent.

    Tried again where this process stood still for so long that its own inputs were silent, which stops the arm too.
    """
    loop, said = session.control.loop, dict(inputs.messages)
    for _ in range(4):
        session.begin("hold", task="hold")
        time.sleep(0.3)
        if fault is None:
            del inputs.messages["/estop"]
        inputs.messages |= fault or {}
        cell.wait(lambda: loop.mode == "stopped" and not loop.live, 10, "the stop")
        if loop.filter.stopped == reason:
            return
        assert loop.filter.stopped.endswith(" is silent")
        inputs.messages |= said
        session.end(success=False)
        loop.release()
        cell.wait(lambda: not session._connection.problem(), 10, "the inputs")
    raise AssertionError(f"the arm stopped for another reason each time, at last: {loop.filter.stopped}")


def test_a_check_draws_the_end_effector_into_the_images(cell: Cell, tmp_path: Path) -> None:
    ahead = {"position": ["1.2 m", "0 m", "0.8 m"], "focal_length": [300.0, 300.0]}  # the whole workspace is in view
    code, live = command("check", str(write(tmp_path, **ahead)), "--live", "--images", str(tmp_path / "images"))
    assert (code, live["problems"], live["calibrated"]) == (0, [], ["agent"])
    agent, wrist = (np.asarray(Image.open(tmp_path / "images" / f"{name}.png")) for name in ("agent", "wrist"))
    assert agent.shape == wrist.shape == (64, 64, 3)
    assert 5 < (agent == (255, 0, 255)).all(axis=-1).sum() < 200
    assert not (wrist == (255, 0, 255)).all(axis=-1).any()


def test_a_robot_is_checked_with_and_without_listening(cell: Cell) -> None:
    code, file = command("check", str(FILE))
    assert code == 0
    assert file["command"] == "/joint_trajectory_controller/joint_trajectory (joint_trajectory), 0.05 s ahead"
    code, live = command("check", str(FILE), "--live")
    assert (code, live["problems"]) == (0, [])
    code, other = command("check", str(ROOT / "configs/robots/generic.yaml"), "--live")
    assert code == 1
    assert any("joint states lack" in problem for problem in other["problems"])  # type: ignore[attr-defined]


def test_a_camera_that_does_not_stamp_its_images_is_named_by_the_check(cell: Cell) -> None:
    from sensor_msgs.msg import Image as ImageMessage

    from real_robot.ros.operator import Listener

    image = ImageMessage(height=4, width=4, encoding="mono8", step=4, data=bytes(16))
    inputs = Speaker({"/unstamped": image})
    robot = load_robot(FILE)
    robot = dataclasses.replace(robot, ros=dataclasses.replace(robot.ros, cameras={"agent": "/unstamped"}))
    try:
        with contextlib.closing(Listener(robot)) as listener:
            cell.wait(lambda: "its image is" in str(listener.problems()), 30, "the camera's problem")
            assert listener.images()["agent"].shape == (4, 4, 3)
    finally:
        inputs.close()


def test_the_node_is_stopped_and_resumed_from_the_command_line(cell: Cell) -> None:
    cell.start_node(cell.start_server())
    cell.activate()
    code, status = command("status")
    assert (code, status["mode"]) == (0, "running")
    assert command("stop")[0] == 0
    cell.wait(lambda: cell.status()["at_rest"] == "True", 10, "rest")
    assert command("status")[1]["mode"] == "stopped"
    code, begun = command("begin")
    assert code == 1
    assert "an episode is under way" in str(begun["refused"]) or "stopped" in str(begun["refused"])
    code, resumed = command("resume")
    assert code == 0, resumed
    assert cell.status()["mode"] == "running"
    assert command("end", "--success")[0] == 0
