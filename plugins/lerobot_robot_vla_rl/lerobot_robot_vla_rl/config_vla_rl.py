"""Settings of an arm, as LeRobot's --robot.*."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lerobot.robots import RobotConfig


@RobotConfig.register_subclass("vla_rl")
@dataclass
class VlaRlRobotConfig(RobotConfig):
    """``file``: a robot file, of an arm on ROS or with a section ``lerobot``.

    ``actions``: "positions" of the joints, as LeRobot's leaders give; "embodiment": values in [-1, 1] that mean what
    the file's ``control.embodiment`` says, as the keyboard of lerobot_teleoperator_vla_rl gives. ``control_hz``: rate
    at which the newest action is taken; the file's command rate is a multiple of it. ``image_size``: [height, width].
    """

    file: Path
    actions: str = "positions"
    control_hz: float = 25.0
    image_size: tuple[int, int] = (480, 640)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.actions not in ("positions", "embodiment"):
            raise ValueError(f"actions: got {self.actions!r}, expected 'positions' or 'embodiment'")
