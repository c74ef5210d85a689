"""A policy server with an adjustable minimal latency; without a bundle its policy is untrained.

READY_FILE.slower, if it exists, holds the smallest number of seconds for each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from policies.bundle import load_bundle
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec
from real_robot.priority import take_priority
from real_robot.serving.backends import PolicyBackend
from real_robot.serving.commands import PRIORITY
from real_robot.serving.protocol import ActRequest
from real_robot.serving.server import ServerConfig, run_server
from real_robot.serving.versions import Versions
from sims.tensor_dataclass import TensorDataclass


class SlowBackend(PolicyBackend):
    """With the latency of the file ``slower``, if it exists."""

    slower = Path()

    def act(self, request: ActRequest, state: TensorDataclass) -> tuple[NDArray[np.float32], TensorDataclass]:
        started = time.monotonic()
        answer = super().act(request, state)
        if self.slower.is_file():
            time.sleep(max(0.0, started + float(self.slower.read_text()) - time.monotonic()))
        return answer


def untrained(action_dim: int, seed: int, action_delay: int) -> DenoisingPolicy:
    robot = RobotSpec(
        action_dim=action_dim,
        state_dim=8,
        cameras=("agent", "wrist"),
        image_size=(64, 64),
        control_hz=20.0,
        action_delay=action_delay,
    )
    torch.manual_seed(seed)
    return DenoisingPolicy(DenoisingPolicyConfig(max_prefix=3), robot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ready", metavar="READY_FILE", type=Path)
    parser.add_argument("token")
    parser.add_argument("--action-dim", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--action-delay", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bundle", type=Path)
    options = parser.parse_args()
    take_priority(PRIORITY)
    torch.set_num_threads(1)
    made = (options.action_dim, options.seed, options.action_delay)
    policy = load_bundle(options.bundle) if options.bundle else untrained(*made)
    backend = SlowBackend(
        policy, fingerprint=f"untrained-{options.seed}" if options.bundle is None else options.bundle.name
    )
    backend.slower = options.ready.with_suffix(".slower")
    config = ServerConfig(port=options.port, token=options.token)
    asyncio.run(run_server(Versions(backend), config, ready=options.ready))
