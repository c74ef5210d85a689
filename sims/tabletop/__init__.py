"""The built-in suite of language-conditioned tabletop tasks on MuJoCo."""

from sims.tabletop.config import TabletopConfig
from sims.tabletop.env import TabletopEnv

__all__ = ["TabletopConfig", "TabletopEnv"]
