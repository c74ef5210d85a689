"""The end effector's velocity from the joints', against finite differences of its position and orientation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import yaml

from real_robot.robot_file import load_robot
from real_robot.safety.kinematics import EndEffectorPoint

ROBOTS = Path(__file__).parents[2] / "configs" / "robots"
STEP_S = 1e-6


def point_of(name: str, offset: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> EndEffectorPoint:
    limits = load_robot(ROBOTS / f"{name}.yaml").limits
    assert limits.workspace is not None
    end_effector = tuple(a + b for a, b in zip(limits.workspace.end_effector, offset, strict=True))
    box = dataclasses.replace(limits.workspace, end_effector=end_effector)
    return EndEffectorPoint(box.frames, box.end_effector, limits.axes)


@pytest.mark.parametrize("name", ["franka_panda", "ur5e"])
def test_the_twist_agrees_with_finite_differences(name: str) -> None:
    rng = np.random.default_rng(0)
    points = [point_of(name), *(point_of(name, tuple(0.1 * row)) for row in np.eye(3))]
    joints_count = len(load_robot(ROBOTS / f"{name}.yaml").limits.axes)
    for _ in range(20):
        joints, speeds = rng.uniform(-1, 1, joints_count), rng.uniform(-1, 1, joints_count)
        linear, angular = points[0].twist(joints.tolist(), speeds.tolist())
        ahead = (joints + STEP_S * speeds).tolist()
        moved = [(np.array(p(ahead)) - p(joints.tolist())) / STEP_S for p in points]
        np.testing.assert_allclose(linear, moved[0], atol=1e-5)
        for point, velocity in zip(points[1:], moved[1:], strict=True):
            lever = np.array(point(joints.tolist())) - points[0](joints.tolist())
            np.testing.assert_allclose(moved[0] + np.cross(angular, lever), velocity, atol=1e-5)


def test_joints_outside_of_the_twist_need_a_topic(tmp_path: Path) -> None:
    document = yaml.safe_load((ROBOTS / "fake_arm.yaml").read_text())
    document["ros"]["command_type"] = "twist_stamped"
    del document["limits"]["command_lead"]
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(ValueError, match=r"ros\.gripper: a twist does not move \['finger'\]"):
        load_robot(path)
    document["ros"]["gripper"] = "/gripper/command"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    assert load_robot(path).ros.gripper == "/gripper/command"


def test_a_limit_on_contact_needs_its_measurement(tmp_path: Path) -> None:
    document = yaml.safe_load((ROBOTS / "franka_panda.yaml").read_text())
    del document["ros"]["residuals"]
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(ValueError, match=r"ros\.residuals: the limits name a contact_residual"):
        load_robot(path)
