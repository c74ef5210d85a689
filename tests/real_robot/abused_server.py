"""A policy server with an untrained policy and room for a crowd of clients: READY_FILE TOKEN."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from policies.policy import RobotSpec
from real_robot.serving.backends import PolicyBackend
from real_robot.serving.server import ServerConfig, run_server
from real_robot.serving.versions import Versions
from tests.real_robot.small_policies import small_policy

if __name__ == "__main__":
    torch.set_num_threads(1)
    robot = RobotSpec(action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(64, 64), control_hz=20.0)
    versions = Versions(PolicyBackend(small_policy(robot=robot), fingerprint="untrained"))
    config = ServerConfig(port=0, token=sys.argv[2], max_clients=100)
    asyncio.run(run_server(versions, config, ready=Path(sys.argv[1])))
