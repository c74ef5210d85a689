"""Images that a source of actions may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt8

from real_robot.control.protocols import Cameras
from real_robot.images import UnreadableImages, images_problem


def fresh_images(
    cameras: Cameras, size: Sequence[int], max_age_s: float, *, now_s: float
) -> tuple[Mapping[str, UInt8[np.ndarray, "height width 3"]] | None, str]:
    """The newest images of ``size`` (height, width), or None where they are not what the cameras see now; and why, or
    "".
    """
    try:
        newest = cameras.images(size)
    except UnreadableImages as error:
        return None, str(error)
    problem = images_problem(newest[1] if newest else None, max_age_s, now_s=now_s)
    return (newest[0] if newest and not problem else None), problem
