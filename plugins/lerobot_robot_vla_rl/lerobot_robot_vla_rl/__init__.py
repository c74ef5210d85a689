"""An arm of a robot file of vla-rl, behind its safety filter, as a robot of LeRobot: --robot.type=vla_rl.

LeRobot imports this package by its name; importing it registers the type ``vla_rl``.
"""

from lerobot_robot_vla_rl.config_vla_rl import VlaRlRobotConfig
from lerobot_robot_vla_rl.vla_rl_robot import VlaRlRobot

__all__ = ["VlaRlRobot", "VlaRlRobotConfig"]
