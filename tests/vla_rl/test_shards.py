"""What a rollout in shards is made of, and what an update from older weights corrects."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from policies.device import CPU
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from sims.errors import UserError
from sims.vector_env import Observation
from tests.vla_rl.scale_run import GRPO, PPO, SIM, experiment, numbers, run_to_end
from tests.worlds import PointEnv
from vla_rl.algorithms.decoupled import behavior_weight, decoupling_metrics, effective_share
from vla_rl.algorithms.gate import GateConfig
from vla_rl.algorithms.off_policy_settings import OffPolicyConfig
from vla_rl.algorithms.ppo import PPO as PPOAlgorithm
from vla_rl.algorithms.ppo import with_advantages
from vla_rl.config.cluster import ClusterConfig
from vla_rl.config.environments import make_env
from vla_rl.distributed.arrays import PackedRecord, PackedTensors
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.shard import Shard
from vla_rl.rollouts.sharded import ShardedCollector, make_sharded, split_starts
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.runners.reinforce import load_algorithm, place_rollouts
from vla_rl.runs.run_dir import open_run

PPO_ONCE = replace(PPO, iterations=0)


def test_the_shards_of_a_start_stream_are_the_stream_each_with_every_task_in_turn() -> None:
    whole = TrainingStarts(seed=5, num_tasks=3, failure_weight=0.0).take(24)
    shards = [TrainingStarts(seed=5, num_tasks=3, failure_weight=0.0, shard=Shard(i, 2)) for i in range(2)]
    parts = [[*shard.take(5), *shard.take(7)] for shard in shards]
    assert {start.seed for part in parts for start in part} == {start.seed for start in whole}
    for part in parts:
        assert [start.task for start in part] == [0, 1, 2] * 4
    assert [start.seed for start in parts[0][:3]] == [start.seed for start in whole[:3]]
    assert [start.seed for start in parts[1][:3]] == [start.seed for start in whole[3:6]]


def test_the_first_shard_has_the_random_stream_of_a_run_that_is_not_split() -> None:
    seeds = [Shard(i, count).seed(0, "exploration") for i, count in ((0, 1), (0, 2), (1, 2))]
    assert seeds[0] == seeds[1] == 3170692185623922991
    assert seeds[2] != seeds[0]


def test_starts_of_a_group_stay_in_one_shard() -> None:
    starts = TrainingStarts(seed=0, num_tasks=1, failure_weight=0.0).take(2)
    shared = [start for start in starts for _ in range(3)]
    assert split_starts(shared, 2) == [shared[:3], shared[3:]]


def test_the_environments_of_other_shards_are_closed_where_one_cannot_be_made() -> None:
    """A sweep goes on with its next trial."""
    opened: list[str] = []

    class Counted(PointEnv):
        def close(self) -> None:
            opened.pop()

    def make_env() -> PointEnv:
        if opened:
            raise UserError("no memory for another simulator")
        opened.append("first shard")
        return Counted(num_envs=2)

    env = PointEnv(num_envs=4)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec))
    with pytest.raises(UserError, match="no memory"):
        make_sharded(make_env, 2)(env, policy, seed=0, failure_weight=0.0)
    assert not opened


def test_behavior_weights_by_hand() -> None:
    """Geometric mean over what is counted; above the limit 0, and the mean divides by all."""
    behavior = torch.zeros(3, 1, 2, 1)
    proximal = torch.tensor([[0.2, 0.4], [3.0, 3.0], [-1.0, 9.0]]).reshape(3, 1, 2, 1)
    counted = torch.tensor([[True, True], [True, True], [True, False]]).reshape(3, 1, 2)
    weight = behavior_weight(proximal, behavior, counted, "chunk_sum", limit=2.0)
    torch.testing.assert_close(weight[:, 0], torch.tensor([math.exp(0.3), 0.0, math.exp(-1.0)]))
    metrics = decoupling_metrics(proximal, behavior, counted, weight)
    assert metrics["behavior_dropped"].item() == pytest.approx(1 / 3)
    sums = [0.6, 6.0, -1.0]
    assert metrics["behavior_kl"].item() == pytest.approx(sum(math.expm1(s) - s for s in sums) / 3, rel=1e-5)


def test_effective_share_by_hand() -> None:
    assert effective_share(torch.ones(7)).item() == pytest.approx(1)
    assert effective_share(torch.tensor([1.0, 0.0, 0.0, 0.0])).item() == pytest.approx(0.25)
    assert effective_share(torch.tensor([2.0, 1.0])).item() == pytest.approx(9 / 10)


def test_a_decoupled_update_from_the_present_weights_is_the_plain_one(tmp_path: Path) -> None:
    """Where older and present weights are equal, w = 1 and the proximal log-probs are the stored ones."""
    run_to_end(tmp_path, experiment(PPO_ONCE))
    updates = []
    for version in (0, 1):  # the rollout is of version 0
        algorithm, batch = rollout_of(tmp_path)
        metrics = algorithm.update.run(batch, version=version)
        updates.append((metrics, [p.detach().clone() for p in algorithm.policy.parameters()]))
    assert "effective_share" not in updates[0][0]
    assert updates[1][0]["effective_share"] == pytest.approx(1, abs=1e-5)
    assert updates[1][0]["behavior_dropped"] == 0
    for plain, decoupled in zip(updates[0][1], updates[1][1], strict=True):
        torch.testing.assert_close(plain, decoupled, atol=1e-5, rtol=1e-4)


def rollout_of(folder: Path) -> tuple[PPOAlgorithm, Experience]:
    wanted = experiment(replace(PPO, rollout_shards=1))
    env = make_env(SIM)
    algorithm = load_algorithm(wanted, env, folder / "start", CPU)
    assert isinstance(algorithm, PPOAlgorithm)
    batch = with_advantages(algorithm.collector.collect(3), gamma=0.99, gae_lambda=0.95)
    env.close()
    return algorithm, batch


def test_shards_in_one_process_take_their_states_up_again(tmp_path: Path) -> None:
    wanted = experiment(PPO)
    run_to_end(tmp_path, experiment(PPO_ONCE))
    run = open_run(wanted, tmp_path / "run", resume=False, command="vla-rl train small.yaml")
    rollouts = []
    for _ in range(2):
        env = make_env(SIM)
        collector = load_algorithm(
            wanted, env, tmp_path / "start", CPU, place_rollouts(run, tmp_path / "start")
        ).collector
        assert isinstance(collector, ShardedCollector)
        if not rollouts:
            collector.collect(2)
            state = collector.state_dict()
        else:
            collector.load_state_dict(state)
        rollouts.append(collector.collect(2))
        collector.close()
        env.close()
    run.lock.close()
    assert len(rollouts[0]) == 2
    for one, other in zip(rollouts[0].tensors(), rollouts[1].tensors(), strict=True):
        assert one.shape[1] == 4
        assert (one == other).all()


def test_pipelined_shards_overlap_and_equal_shards_in_turn(tmp_path: Path, one_thread: None) -> None:
    pipelined = ClusterConfig(collectors=0, placement="pipelined")
    run_to_end(tmp_path / "in turn", experiment(PPO))
    for iterations in (3, 6):  # through a resume
        run_to_end(tmp_path / "pipelined", experiment(replace(PPO, iterations=iterations), pipelined))
    assert numbers(tmp_path / "pipelined") == numbers(tmp_path / "in turn")
    bundles = [load_file(next((tmp_path / one / "bundle").glob("*.safetensors"))) for one in ("pipelined", "in turn")]
    assert all((bundles[0][name] == tensor).all() for name, tensor in bundles[1].items())
    events = json.loads((tmp_path / "pipelined/trace.json").read_text())["traceEvents"]
    process = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    times = [
        [(event["ts"], event["ts"] + event["dur"]) for event in events if event["pid"] == pid and event["ph"] == "X"]
        for pid in (process["shard 0"], process["shard 1"])
    ]
    assert any(a < d and c < b for a, b in times[0] for c, d in times[1]), "never at the same time"


def test_records_and_weights_survive_numpy_bit_for_bit() -> None:
    record = Observation(
        images=torch.randint(255, (2, 3, 1, 4, 4, 3), dtype=torch.uint8),
        state=torch.randn(2, 3, 5, dtype=torch.bfloat16).float(),
        instruction=torch.zeros(2, 3, 96, dtype=torch.uint8),
    )
    back = PackedRecord.of(record).unpack()
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(record.tensors(), back.tensors(), strict=True))
    weights = {"a": torch.randn(3).bfloat16(), "b": torch.nn.Parameter(torch.randn(2, 2))}
    packed = PackedTensors.of(weights)
    assert all(isinstance(array, np.ndarray) for array in packed.arrays.values())
    assert packed.arrays["b"].__array_interface__["data"][0] == weights["b"].data_ptr(), "copied"
    for name, tensor in packed.items():
        assert tensor.dtype == weights[name].dtype and (tensor == weights[name]).all()


@pytest.mark.parametrize(
    ("algorithm", "cluster", "message"),
    [
        ({"rollout_shards": 3}, None, "sim.num_envs .4. must be a multiple of algorithm.rollout_shards .3."),
        ({"rollout_shards": 1}, {"collectors": 0, "placement": "pipelined"}, "rollout_shards of 2 or more, got 1"),
        ({}, {"collectors": 3}, "cluster.collectors must be at most algorithm.rollout_shards .2., got 3"),
    ],
)
def test_settings_that_contradict_each_other(algorithm: dict, cluster: dict | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experiment(replace(PPO, **algorithm), None if cluster is None else ClusterConfig(**cluster))


def test_what_needs_the_run_s_own_process_is_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"pipelined is of the run's own process: it needs cluster.collectors 0"):
        ClusterConfig(placement="pipelined")
    with pytest.raises(ValueError, match=r"pipelined needs algorithm\.complete_share 1"):
        experiment(replace(GRPO, complete_share=0.5), ClusterConfig(collectors=0, placement="pipelined"))
    gated = OffPolicyConfig(offline_iterations=1, gate=GateConfig())
    with pytest.raises(ValueError, match=r"gate evaluates in the run's own process"):
        experiment(gated, ClusterConfig())
    with pytest.raises(ValueError, match="rollout_shards 1"):
        replace(gated, rollout_shards=2)
    with pytest.raises(ValueError, match="staleness 0"):
        replace(gated, staleness=1)


def test_groups_are_not_split_between_shards() -> None:
    with pytest.raises(ValueError, match=r"multiple of algorithm.group_size .4. times algorithm.rollout_shards .2."):
        experiment(replace(GRPO, group_size=4))
    with pytest.raises(ValueError, match="grpo needs staleness 0"):
        replace(GRPO, staleness=1)
