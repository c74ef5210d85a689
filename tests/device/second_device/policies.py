"""The device itself, every policy, behavior cloning, evaluation and serving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_pretrained import TINY, pretrained_rows
from episodes.sampler import WindowSampler
from episodes.store import EpisodeStore
from policies.bundle import save_bundle
from policies.denoising.kernels import FlowSDEConfig
from policies.denoising.policy import DenoisingPolicy
from policies.device import CPU, Device
from policies.policy import RobotSpec, set_frozen
from policies.pretrained.storage import StorageConfig
from policies.registry import build_policy
from real_robot.serving.protocol import ActRequest
from real_robot.serving.registry import load_backend
from sims.starts import StartSequence
from tests.device.second_device import DEVICE
from tests.device.small_models import FLOW, SECOND, SIDES, policy_of, record, same_weights
from tests.policies.pretrained.toy import toy
from tests.policies.test_every_policy import CONFIGS, ROBOT, observe
from tests.worlds import PointEnv
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.algorithms.encoded_windows import EncodedWindows
from vla_rl.bench.transfers import TransferCounter
from vla_rl.rollouts.collector import Collector
from vla_rl.runners.evaluate import evaluate_policy
from vla_rl.runs.checkpoint import load_tree, save_tree


def test_the_device_refuses_what_cuda_refuses() -> None:
    here, there = torch.ones(3, device=DEVICE), torch.ones(3)
    for operation in (
        lambda: here + there,
        lambda: torch.stack([here, there]),
        lambda: here.clamp(torch.tensor(0.0), torch.tensor(1.0)),
        lambda: here.numpy(),
        lambda: there[torch.tensor([0], device=DEVICE)],
        lambda: torch.randn(3, device=DEVICE, generator=torch.Generator()),
        lambda: torch.randn(3, generator=torch.Generator(DEVICE)),
        lambda: torch.Generator(DEVICE).set_state(torch.Generator().get_state()),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            operation()
    assert (here + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0, 2.0]
    assert here[torch.tensor([0, 2])].device == DEVICE
    table = torch.zeros(3, 2, device=DEVICE)
    table[[0, 2], 1], table[torch.tensor([1]), 0], table[..., 0] = 1.0, 2.0, 3.0
    assert table.cpu().tolist() == [[3.0, 1.0], [3.0, 0.0], [3.0, 1.0]]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_policy_acts_and_learns(name: str) -> None:
    torch.manual_seed(0)
    policy = SECOND.place(build_policy(CONFIGS[name], ROBOT))
    policy.prepare_to_explore()
    obs, generator = observe(3).to(DEVICE), torch.Generator(DEVICE)
    with TransferCounter() as counter:
        context, _ = policy.encode(obs, policy.initial_state(len(obs)))
        sample = policy.sample(context, generator)
        assert policy.act(context, generator).device == DEVICE
        again = policy.log_prob(policy.restore(policy.store(context)), sample.trace)
        (again.mean() + policy.entropy(context, sample.trace).mean()).backward()
    assert counter.unnamed == {}
    torch.testing.assert_close(again.detach().cpu(), sample.log_prob.cpu(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("where", "kept_on"), [("device", DEVICE), ("host", CPU.device), ("recompute", CPU.device)])
def test_a_rollout_keeps_published_policies_records_where_storage_says(where: Any, kept_on: torch.device) -> None:
    config = dataclasses.replace(toy("pi0", FlowSDEConfig(steps=2)), storage=StorageConfig(where=where))
    env = PointEnv(num_envs=4)
    policy = SECOND.place(build_policy(config, RobotSpec.of(env.spec)))
    set_frozen(policy, ("encoder",))
    rollout = Collector(env, policy, critic=None, gamma=0.99, failure_weight=0.0, seed=0).collect(2)
    assert {tensor.device for tensor in rollout.inputs.tensors()} == {kept_on}
    again = policy.log_prob(policy.restore(rollout.inputs[0]), rollout.trace[0])
    torch.testing.assert_close(again.detach().cpu(), rollout.log_prob[0].cpu(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", TINY)
def test_the_measurements_of_published_policies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32: ``torch.autocast`` changes nothing on this device. All is done, but no duration is measured."""

    def once(work: Callable[[], object], *, repeats: int = 1) -> float:
        work()
        return 1.0

    for module in ("benchmarks.gpu_pretrained", "benchmarks.policy_work"):
        monkeypatch.setattr(f"{module}.median_seconds", once)
    config = dataclasses.replace(TINY[name].config, prefix_precision="float32")
    rows = list(pretrained_rows(dataclasses.replace(TINY[name], config=config), SECOND, 1e9))
    difference = next(row["value"] for row in rows if row["unit"] == "nat")
    assert difference <= 1e-3


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> EpisodeStore:
    store = EpisodeStore(tmp_path_factory.mktemp("demonstrations"), create=True)
    record(PointEnv(num_envs=4), store)
    return store


@pytest.mark.parametrize("frozen", [(), ("encoder",)], ids=["images", "encoded once"])
def test_behavior_cloning(demonstrations: EpisodeStore, frozen: tuple[str, ...], tmp_path: Path) -> None:
    def cloning(device: Device) -> BC:
        policy = policy_of(PointEnv(num_envs=1), device)
        sampler = WindowSampler(demonstrations, action_horizon=8, future_steps=(16, 32), batch_size=6, seed=0)
        policy.fit_normalizer(*sampler.statistics())
        return BC(policy, BCConfig(steps=4, frozen=frozen, shards=2, matrix_learning_rate=1e-3), [sampler], seed=0)

    whole = cloning(SECOND)
    whole.update()
    save_tree(tmp_path / "state.safetensors", whole.state_dict())
    with TransferCounter() as counter:
        whole.update()
    assert counter.unnamed == {}
    resumed = cloning(SECOND)
    resumed.load_state_dict(load_tree(tmp_path / "state.safetensors"))
    resumed.update()
    assert same_weights(whole.policy, resumed.policy)


def test_cloning_is_the_same_wherever_the_encoded_prefixes_are_kept(demonstrations: EpisodeStore) -> None:
    def losses(where: Any) -> list[float]:
        torch.manual_seed(0)
        config = dataclasses.replace(toy("pi0", FlowSDEConfig(steps=2)), storage=StorageConfig(where=where))
        policy = SECOND.place(build_policy(config, RobotSpec.of(PointEnv(num_envs=1).spec)))
        sampler = WindowSampler(demonstrations, action_horizon=policy.spec.cloned_horizon, batch_size=6, seed=0)
        bc = BC(policy, BCConfig(steps=4, frozen=("encoder",)), [sampler], seed=0)
        assert isinstance(bc.samplers[0], EncodedWindows) == (where != "recompute")
        with TransferCounter() as counter:
            found = [bc.update()["bc_loss"] for _ in range(2)]
        assert counter.unnamed == {}
        return found

    assert losses("host") == losses("device") == pytest.approx(losses("recompute"), rel=1e-4)


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES.keys())
def test_evaluation(side: torch.device) -> None:
    env = PointEnv(num_envs=3, max_steps=16, device=side)
    starts = StartSequence("evaluation", seed=0, num_tasks=3).take(5)
    for stochastic in (False, True):
        with TransferCounter() as counter:
            result = evaluate_policy(
                policy_of(env, SECOND), env, starts, seed=0, stochastic=stochastic, control="shuffled_instruction"
            )
        assert result["episodes"] == 5
        assert counter.unnamed == {}


def test_serving(tmp_path: Path) -> None:
    """Also with committed actions and guidance, which differentiates through the network."""
    policy = policy_of(PointEnv(num_envs=1), CPU, dataclasses.replace(FLOW, max_prefix=3))
    assert isinstance(policy, DenoisingPolicy)
    save_bundle(policy, tmp_path / "bundle")
    backend = load_backend(tmp_path / "bundle", "eager", SECOND)
    hello = backend.hello
    for method in ("prefix", "replace", "guided", "jacobian_free"):
        request = ActRequest(
            id=0,
            images={camera: np.zeros((*hello.image_size, 3), np.uint8) for camera in hello.cameras},
            state=np.zeros(hello.state_dim, np.float32),
            instruction="go",
            method=method,  # type: ignore[arg-type]
            leftover=np.full((3, hello.action_dim), 0.25, np.float32),
            delay=2,
            execute_steps=4,
        )
        with TransferCounter() as counter:
            actions, _ = backend.act(request, backend.initial_state())
        assert actions.shape == (8, 2)
        assert set(counter.counts) <= {"requests"}
