"""A policy server with an untrained policy and room for a crowd of clients: READY_FILE TOKEN small|default.

``default``: the network of the quick start's size, with the real-time priority of ``vla-rl serve``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from policies.policy import RobotSpec
from real_robot.priority import take_priority
from real_robot.serving.backends import PolicyBackend
from real_robot.serving.commands import PRIORITY
from real_robot.serving.server import ServerConfig, run_server
from real_robot.serving.versions import Versions
from tests.real_robot.small_policies import small_policy
from tests.ros.slow_server import untrained

if __name__ == "__main__":
    ready, token, size = sys.argv[1:]
    torch.set_num_threads(1)
    robot = RobotSpec(action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(64, 64), control_hz=20.0)
    if size == "default":
        take_priority(PRIORITY)
    policy = untrained(robot.action_dim, seed=0) if size == "default" else small_policy(robot=robot)
    versions = Versions(PolicyBackend(policy, fingerprint="untrained"))
    config = ServerConfig(port=0, token=token, max_clients=100)
    asyncio.run(run_server(versions, config, ready=Path(ready)))
