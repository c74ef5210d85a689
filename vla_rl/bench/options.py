"""The options of ``vla-rl bench`` and the robot that default benchmarks assume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from policies.policy import RobotSpec

EXAMPLE_ROBOT = RobotSpec(action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(64, 64), control_hz=20.0)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Each benchmark uses some of these; see ``vla_rl.bench.registry``."""

    bundle: Path | None = None
    policy: str | None = None
    sim: str | None = None
    against: tuple[str, ...] = ("gymnasium",)
    num_envs: int = 4
    image_size: int = 128
    seconds: float = 5.0
    device: str = "auto"
    config: Path | None = None
