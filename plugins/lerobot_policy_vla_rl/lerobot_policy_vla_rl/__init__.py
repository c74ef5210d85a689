"""A bundle of vla-rl as a policy of LeRobot: run ``python -m lerobot_policy_vla_rl BUNDLE``, then --policy.path=BUNDLE.

LeRobot imports this package by its name; importing it registers the type ``vla_rl``.
"""

from lerobot_policy_vla_rl.configuration_vla_rl import VlaRlConfig
from lerobot_policy_vla_rl.modeling_vla_rl import VlaRlPolicy
from lerobot_policy_vla_rl.processor_vla_rl import make_vla_rl_pre_post_processors

__all__ = ["VlaRlConfig", "VlaRlPolicy", "make_vla_rl_pre_post_processors"]
