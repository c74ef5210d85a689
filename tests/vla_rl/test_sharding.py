"""Divided weights in a group of one process: FSDP's way through a policy's networks, and into checkpoints."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from policies.policy import RobotSpec
from policies.registry import build_policy
from sims.numbers.finite import NotFinite
from tests.vla_rl.scale_run import FLOW, PPO, SIM
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.ppo import PPO as Algorithm
from vla_rl.algorithms.ppo import with_advantages
from vla_rl.config.cluster import ClusterConfig
from vla_rl.config.environments import make_env
from vla_rl.distributed.processes import LearnerProcesses
from vla_rl.distributed.sharded_state import load_shards
from vla_rl.distributed.sharding import ShardedState, blocks, shard_update, take_weights
from vla_rl.rollouts.experience import Experience
from vla_rl.runs.checkpoint import load_checkpoint, save_checkpoint


def no_other(*unused: object) -> None:
    """There is no other rank."""


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[LearnerProcesses]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    processes = LearnerProcesses(no_other, ClusterConfig(learners=1, hang_s=30.0), torch.device("cpu"))
    yield processes
    processes.close()


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


def weights(update: ClippedUpdate, like: ClippedUpdate) -> dict[str, torch.Tensor]:
    """Of a divided ``update``, the average's too."""
    complete = copy.deepcopy(like)
    take_weights(update, complete)
    return whole_weights(complete)


def whole_weights(update: ClippedUpdate) -> dict[str, torch.Tensor]:
    assert update.average is not None
    average = enumerate(update.average.state_dict()["parameters"])
    return {name: one.detach() for name, one in update.weights().items()} | {f"average {i}": one for i, one in average}


def test_a_divided_update_equals_a_whole_one_and_goes_on_from_its_checkpoint(
    group: LearnerProcesses, update_and_batch: tuple[ClippedUpdate, Experience], tmp_path: Path
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

    path = save_checkpoint(tmp_path, 1, {"update": ShardedState(divided, group)})
    load_shards(again, load_checkpoint(path, unread=["update"])["update"])
    again.audited = True  # other weights drew this batch
    for update in (whole, divided, again):
        update.run(batch)
    found, others = weights(divided, whole), weights(again, whole)
    for name, tensor in whole_weights(whole).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(others[name], found[name], rtol=0, atol=0)


def test_a_checkpoint_continues_exactly_whether_saved_or_read_divided_or_whole(
    group: LearnerProcesses, update_and_batch: tuple[ClippedUpdate, Experience], tmp_path: Path
) -> None:
    whole, batch = update_and_batch
    divided, fresh = copy.deepcopy(whole), copy.deepcopy(whole)
    shard_update(divided, rank=0, size=1)
    whole.run(batch)
    path = save_checkpoint(tmp_path, 1, {"update": whole.state_dict()})
    assert not list(tmp_path.glob("*.parts"))
    load_shards(divided, load_checkpoint(path, unread=["update"])["update"])
    path = save_checkpoint(tmp_path, 2, {"update": ShardedState(divided, group)})
    state = load_checkpoint(path)["update"]
    fresh.load_state_dict(state)
    assert all((one == whole_weights(whole)[name]).all() for name, one in whole_weights(fresh).items())
    moments, expected = state["optimizer"]["state"], whole.optimizer.state_dict()["state"]
    assert moments.keys() == expected.keys() and len(moments) > FLOW.expert.depth
    assert all((moments[i]["exp_avg_sq"] == expected[i]["exp_avg_sq"]).all() for i in moments)
    assert (state["shuffle"] == whole.generator.get_state()).all()


def test_a_divided_state_that_is_not_finite_is_not_saved(
    group: LearnerProcesses, update_and_batch: tuple[ClippedUpdate, Experience], tmp_path: Path
) -> None:
    update, _ = update_and_batch
    shard_update(update, rank=0, size=1)
    update.parameters[0].to_local().data.flatten()[0] = float("nan")
    with pytest.raises(NotFinite, match=r"training state update\.policy\.\S+ is nan \(checkpoint of iteration 3"):
        save_checkpoint(tmp_path, 3, {"update": ShardedState(update, group)})
    assert not list(tmp_path.iterdir())
