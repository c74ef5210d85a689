"""Divided weights in a group of one process: FSDP's way through a policy's networks."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from policies.policy import RobotSpec
from policies.registry import build_policy
from tests.vla_rl.scale_run import FLOW, PPO, SIM
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.ppo import PPO as Algorithm
from vla_rl.algorithms.ppo import with_advantages
from vla_rl.config.environments import make_env
from vla_rl.distributed.processes import join
from vla_rl.distributed.sharding import blocks, load_shards, new_weights, shard_update
from vla_rl.rollouts.experience import Experience


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    join(torch.device("cpu"), 0, 1, tmp_path / "store", 30.0)
    yield
    dist.destroy_process_group()


@pytest.fixture
def update_and_batch() -> tuple[ClippedUpdate, Experience]:
    env = make_env(replace(SIM, num_envs=2))
    torch.manual_seed(0)
    config = replace(PPO, rollout_shards=1)
    algorithm = Algorithm(config, build_policy(FLOW, RobotSpec.of(env.spec)), env, seed=0)
    rollout = algorithm.collector.collect(3)
    env.close()
    assert isinstance(algorithm.update, ClippedUpdate)
    return algorithm.update, with_advantages(rollout, gamma=config.gamma, gae_lambda=config.gae_lambda)


def test_a_divided_update_equals_a_whole_one_and_goes_on_from_its_state(
    group: None, update_and_batch: tuple[ClippedUpdate, Experience]
) -> None:
    whole, batch = update_and_batch
    divided, again = copy.deepcopy(whole), copy.deepcopy(whole)
    assert len(blocks(divided.policy)) > FLOW.expert.depth
    for update in (divided, again):
        shard_update(update, rank=0, size=1)
    assert all(isinstance(parameter, DTensor) for parameter in divided.parameters)
    metrics = [update.run(batch) for update in (whole, divided)]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    assert metrics[0]["policy_steps"] > 0

    load_shards(again, copy.deepcopy(divided.state_dict()))  # a saved state does not share its tensors
    again.audited = True  # other weights drew this batch
    for update in (whole, divided, again):
        update.run(batch)
    weights, average = new_weights(divided)
    others, other_average = new_weights(again)
    for name, tensor in whole.weights().items():
        torch.testing.assert_close(weights[name], tensor.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(others[name], weights[name], rtol=0, atol=0)
    assert whole.average is not None and average["updates"] == other_average["updates"] == whole.average.updates
    for one, other in zip(average["parameters"], whole.average.state_dict()["parameters"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
