"""A policy server with an untrained policy of the tabletop's shape, for tests of everything but skill.

Usage: python -m tests.ros.untrained_server READY_FILE TOKEN [SLOWER_S [ACTION_DIM]]
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from policies.denoising_policy import DenoisingPolicy, DenoisingPolicyConfig, RobotSpec
from real_robot.policy_backend import PolicyBackend
from real_robot.policy_server import ServerConfig, run_server
from real_robot.versions import Versions
from real_robot.wire import Act


class SlowBackend(PolicyBackend):
    """Takes ``delay_s`` longer than it needs."""

    delay_s = 0.0

    def act(self, question: Act) -> NDArray[np.float32]:
        time.sleep(self.delay_s)
        return super().act(question)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    action_dim = int(sys.argv[4]) if len(sys.argv) > 4 else 7
    robot = RobotSpec(
        action_dim=action_dim, state_dim=8, cameras=("agent", "wrist"), image_size=(64, 64), control_hz=20.0
    )
    policy = DenoisingPolicy(DenoisingPolicyConfig(max_prefix=3), robot)
    backend = SlowBackend(policy, fingerprint="untrained")
    backend.delay_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    config = ServerConfig(port=0, token=sys.argv[2])
    asyncio.run(run_server(Versions(backend), config, ready=Path(sys.argv[1])))
