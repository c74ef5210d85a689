"""Algorithms, rewards and their checkpoints, and planted faults that must be found."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from episodes.store import EpisodeStore
from policies.denoising.kernels import FlowNoiseConfig
from policies.device import CPU
from policies.policy import Policy
from policies.pretrained.storage import StorageConfig
from tests import dot_episodes
from tests.device.second_device import DEVICE
from tests.device.small_models import (
    ALGORITHMS,
    GROUPS,
    SECOND,
    SIDES,
    UPDATE,
    algorithm,
    policy_of,
    rewarded,
    same_weights,
    weights,
)
from tests.policies.test_every_policy import CONFIGS
from tests.rewards.test_fit import SMALL as SMALL_CLASSIFIER
from tests.worlds import PointEnv
from vla_rl.algorithms.algorithm import Algorithm
from vla_rl.algorithms.grpo import GRPO
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.bench.transfers import TransferCounter
from vla_rl.distributed.arrays import PackedRecord
from vla_rl.distributed.learners import _do as do
from vla_rl.distributed.rollouts import ClusterRollouts
from vla_rl.distributed.worker import Answer, Request
from vla_rl.rewards.bundle import CLASSIFIER, PROGRESS, load_reward_model
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.progress.model import ProgressConfig
from vla_rl.rollouts.ahead import RolloutsAhead
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.runners.iterations import algorithm_state, restore_algorithm
from vla_rl.runners.progress import fit_progress
from vla_rl.runners.reward import fit_classifier
from vla_rl.runs.checkpoint import load_tree, save_tree


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES.keys())
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_trains_and_only_named_tensors_cross(name: str, side: torch.device) -> None:
    learner = algorithm(name, SECOND, side)
    before = weights(learner.policy)
    learner.iterate()
    with TransferCounter() as counter:
        metrics = learner.iterate()
    assert counter.unnamed == {}
    assert {"outcomes", "metrics"} <= counter.counts.keys()
    assert ("observations" in counter.counts) == ("actions" in counter.counts) == (side.type == "cpu")
    assert all(np.isfinite(value) for key, value in metrics.items() if key != "success"), metrics
    after = weights(learner.policy)
    assert any(not torch.equal(after[key], value) for key, value in before.items())
    assert {parameter.device for parameter in learner.policy.parameters()} == {DEVICE}
    rollouts = learner.collector
    collector = rollouts.inner if isinstance(rollouts, RolloutsAhead) else rollouts
    assert {tensor.device for tensor in collector._state.tensors()} <= {DEVICE}


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_prefixes_may_be_kept_in_the_hosts_memory(name: str) -> None:
    env = PointEnv(num_envs=4, max_steps=24, device=DEVICE)
    storage = StorageConfig(where="host")
    kept = dataclasses.replace(CONFIGS["smolvla"], explore=FlowNoiseConfig(steps=3), storage=storage)
    policy, changed = policy_of(env, SECOND, kept), {"frozen": ("encoder",), "reference_weight": 0.0}
    learner: Algorithm
    if name == "ppo":
        update = dataclasses.replace(UPDATE, **changed)
        learner = PPO(PPOConfig(chunks=2, critic_warmup=0, update=update), policy, env, seed=1)
    else:
        learner = GRPO(
            dataclasses.replace(GROUPS, update=dataclasses.replace(GROUPS.update, **changed)), policy, env, seed=1
        )
    with TransferCounter() as counter:
        metrics = learner.iterate()
    assert counter.unnamed == {}
    assert "prefixes" in counter.counts
    assert 0 <= metrics["kl"] <= 1e-9  # the update computes the log-probs of the rollout


class Collected:
    """A CollectorPool whose collector has answered."""

    states: ClassVar[dict[int, Any]] = {0: {}}
    count = 1

    def __init__(self, rollout: Experience) -> None:
        self._rollout = pickle.dumps(PackedRecord.of(rollout))

    def submit(self, request: Request, weights: object) -> None:
        self._number = request.number

    def next_answer(self) -> Answer:
        rollout = pickle.loads(self._rollout)
        return Answer(shard=0, number=self._number, rollout=rollout, state={}, times={}, spans=())


class PlacedUpdate:
    """What a learner beside the first does with a batch: notes where it lies."""

    device = DEVICE

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def run(self, batch: Experience, **settings: object) -> None:
        self.batch = batch


@pytest.mark.parametrize("where", ["host", "device", "recompute"])
def test_prefixes_lie_as_in_one_process_where_a_cluster_collects_or_several_learn(where: str) -> None:
    env = PointEnv(num_envs=4, max_steps=24, device=DEVICE)
    kept = dataclasses.replace(CONFIGS["smolvla"], storage=StorageConfig(where=where))
    policy = policy_of(env, SECOND, kept)
    update = dataclasses.replace(UPDATE, frozen=("encoder",), entropy_weight=0.0)
    ppo = PPO(PPOConfig(chunks=2, critic_warmup=0, update=update), policy, env, seed=1)
    rollout = ppo.collector.collect(2)
    pool: Any = Collected(rollout)
    starts = TrainingStarts(seed=0, num_tasks=3, failure_weight=0.0)
    cluster = ClusterRollouts(pool, starts, shards=1, num_envs=4, staleness=0, policy=policy, kept=8)
    cluster.publish(0, {})
    learner: Any = PlacedUpdate(policy)
    do(learner, "run", pickle.dumps((PackedRecord.of(rollout), True, None)), divided=False)
    for other in (cluster.collect(2), learner.batch):
        assert [one.device for one in other.tensors()] == [one.device for one in rollout.tensors()]
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(other.tensors(), rollout.tensors(), strict=True))


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES.keys())
def test_a_success_classifier_is_the_reward_and_only_named_tensors_cross(side: torch.device, tmp_path: Path) -> None:
    whole = rewarded(SECOND, side)
    with TransferCounter() as counter:
        metrics = whole.iterate()
    assert counter.unnamed == {}
    assert metrics["success"] == 1.0
    save_tree(tmp_path / "state.safetensors", algorithm_state(whole))
    resumed = rewarded(SECOND, side)
    restore_algorithm(resumed, load_tree(tmp_path / "state.safetensors"))
    whole.iterate()
    resumed.iterate()
    assert same_weights(whole.policy, resumed.policy)


def test_a_success_classifier_is_fitted(tmp_path: Path) -> None:
    dot_episodes.store(tmp_path / "episodes", 60).close()
    config = dataclasses.replace(
        SMALL_CLASSIFIER, steps=3, mined_steps=2, precision=0.0, batch_size=8, train_encoder=False
    )
    report = fit_classifier(config, [tmp_path / "episodes"], tmp_path / "classifier", seed=0, device=SECOND)
    assert load_reward_model(CLASSIFIER, tmp_path / "classifier", SECOND).device == DEVICE
    assert report["threshold"] == load_reward_model(CLASSIFIER, tmp_path / "classifier").threshold.item()


def test_a_progress_model_is_fitted(tmp_path: Path) -> None:
    dot_episodes.store(tmp_path / "episodes", 60).close()
    config = ProgressConfig(encoder=SMALL_CLASSIFIER.encoder, steps=3, batch_size=8)
    fit_progress(config, [tmp_path / "episodes"], tmp_path / "progress", seed=0, device=SECOND)
    model = load_reward_model(PROGRESS, tmp_path / "progress", SECOND)
    assert model.device == DEVICE
    obs = LabeledEpisodes([EpisodeStore(tmp_path / "episodes")]).read(np.arange(4)).obs
    assert model.progress(obs.to(DEVICE)).device == DEVICE


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_is_the_same_run(name: str, tmp_path: Path) -> None:
    """Through a checkpoint on the host."""
    whole = algorithm(name, SECOND, DEVICE)
    whole.iterate()
    save_tree(tmp_path / "state.safetensors", algorithm_state(whole))
    whole.iterate()
    resumed = algorithm(name, SECOND, DEVICE)
    restore_algorithm(resumed, load_tree(tmp_path / "state.safetensors"))
    resumed.iterate()
    assert same_weights(whole.policy, resumed.policy)


def test_a_checkpoint_goes_to_another_device_and_back(tmp_path: Path) -> None:
    learner = algorithm("ppo", CPU, torch.device("cpu"))
    for device, side in ((SECOND, DEVICE), (CPU, torch.device("cpu"))):
        learner.iterate()
        save_tree(tmp_path / "state.safetensors", algorithm_state(learner))
        there = algorithm("ppo", device, side)
        restore_algorithm(there, load_tree(tmp_path / "state.safetensors"))
        assert same_weights(learner.policy, there.policy)
        learner = there
    assert learner.iterate()["control_steps"] > 0


# -- faults -----------------------------------------------------------------------------------------------------------


def on_the_host(method: Callable[..., Any]) -> Callable[..., Any]:
    """``policy.sample`` with a ``.cpu()`` in it."""
    return lambda context, generator: dataclasses.replace(
        sample := method(context, generator), action=sample.action.cpu()
    )


def with_a_cpu_generator(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda context, generator: method(context, torch.Generator())


def with_zeros_on_the_host(method: Callable[..., Any]) -> Callable[..., Any]:
    """A ``torch.zeros`` without device."""
    return lambda context, generator: dataclasses.replace(
        sample := method(context, generator), log_prob=sample.log_prob + torch.zeros(sample.log_prob.shape)
    )


def read_at_every_decision(method: Callable[..., Any]) -> Callable[..., Any]:
    """An ``.item()``, which is correct but makes the host wait."""

    def sample(context: Any, generator: torch.Generator) -> Any:
        drawn = method(context, generator)
        assert drawn.action.sum().item() < 1e9
        return drawn

    return sample


@pytest.mark.parametrize("fault", [on_the_host, with_a_cpu_generator, with_zeros_on_the_host, read_at_every_decision])
def test_a_planted_fault_is_found(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    learner = algorithm("ppo", SECOND, DEVICE)
    monkeypatch.setattr(learner.policy, "sample", fault(learner.policy.sample))
    with TransferCounter() as counter:
        try:
            learner.iterate()
        except RuntimeError as error:
            found = str(error)
        else:
            found = str(counter.unnamed)
    assert "device" in found or "generator" in found or "_local_scalar_dense" in found
