"""A policy server with an untrained policy of the tabletop's shape, for tests of everything but skill.

Usage: python -m tests.ros.untrained_server READY_FILE TOKEN [ACTION_DIM]
READY_FILE.slower, if it is there, holds how many seconds longer than it needs each answer takes.
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
from real_robot.priority import take_priority
from real_robot.serve import PRIORITY
from real_robot.versions import Versions
from real_robot.wire import Act


class SlowBackend(PolicyBackend):
    """Takes longer than it needs, if ``slower`` says so."""

    slower = Path()

    def act(self, question: Act) -> NDArray[np.float32]:
        if self.slower.is_file():
            time.sleep(float(self.slower.read_text()))
        return super().act(question)


if __name__ == "__main__":
    take_priority(PRIORITY)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ready = Path(sys.argv[1])
    action_dim = int(sys.argv[3]) if len(sys.argv) > 3 else 7
    robot = RobotSpec(
        action_dim=action_dim, state_dim=8, cameras=("agent", "wrist"), image_size=(64, 64), control_hz=20.0
    )
    policy = DenoisingPolicy(DenoisingPolicyConfig(max_prefix=3), robot)
    backend = SlowBackend(policy, fingerprint="untrained")
    backend.slower = ready.with_suffix(".slower")
    config = ServerConfig(port=0, token=sys.argv[2])
    asyncio.run(run_server(Versions(backend), config, ready=ready))
