"""openpi's own client against the policy server, with every published family."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from policies.policy import Policy
from policies.registry import build_policy
from real_robot.serving.backends import PolicyBackend
from real_robot.serving.server import PolicyServer, ServerConfig
from real_robot.serving.versions import Versions
from tests.policies.small_configs import CONFIGS
from tests.policies.test_every_policy import ROBOT

websocket_client = pytest.importorskip(
    "openpi_client.websocket_client_policy", reason="needs: pip install --no-deps openpi-client==0.1.2"
)
TOKEN = "0123456789abcdef"
FAMILIES = ("pi0", "pi05", "smolvla", "openvla", "diffusion_policy")


@contextmanager
def serving(policy: Policy) -> Iterator[int]:
    """The port of a server of ``policy``, in a thread with its own event loop."""
    ready, stop, ports = threading.Event(), threading.Event(), list[int]()

    async def main() -> None:
        config = ServerConfig(port=0, token=TOKEN)
        async with PolicyServer(Versions(PolicyBackend(policy, fingerprint="untrained")), config) as running:
            ports.append(running.port)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(20)
        yield ports[0]
    finally:
        stop.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # in their constructor
@pytest.mark.parametrize("name", FAMILIES)
def test_the_client_gets_chunks(name: str) -> None:
    torch.manual_seed(0)
    policy = build_policy(CONFIGS[name], ROBOT).eval()
    images = {
        f"observation/{camera}": np.random.default_rng(0).integers(0, 255, (*ROBOT.image_size, 3), dtype=np.uint8)
        for camera in ROBOT.cameras
    }
    with serving(policy) as port:
        client = websocket_client.WebsocketClientPolicy("127.0.0.1", port, api_key=TOKEN)
        assert client.get_server_metadata()["action_horizon"] == policy.spec.action_horizon
        chunks = [
            client.infer({**images, "observation/state": np.full(ROBOT.state_dim, value), "prompt": "pick"})["actions"]
            for value in (0.0, 1.0)
        ]
        with pytest.raises(RuntimeError, match="lacks"):
            client.infer({"prompt": "pick"})
        client._ws.close()  # the client has no method for it
    assert chunks[0].shape == (policy.spec.action_horizon, ROBOT.action_dim) and np.abs(chunks).max() <= 1
