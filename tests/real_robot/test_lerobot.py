"""A LeRobot ``Robot`` behind the safety filter: its base class is LeRobot's own, the arm behind it is simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from real_robot.control.loop import Action, ControlLoop
from real_robot.control.registry import build_embodiment
from real_robot.control.thread import ControlThread
from real_robot.lerobot.arm import LeRobotArm, LeRobotConnection
from real_robot.lerobot.devices import make_driver
from real_robot.robot_file import RobotError, load_robot
from real_robot.safety.commands import Measurement
from tests.real_robot.test_control_thread import wait
from tests.real_robot.test_safety_streams import ROBOTS

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


def so101(folder: Path, **changes: Any) -> Path:
    """The SO-101's file with a driver of LeRobot, whose gripper is in percent and whose other joints are in degrees."""
    document = yaml.safe_load((ROBOTS / "so101.yaml").read_text())
    del document["ros"]
    joints = {name: {"key": f"{name}.pos", "at_0": "0 deg", "at_100": "100 deg"} for name in JOINTS}
    joints["gripper"] |= {"at_0": "-10 deg", "at_100": "100 deg"}
    document["lerobot"] = {"type": "simulated_arm", "rate": "100 Hz", "joints": joints, "cameras": {"agent": "front"}}
    document["lerobot"] |= changes
    path = folder / "so101.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


class Swinging:
    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        values = np.zeros(6, dtype=np.float32)
        values[0] = 0.5 if (tick // 10) % 2 else -0.5
        return Action(values, measured.stamp_s)

    def executed(self, tick: int, action: np.ndarray) -> None:
        """Nothing is recorded."""

    def clear(self) -> None:
        """Nothing is planned."""


@lru_cache
def simulated_arm() -> type:
    """Servos that approach their goals in 20 ms, as a plugin for LeRobot would be written."""
    robots = pytest.importorskip("lerobot.robots", reason="LeRobot is not installed")

    @robots.RobotConfig.register_subclass("simulated_arm")
    @dataclass
    class SimulatedArmConfig(robots.RobotConfig):
        port: str = "none"

    class SimulatedArm(robots.Robot):
        config_class, name = SimulatedArmConfig, "simulated_arm"

        def __init__(self, config: SimulatedArmConfig) -> None:
            super().__init__(config)
            self.connected, self.unplugged = False, False
            self.sent: list[tuple[float, np.ndarray]] = []
            self.goal = self.at = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 50.0])
            self.read_s = time.monotonic()

        observation_features = property(lambda self: self.action_features | {"front": (48, 64, 3)})
        action_features = property(lambda self: {f"{name}.pos": float for name in JOINTS})
        is_connected = property(lambda self: self.connected)
        is_calibrated = property(lambda self: True)

        def connect(self, calibrate: bool = True) -> None:
            self.connected = True

        def calibrate(self) -> None:
            """Nothing to calibrate."""

        def configure(self) -> None:
            """Nothing to configure."""

        def get_observation(self) -> dict[str, Any]:
            if self.unplugged:
                raise ConnectionError("no answer from motor 3")
            now = time.monotonic()
            self.at = self.goal + (self.at - self.goal) * np.exp(-(now - self.read_s) / 0.02)
            self.read_s = now
            joints = {f"{name}.pos": float(q) for name, q in zip(JOINTS, self.at, strict=True)}
            return joints | {"front": np.full((48, 64, 3), 7, dtype=np.uint8)}

        def send_action(self, action: dict[str, float]) -> dict[str, float]:
            self.goal = np.array([action[f"{name}.pos"] for name in JOINTS])
            self.sent.append((time.monotonic(), self.goal))
            return action

        def disconnect(self) -> None:
            self.connected = False

    return SimulatedArm


@contextmanager
def driven(folder: Path) -> Iterator[tuple[Any, LeRobotArm, ControlThread]]:
    """A simulated driver, its arm and what swings it through the filter."""
    robot = load_robot(so101(folder))
    driver = simulated_arm()(robot_config(folder))
    with LeRobotArm(driver, robot) as arm:
        wait(lambda: arm.fresh(0.1))
        embodiment = build_embodiment(robot.control.embodiment, robot.limits.axes, robot.control.scales)
        loop = ControlLoop(robot.limits, control_hz=25.0, embodiment=embodiment, source=Swinging(), lead_s=robot.lead_s)
        control = LeRobotConnection(arm).connect(loop)
        control.start()
        yield driver, arm, control


def test_an_arm_of_lerobot_is_driven_through_the_filter_and_stops(tmp_path: Path) -> None:
    with driven(tmp_path) as (driver, arm, control):
        time.sleep(2.0)
        assert arm.images((24, 32))[0]["agent"].shape == (24, 32, 3)
        control.brake()
        time.sleep(0.3)
        count = len(driver.sent)
        time.sleep(0.2)
        assert len(driver.sent) == count  # at rest nothing is sent
    assert not driver.connected
    assert control.loop.filter.stopped is None
    sent = np.radians([goal for _, goal in driver.sent])
    assert np.ptp(sent[:, 0]) > 0.3
    assert np.ptp(sent[:, 1:4], axis=0).max() < 1e-6
    times = np.array([at for at, _ in driver.sent])
    late = 0.02  # of the thread, between the two readings of the clock
    assert (np.abs(np.diff(sent[:, 0])) <= 2.0 * (np.diff(times) + late)).all()  # rad/s


def test_a_driver_that_fails_stops_the_arm_and_is_named(tmp_path: Path) -> None:
    with driven(tmp_path) as (driver, _, control):
        wait(lambda: len(driver.sent) > 20)
        driver.unplugged = True
        wait(lambda: control.loop.filter.stopped)
        assert "no answer from motor 3" in str(control.loop.filter.stopped)
        control.brake()


def robot_config(folder: Path) -> Any:
    return simulated_arm().config_class(id="test", calibration_dir=folder)


def test_a_driver_is_made_from_the_file(tmp_path: Path) -> None:
    pytest.importorskip("lerobot.robots", reason="LeRobot is not installed")
    pytest.importorskip("scservo_sdk", reason="the SO-101's servo library is not installed")
    section = load_robot(so101(tmp_path)).lerobot
    assert section is not None
    config = {"port": "/dev/ttyACM7", "id": "mine", "calibration_dir": str(tmp_path), "use_degrees": True}
    driver = make_driver(replace(section, type="so101_follower", config=config))
    assert driver.bus.port == "/dev/ttyACM7"
    assert set(driver.action_features) == {f"{name}.pos" for name in JOINTS}
    with pytest.raises(RobotError, match="LeRobot cannot make a 'so109_follower'"):
        make_driver(replace(section, type="so109_follower"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": "50"}, r"lerobot\.rate: got '50'; expected a number with its unit"),
        ({"joints": {}}, r"lerobot\.joints: missing \['elbow_flex'"),
        ({"robot": "so101"}, r"lerobot\.robot: 'robot' is not one of"),
    ],
)
def test_errors_in_the_lerobot_section_are_named(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_robot(so101(tmp_path, **change))
