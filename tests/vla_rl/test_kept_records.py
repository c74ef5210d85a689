"""The byte budget of kept prefixes counts all that an algorithm keeps together, not a round or a shard of it."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.denoising.kernels import FlowSDEConfig
from policies.policy import Policy, RobotSpec
from policies.pretrained.storage import GB, StorageConfig
from policies.registry import build_policy
from sims.vector_env import Observation
from tests.policies.pretrained.toy import toy
from tests.worlds import PointEnv
from vla_rl.algorithms.algorithm import AlgorithmConfig, Metrics
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.grpo import GRPOConfig, GRPOUpdateConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.rollouts.ahead import make_ahead
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.sharded import make_sharded

ANY = {"min_success": 0.0, "max_success": 1.0}
CHUNKS = 2  # of an episode of 16 steps
FROZEN: dict[str, Any] = {"frozen": ("encoder",)}
GROUPS = {"groups": 6, "group_size": 2, "max_rounds": 6}
PPO = PPOConfig(chunks=3, update=UpdateConfig(**FROZEN))
GRPO = GRPOConfig(**GROUPS, update=GRPOUpdateConfig(**FROZEN))


def world(num_envs: int = 4) -> PointEnv:
    return PointEnv(num_envs=num_envs, max_steps=16)


def with_room_for(records: float) -> Policy:
    torch.manual_seed(0)
    config, robot = toy("pi0", FlowSDEConfig(steps=2)), RobotSpec.of(world().spec)
    size: Any = build_policy(config, robot)
    storage = StorageConfig(device_gb=records * size.record_bytes / GB, host_gb=0.0)
    return build_policy(replace(config, storage=storage), robot)


@pytest.mark.parametrize("room", [1.01, 0.99])
@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (PPO, 3 * 4),
        (replace(PPO, rollout_shards=2), 3 * 4),
        (replace(PPO, staleness=1), 2 * 3 * 4),
        (GRPO, CHUNKS * (5 * 2 + 4)),
        (replace(GRPO, start_rounds=3), CHUNKS * (5 * 2 + 3 * 4)),
    ],
    ids=["ppo", "ppo in shards", "ppo ahead", "grpo", "grpo with several rounds of a start"],
)
def test_prefixes_are_kept_where_all_of_them_fit(config: AlgorithmConfig, kept: int, room: float) -> None:
    env, policy, shards = world(), with_room_for(room * kept), config.rollout_shards
    make = make_sharded(lambda: world(4 // shards), shards)
    make = make_ahead(make, config.staleness) if config.staleness else make
    algorithm = build_algorithm(config, policy, env, seed=0, make_rollouts=make)
    collector = algorithm.collector
    rollout = collector.collect(3) if isinstance(config, PPOConfig) else collector.episodes(collector.starts.take(4))
    assert isinstance(rollout.inputs, Observation) == (room < 1)


@pytest.mark.parametrize("config", [replace(PPO, chunks=16), replace(GRPO, **ANY)], ids=["ppo", "grpo"])
def test_a_batch_is_not_kept_twice_while_it_is_learned_from(
    config: AlgorithmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []

    def alive(update: ClippedUpdate, batch: Experience, **settings: object) -> Metrics:
        gc.collect()
        kept = list(batch.inputs.tensors())
        shapes = {tuple(tensor.shape[1:]) for tensor in kept if tensor.ndim > 3}
        found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.ndim > 3]
        same = [one for one in found if any(tuple(one.shape[-len(shape) :]) == shape for shape in shapes)]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in same}
        copies.append(sum(storages.values()) / sum(one.nbytes for one in kept))
        return {}

    monkeypatch.setattr(ClippedUpdate, "run", alive)
    algorithm = build_algorithm(config, with_room_for(10_000), world(), seed=0)
    metrics = algorithm.iterate()
    assert metrics["control_steps"] > 0 and "success" in metrics
    assert 0.8 < copies[0] < 1.2
