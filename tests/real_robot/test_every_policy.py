"""Serving and export work for every registered policy, and keep the memory of a policy per client and episode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from websockets.sync.client import ClientConnection, connect

from policies.bundle import load_bundle, save_bundle
from policies.gaussian import GaussianPolicyConfig
from policies.policy import GuidedPolicy, Policy, PolicySpec, Stateless
from policies.registry import build_policy
from policies.residual.policy import ResidualConfig, residual_on
from real_robot.ros.commands import policy_spec
from real_robot.serving.backends import PolicyBackend
from real_robot.serving.onnx.export import INSTRUCTION_BYTES, TOLERANCE, export_onnx
from real_robot.serving.protocol import ActRequest, Chunk, EpisodeEnd, Hello, pack, unpack
from real_robot.serving.registry import RUNTIMES, load_backend
from real_robot.serving.runtimes import Runtime
from real_robot.serving.server import PolicyServer, ServerConfig
from real_robot.serving.versions import Versions
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation
from tests.policies.small_configs import CONFIGS
from tests.real_robot.small_policies import ROBOT

TOKEN = "0123456789abcdef"
each_policy = pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))


def request(instruction: str = "pick the red block", method: str = "replace", *, execute_steps: int = 8) -> ActRequest:
    return ActRequest(
        id=1,
        images={"agent": np.full((32, 32, 3), 9, np.uint8)},
        state=np.linspace(-1, 1, 5, dtype=np.float32),
        instruction=instruction,
        method=method,
        leftover=np.zeros((0, 4), np.float32),
        delay=0,
        execute_steps=execute_steps,
    )


def write_bundle(config: Any, path: Path) -> Path:
    torch.manual_seed(0)
    policy = build_policy(config, ROBOT)
    policy.fit_normalizer(torch.randn(50, 5), torch.rand(50, 4) - 0.5)
    save_bundle(policy, path)
    return path


@each_policy
def test_every_policy_is_served_and_offers_guidance_if_it_can(config: Any, tmp_path: Path) -> None:
    bundle = write_bundle(config, tmp_path / "bundle")
    backend, policy = load_backend(bundle), load_bundle(bundle)
    actions, _ = backend.act(request(), backend.initial_state())
    assert actions.shape == (policy.spec.action_horizon, 4)
    assert np.abs(actions).max() <= 1
    can_guide = isinstance(policy, GuidedPolicy) and policy.can_guide
    offered = backend.hello.methods  # as a robot is told before an episode
    assert ("guided" in offered) == ("jacobian_free" in offered) == can_guide
    assert policy_spec(bundle) == policy.spec


@each_policy
def test_every_policy_is_exported_and_instructions_have_a_limit(config: Any, tmp_path: Path) -> None:
    bundle = write_bundle(config, tmp_path / "bundle")
    policy = load_bundle(bundle)
    if not policy.can_be_traced or not isinstance(policy.initial_state(1), Stateless):
        with pytest.raises(UserError, match=r"memory|tokenizer"):
            export_onnx(bundle)
        return
    export_onnx(bundle)
    eager, onnx = load_backend(bundle, "eager"), load_backend(bundle, "onnx")
    assert onnx.hello == replace(eager.hello, methods=onnx.hello.methods)
    assert not {"guided", "jacobian_free"} & set(onnx.hello.methods)
    for instruction in ("", "reach", "x" * INSTRUCTION_BYTES):
        expected, _ = eager.act(request(instruction), eager.initial_state())
        actual, _ = onnx.act(request(instruction), onnx.initial_state())
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    eager.act(request("x" * 300), eager.initial_state())
    with pytest.raises(ValueError, match="the instruction has 300 bytes, the exported graph takes at most 256"):
        onnx.act(request("x" * 300), onnx.initial_state())


def remembering(chunk: int, horizon: int) -> PolicyBackend:
    """A residual that executes ``horizon`` actions of the ``chunk`` that its base planned, k / 10 at its step k."""
    base = build_policy(GaussianPolicyConfig(action_horizon=chunk), ROBOT)
    with torch.no_grad():
        last: Any = base.mean[-2]  # type: ignore[index]
        last.weight.zero_()
        last.bias.copy_(torch.arange(chunk).repeat_interleave(ROBOT.action_dim) / 10)
    residual = residual_on(base, ResidualConfig(action_horizon=horizon, trunk_width=None, hidden=(8,)))
    return PolicyBackend(residual, fingerprint="residual")


def test_a_policy_that_remembers_its_decisions_is_asked_as_often_as_in_its_training() -> None:
    """Asked every second step, the base's plan would go on from steps 0, 4, 0 in place of 0, 2, 4."""
    backend = remembering(8, 4)
    begun, state = [], backend.initial_state()
    for _ in range(2):
        actions, state = backend.act(request(execute_steps=4), state)
        begun.append(round(10 * float(actions[0, 0])))
    assert begun == [0, 4]
    with pytest.raises(ValueError, match=r"4 control steps apart .* control.chunking.method: queue"):
        backend.act(request(execute_steps=2), state)
    assert unpack(pack(backend.hello)).remembers_decisions  # so that a robot need not begin to find out
    backend.act(request(method="queue", execute_steps=2), state)  # where execute_steps has no meaning
    remembering(4, 4).act(request(execute_steps=2), remembering(4, 4).initial_state())  # plans anew at each request


def test_every_runtime_has_a_constructor() -> None:
    assert set(RUNTIMES) == set(get_args(Runtime))


@dataclass(frozen=True, kw_only=True)
class Count(TensorDataclass):
    """Number of observations in the episode."""

    value: Float[Tensor, "*B"]


class CountingPolicy(Policy[Count, Count]):
    """Every action is the number of observations since the episode began, divided by 10; one more for each plan that
    was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = PolicySpec(robot=ROBOT, action_horizon=2, value_dim=1)  # asked for once in two control steps
        self.config = None
        self.weight = nn.Parameter(torch.zeros(()))

    def initial_state(self, num_envs: int) -> Count:
        return Count(value=torch.zeros(num_envs))

    def forget_plan(self, state: TensorDataclass) -> TensorDataclass:
        assert isinstance(state, Count)
        return Count(value=state.value + 10)

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[Count, TensorDataclass]:
        assert isinstance(state, Count)
        context = Count(value=state.value + 1)
        return context, context

    def act_from_noise(self, context: Count, noise: Tensor, committed: Any = None, known: Any = None) -> Tensor:
        return (context.value / 10)[:, None, None].expand_as(noise)

    def _unused(self, *args: Any) -> Any:
        raise NotImplementedError

    sample = store = restore = log_prob = entropy = value_features = bc_loss = fit_normalizer = _unused
    parameter_groups = _unused


@pytest.fixture
def port() -> Iterator[int]:
    ready, stop, ports = threading.Event(), threading.Event(), []

    async def main() -> None:
        versions = Versions(PolicyBackend(CountingPolicy(), fingerprint="counting"))
        async with PolicyServer(versions, ServerConfig(port=0, token=TOKEN)) as server:
            ports.append(server.port)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(10)
    yield ports[0]
    stop.set()
    thread.join()


@contextmanager
def connected(port: int) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{port}", additional_headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        assert isinstance(unpack(receive(client)), Hello)
        yield client


def receive(client: ClientConnection) -> bytes:
    data = client.recv()
    assert isinstance(data, bytes)
    return data


def count(client: ClientConnection, *, anew: bool = False) -> int:
    """Observations that the policy remembers after one more request."""
    client.send(pack(replace(request(execute_steps=2), anew=anew)))
    chunk = unpack(receive(client))
    assert isinstance(chunk, Chunk)
    return round(10 * float(chunk.actions[0, 0]))


def test_a_policy_behind_a_server_forgets_a_plan_that_was_dropped(port: int) -> None:
    """As the correction page has it forget, in its own process."""
    with connected(port) as client, connected(port) as other:
        assert [count(client), count(client, anew=True), count(client), count(other)] == [1, 12, 13, 1]


def test_memory_is_kept_per_client_and_reset_when_an_episode_ends(port: int) -> None:
    with connected(port) as first, connected(port) as second:
        assert [count(first), count(first), count(second), count(first)] == [1, 2, 1, 3]
        first.send(pack(EpisodeEnd(fingerprint="", outcome="success", intervened=0)))
        assert isinstance(unpack(receive(first)), Hello)
        assert [count(first), count(second), count(first)] == [1, 2, 2]
    with connected(port) as again:
        assert count(again) == 1
