"""Where the cameras are, from a hand-eye calibration, and where the end effector should be in their images.

    cameras:
      agent:
        mount: base               # or end_effector: it moves with the last joint of limits.workspace.chain
        position: [0.9 m, 0 m, 0.6 m]
        quaternion: [0.5, 0.5, -0.5, -0.5]     # x, y, z, w as ROS has it; or rpy: [.. deg, .. deg, .. deg]
        image_size: [480, 640]    # height, width that the numbers below are for
        focal_length: [610.2, 611.0]           # pixels: K[0], K[4] of sensor_msgs/CameraInfo
        center: [321.5, 239.0]                 # pixels: K[2], K[5]

Poses are those of the optical frame: z forward, x to the right and y down in the image. Lens distortion is not
modelled: calibrate rectified images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from real_robot.safety.kinematics import EndEffectorPoint, Vector, rotation
from real_robot.safety.limits import RobotLimits, check_choice, check_table, vector
from sims.config.yaml_tree import read_tree

Mount = Literal["base", "end_effector"]
_MOUNTS = ("base", "end_effector")
_CROSS = 0.03  # of the image's height


@dataclass(frozen=True, kw_only=True)
class Camera:
    """``turn``: row-major 3x3 rotation from the optical frame to the mount's. ``image_size``: (height, width)."""

    mount: Mount
    position: Vector
    turn: tuple[float, ...]
    image_size: tuple[int, int]
    focal_length: tuple[float, float]
    center: tuple[float, float]

    def pixel(self, point: Vector, image_size: tuple[int, int]) -> tuple[float, float] | None:
        """(column, row) of ``point`` [m, the mount's frame] in an image of this size, the same crop of the scene.

        None if it is behind the camera.
        """
        turn = np.reshape(self.turn, (3, 3))
        x, y, z = (turn.T @ (np.array(point) - self.position)).tolist()
        if z <= 0.0:
            return None
        rows, columns = (a / b for a, b in zip(image_size, self.image_size, strict=True))
        column, row = (f * v / z + c for f, v, c in zip(self.focal_length, (x, y), self.center, strict=True))
        return column * columns, row * rows


def load_calibration(path: Path) -> dict[str, Camera]:
    """The cameras of a calibration file. ValueError names the file and the place of what is wrong."""
    try:
        table = check_table(read_tree(path)[0], "", required={"cameras"}, optional=set())["cameras"]
        if not isinstance(table, Mapping):
            raise ValueError(".cameras: expected a table from camera name to its calibration")
        return {str(name): _camera(entry, f".cameras.{name}") for name, entry in table.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).lstrip('.')}") from error


def _camera(entry: Any, where: str) -> Camera:
    required = {"mount", "position", "image_size", "focal_length", "center"}
    table = check_table(entry, where, required=required, optional={"rpy", "quaternion"})
    if ("rpy" in table) == ("quaternion" in table):
        raise ValueError(f"{where}: give one of rpy and quaternion")
    turn = (
        rotation(vector(table["rpy"], f"{where}.rpy", "angle"))
        if "rpy" in table
        else _from_quaternion(_numbers(table["quaternion"], 4, f"{where}.quaternion"), f"{where}.quaternion")
    )
    height, width = _numbers(table["image_size"], 2, f"{where}.image_size", above_zero=True)
    fx, fy = _numbers(table["focal_length"], 2, f"{where}.focal_length", above_zero=True)
    cx, cy = _numbers(table["center"], 2, f"{where}.center")
    return Camera(
        mount=check_choice(table["mount"], _MOUNTS, f"{where}.mount"),
        position=vector(table["position"], f"{where}.position", "length"),
        turn=turn,
        image_size=(int(height), int(width)),
        focal_length=(fx, fy),
        center=(cx, cy),
    )


def _numbers(value: Any, count: int, where: str, *, above_zero: bool = False) -> list[float]:
    good = isinstance(value, list) and len(value) == count
    if not good or not all(isinstance(v, int | float) and isfinite(v) and (v > 0.0 or not above_zero) for v in value):
        raise ValueError(f"{where}: got {value!r}; expected {count} numbers{' above zero' if above_zero else ''}")
    return [float(v) for v in value]


def _from_quaternion(quaternion: list[float], where: str) -> tuple[float, ...]:
    length = sqrt(sum(v * v for v in quaternion))
    if abs(length - 1.0) > 1e-3:
        raise ValueError(f"{where}: {quaternion} has the length {length:.4f}, expected 1")
    x, y, z, w = (v / length for v in quaternion)
    return (
        *(1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        *(2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        *(2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    )


def end_effector_pixel(
    camera: Camera, limits: RobotLimits, joints: list[float], image_size: tuple[int, int]
) -> tuple[float, float] | None:
    """Where the end effector should be at the measured ``joints``; None if it is behind the camera."""
    box = limits.workspace
    assert box is not None  # checked by robot_file
    in_base = EndEffectorPoint(box.frames, box.end_effector, limits.axes)
    return camera.pixel(in_base(joints) if camera.mount == "base" else box.end_effector, image_size)


def marked(
    image: UInt8[np.ndarray, "height width 3"], pixel: tuple[float, float] | None
) -> UInt8[np.ndarray, "height width 3"]:
    """A copy with a cross at ``pixel``, if it is in the image."""
    marked_image = Image.fromarray(image)
    if pixel is not None:
        (x, y), arm = pixel, max(3.0, _CROSS * image.shape[0])
        draw = ImageDraw.Draw(marked_image)
        for ends in (((x - arm, y), (x + arm, y)), ((x, y - arm), (x, y + arm))):
            draw.line(ends, fill=(255, 0, 255), width=max(1, round(arm / 6)))
    copy: NDArray[np.uint8] = np.array(marked_image)
    return copy
