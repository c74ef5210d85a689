"""Camera calibrations: where the end effector is in a rendered image, the file's errors, and the cross."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from real_robot.calibration import Camera, end_effector_pixel, marked
from real_robot.robot_file import load_robot
from real_robot.ros.fake_arm.physics import TabletopArm
from sims.tabletop.render import Renderer, choose_gl

ROOT = Path(__file__).parents[2]
FAKE_ARM = ROOT / "configs/robots/fake_arm.yaml"
SIZE = (240, 320)
FLIP = np.diag([1.0, -1.0, -1.0])  # MuJoCo's cameras look along -z with y up
AGENT = {
    "mount": "base",
    "position": ["0.9 m", "0 m", "600 mm"],
    "rpy": ["-120 deg", "0 deg", "90 deg"],
    "image_size": [480, 640],
    "focal_length": [600.0, 600.0],
    "center": [320.0, 240.0],
}


def calibrated(renderer: Renderer, name: str) -> Camera:
    """The calibration of a camera of the suite, from where MuJoCo has it now."""
    model, data = renderer._model, renderer._data
    camera = model.camera(name).id
    position, turn = data.cam_xpos[camera], data.cam_xmat[camera].reshape(3, 3) @ FLIP
    if name == "wrist":
        link = model.body("link7").id
        frame = data.xmat[link].reshape(3, 3)
        position, turn = frame.T @ (position - data.xpos[link]), frame.T @ turn
    focal = 0.5 * SIZE[0] / math.tan(0.5 * math.radians(float(model.cam_fovy[camera])))
    x, y, z = position.tolist()
    return Camera(
        mount="end_effector" if name == "wrist" else "base",
        position=(x, y, z),
        turn=tuple(turn.ravel().tolist()),
        image_size=SIZE,
        focal_length=(focal, focal),
        center=(SIZE[1] / 2, SIZE[0] / 2),
    )


def test_the_end_effector_is_where_the_image_shows_it() -> None:
    """A small ball at the end effector of the simulated arm, seen by both cameras at three poses."""
    robot, arm = load_robot(FAKE_ARM), TabletopArm()
    renderer = Renderer(gl=choose_gl("auto"), cameras=("agent", "wrist"), image_size=SIZE)
    site = renderer._model.site("tool")
    try:
        seen = 0
        for seed in range(3):
            arm.begin("reach", seed)
            without, with_ball = np.zeros((2, 2, *SIZE, 3), np.uint8)
            for size, alpha, images in ((0.001, 0.0, without), (0.006, 1.0, with_ball)):
                site.size[0], site.rgba[:] = size, (1.0, 0.0, 1.0, alpha)
                renderer.draw(arm.qpos, arm.layout.fixtures, arm.layout.appearance, images)
            for name, before, after in zip(("agent", "wrist"), without, with_ball, strict=True):
                rows, columns = np.nonzero(np.abs(after.astype(int) - before).sum(axis=-1) > 60)
                if len(rows) < 5:
                    continue  # hidden behind a finger
                camera, joints = calibrated(renderer, name), arm.joints.tolist()
                pixel = end_effector_pixel(camera, robot.limits, joints, SIZE)
                assert pixel == pytest.approx((columns.mean() + 0.5, rows.mean() + 0.5), abs=2.0)
                column, row = end_effector_pixel(camera, robot.limits, joints, (120, 160)) or (0.0, 0.0)
                assert (2 * column, 2 * row) == pytest.approx(pixel)
                seen += 1
        assert seen >= 3
    finally:
        renderer.close()


def write(folder: Path, **changes: object) -> Path:
    """A robot file with a calibration beside it; ``changes``: of its camera, None removes."""
    camera = {key: value for key, value in {**AGENT, **changes}.items() if value is not None}
    (folder / "cameras.yaml").write_text(yaml.safe_dump({"cameras": {"agent": camera}}))
    document = yaml.safe_load(FAKE_ARM.read_text())
    document["ros"]["calibration"] = "cameras.yaml"
    (folder / "robot.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder / "robot.yaml"


def test_a_robot_file_names_its_calibration(tmp_path: Path) -> None:
    """The camera is 0.9 m in front of the base, 0.6 m high, and looks back and down by 30 degrees."""
    camera = load_robot(write(tmp_path)).calibration["agent"]
    assert camera.position == (0.9, 0.0, 0.6)
    ahead = (0.9 - math.cos(math.radians(30)), 0.0, 0.6 - math.sin(math.radians(30)))
    assert camera.pixel(ahead, (480, 640)) == pytest.approx((320.0, 240.0), abs=1e-6)
    assert camera.pixel((ahead[0], 0.1, ahead[2]), (480, 640)) == pytest.approx((380.0, 240.0), abs=1e-6)
    assert camera.pixel((1.5, 0.0, 0.6), (480, 640)) is None
    quaternion = load_robot(write(tmp_path, rpy=None, quaternion=[0.6123724, 0.6123724, -0.3535534, -0.3535534]))
    assert quaternion.calibration["agent"].turn == pytest.approx(camera.turn, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mount": "tripod"}, r"cameras\.yaml: cameras\.agent\.mount: 'tripod' is not one of"),
        ({"rpy": None}, r"cameras\.agent: give one of rpy and quaternion"),
        ({"rpy": None, "quaternion": [1, 1, 0, 0]}, r"quaternion: \[1\.0, 1\.0, 0\.0, 0\.0\] has the length 1\.4142"),
        ({"focal_length": [0, 600]}, r"focal_length: got \[0, 600\]; expected 2 numbers above zero"),
        ({"position": [0.9, 0, 0.6]}, r"position\[0\]: got 0\.9; expected a number with its unit"),
    ],
)
def test_errors_in_a_calibration_are_named_with_their_place(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_robot(write(tmp_path, **changes))


def test_the_cross_is_drawn_where_it_was_asked_for() -> None:
    image = np.zeros((60, 80, 3), np.uint8)
    rows, columns = np.nonzero(marked(image, (50.0, 20.0)).any(axis=-1))
    assert (columns.mean(), rows.mean()) == pytest.approx((50.0, 20.0), abs=1.0)
    assert not marked(image, None).any()
    assert not image.any()
