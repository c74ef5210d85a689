"""Our arms and input devices as robots and teleoperators of LeRobot, found and made as its own programs do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from real_robot.robot_file import RobotError
from tests.real_robot.test_control_thread import wait
from tests.real_robot.test_lerobot import JOINTS, plugins, so101

__all__ = ["plugins"]  # the fixture
FPS = 30.0


def steps_file(folder: Path) -> Path:
    """Actions are steps of the joints."""
    path = so101(folder)
    document = yaml.safe_load(path.read_text())
    document["control"] |= {"embodiment": "joint_steps", "joint_step": dict.fromkeys(JOINTS, "0.1 rad")}
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def make(kind: str, path: Path, **settings: Any) -> Any:
    """As LeRobot's programs do from --robot.type=vla_rl or --teleop.type=vla_rl."""
    import draccus
    from lerobot import robots, teleoperators
    from lerobot.utils.import_utils import register_third_party_plugins

    register_third_party_plugins()
    config, build = {
        "robot": (robots.RobotConfig, robots.make_robot_from_config),
        "teleop": (teleoperators.TeleoperatorConfig, teleoperators.make_teleoperator_from_config),
    }[kind]
    settings |= {"type": "vla_rl", "id": "test", "file": str(path), "calibration_dir": str(path.parent)}
    return build(draccus.decode(config, settings))


@contextmanager
def connected(device: Any) -> Iterator[Any]:
    device.connect()
    try:
        yield device
    finally:
        device.disconnect()


def drive(robot: Any, teleop: Any, seconds: float) -> dict[str, Any]:
    """LeRobot's loop of teleoperation; the last observation."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        observation: dict[str, Any] = robot.get_observation()
        sent = robot.send_action(teleop.get_action())
        assert set(sent) == set(robot.action_features)
        time.sleep(1.0 / FPS)
    return observation


def servos(robot: Any) -> Any:
    """The simulated ones that the arm's driver moves."""
    return robot._arm[0]._arm._made


def test_an_arm_of_ours_follows_a_leader_of_ours_in_lerobot_within_its_limits(plugins: None, tmp_path: Path) -> None:
    path = so101(tmp_path)
    robot, teleop = make("robot", path, image_size=[24, 32]), make("teleop", path)
    joints = {f"{name}.pos": float for name in JOINTS}
    assert robot.action_features == teleop.action_features == joints
    assert robot.observation_features == joints | {"agent": (24, 32, 3)}
    assert not robot.is_connected
    with pytest.raises(RobotError, match="not connected"):
        robot.send_action(dict.fromkeys(joints, 0.0))
    with connected(teleop), connected(robot):
        arm, leader = servos(robot), teleop._device._made
        assert drive(robot, teleop, 0.5)["agent"].shape == (24, 32, 3)
        still = len(arm.sent)
        leader.pose["shoulder_pan.pos"] = 40.0  # at once
        observation = drive(robot, teleop, 2.0)
        assert observation["shoulder_pan.pos"] == pytest.approx(40.0, abs=1.0)
        leader.pose["shoulder_pan.pos"] = 170.0  # degrees, beyond the limit
        wait(lambda: teleop.get_action()["shoulder_pan.pos"] > 100.0)
        assert robot.send_action(teleop.get_action())["shoulder_pan.pos"] == pytest.approx(110.0, abs=0.1)
        drive(robot, teleop, 1.5)
        time.sleep(1.0)  # nobody sends: the arm brakes and holds
        held, count = arm.goal.copy(), len(arm.sent)
        time.sleep(0.3)
        assert np.abs(arm.goal - held).max() < 1e-3
        assert len(arm.sent) - count <= 0.3 * 110
    assert not robot.is_connected
    assert not arm.connected
    assert not leader.connected
    times, goals = np.array([at for at, _ in arm.sent[still:]]), np.radians([goal for _, goal in arm.sent[still:]])
    late = 0.02  # of the driver's thread
    assert (np.abs(np.diff(goals[:, 0])) <= 2.0 * (np.diff(times) + late)).all()  # rad/s, of the file
    assert goals[:, 0].max() <= np.radians(110.1)
    assert np.ptp(goals[:, 0]) > 1.0


def test_a_latched_stop_ends_lerobots_program_and_a_silent_leader_too(plugins: None, tmp_path: Path) -> None:
    path = so101(tmp_path)
    robot, teleop = make("robot", path), make("teleop", path)
    with connected(teleop), connected(robot):
        drive(robot, teleop, 0.3)
        robot._arm[1].stop("contact at joint elbow_flex")
        with pytest.raises(RobotError, match="the arm is stopped: contact at joint elbow_flex"):
            drive(robot, teleop, 0.3)
        teleop._device._made.unplugged = True
        with pytest.raises(RobotError, match="the leader does not answer"):
            wait(lambda: teleop.get_action() is None)


def test_keys_drive_an_arm_of_ours_in_lerobot(plugins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = steps_file(tmp_path)
    robot = make("robot", path, actions="embodiment", control_hz=25.0)
    teleop = make("teleop", path, device="keyboard", held=[5])
    assert list(robot.action_features) == list(teleop.action_features) == [f"action_{dim}" for dim in range(6)]
    read, write = os.pipe()
    with os.fdopen(read) as keys, os.fdopen(write, "w", buffering=1) as person:
        monkeypatch.setattr(sys, "stdin", keys)
        with connected(teleop), connected(robot):
            assert list(teleop.get_action().values()) == [0.0] * 5 + [-1.0]  # the gripper opens
            arm = servos(robot)
            for _ in range(10):  # a key that is held
                print("q", end="", file=person, flush=True)
                drive(robot, teleop, 0.1)
            drive(robot, teleop, 0.5)
            assert arm.goal[0] > 2.0  # degrees
            at = arm.goal[0]
            drive(robot, teleop, 0.3)
            assert arm.goal[0] == pytest.approx(at, abs=0.5)
            print("h", end="", file=person, flush=True)  # the gripper, which stays closed
            wait(lambda: teleop.get_action()["action_5"] == 1.0)
            time.sleep(0.3)
            assert list(teleop.get_action().values()) == [0.0] * 5 + [1.0]
            with pytest.raises(RobotError, match=r"an action has .* this arm takes \['action_0'"):
                robot.send_action({"shoulder_pan.pos": 0.0})
            print(" ", end="", file=person, flush=True)
            with pytest.raises(RobotError, match="stopped by the key ' '"):
                wait(lambda: teleop.get_action() is None)


def test_what_cannot_drive_an_arm_is_refused(plugins: None, tmp_path: Path) -> None:
    path = so101(tmp_path)
    with pytest.raises(RobotError, match="keys move an arm by motions, and actions of joint_positions are positions"):
        make("teleop", path, device="keyboard").connect()
    with pytest.raises(RobotError, match="must be a multiple of the policy's 30 Hz"):
        make("robot", path, control_hz=30.0).connect()
    document = yaml.safe_load(path.read_text())
    del document["leader"]
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(RobotError, match="no section 'leader'"):
        make("teleop", path).connect()
