"""The byte budget of kept prefixes counts all that an algorithm keeps together, not a round or a shard of it."""

from __future__ import annotations

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
from vla_rl.algorithms.algorithm import AlgorithmConfig
from vla_rl.algorithms.grpo import GRPOConfig, GRPOUpdateConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.rollouts.ahead import make_ahead
from vla_rl.rollouts.sharded import make_sharded

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
