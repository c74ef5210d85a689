"""Settings of an input device, as LeRobot's --teleop.*."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lerobot.teleoperators import TeleoperatorConfig


@TeleoperatorConfig.register_subclass("vla_rl")
@dataclass
class VlaRlTeleoperatorConfig(TeleoperatorConfig):
    """``file``: the robot file of the arm that is driven.

    ``device`` "leader": the file's section ``leader``; it gives positions of the joints. "keyboard": two keys for each
    dimension of the file's ``control.embodiment``, for a robot of the type vla_rl with ``actions: embodiment``;
    ``held``: dimensions that are -1 or 1 and keep their last value, such as a gripper's.
    """

    file: Path
    device: str = "leader"
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.device not in ("leader", "keyboard"):
            raise ValueError(f"device: got {self.device!r}, expected 'leader' or 'keyboard'")
