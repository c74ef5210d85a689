"""The keyboard, or a leader arm, of vla-rl as a teleoperator of LeRobot: --teleop.type=vla_rl.

LeRobot imports this package by its name; importing it registers the type ``vla_rl``.
"""

from lerobot_teleoperator_vla_rl.config_vla_rl import VlaRlTeleoperatorConfig
from lerobot_teleoperator_vla_rl.vla_rl_teleoperator import VlaRlTeleoperator

__all__ = ["VlaRlTeleoperator", "VlaRlTeleoperatorConfig"]
