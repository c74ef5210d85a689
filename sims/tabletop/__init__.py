"""The built-in language-conditioned tabletop suite on MuJoCo."""

from sims.tabletop.env import TabletopConfig, TabletopEnv

__all__ = ["TabletopConfig", "TabletopEnv"]
