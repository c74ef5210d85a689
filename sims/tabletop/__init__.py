"""The built-in language-conditioned tabletop suite on MuJoCo."""

from sims.tabletop.config import TabletopConfig
from sims.tabletop.env import TabletopEnv

__all__ = ["TabletopConfig", "TabletopEnv"]
