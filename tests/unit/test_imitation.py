"""Demonstrations and their imitation: what is looked at, and that an interrupted training goes on exactly."""

from pathlib import Path

import pytest
import torch

from episodes.recorder import RecordedEnv, keep_successes
from episodes.sampler import WindowSampler
from episodes.store import EpisodeStore
from policies.denoising_policy import DenoisingPolicy, DenoisingPolicyConfig, RobotSpec
from policies.vla import VLAConfig
from sims.starts import StartSequence
from tests.worlds import PointWorld
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.checkpoint import load_tree, save_tree
from vla_rl.collect import run_expert


def demonstrations(path: Path, *, look_every: int) -> EpisodeStore:
    world = PointWorld(num_envs=4)
    store = EpisodeStore(path, create=True)
    recorder = RecordedEnv(world, store, source="expert", split="train", keep=keep_successes)
    starts = StartSequence("demos", seed=0, num_tasks=3)
    expert = world.expert(noise=0.2, seed=0)
    run_expert(recorder, expert, starts, episodes=6, look_every=look_every, on_recorded=lambda count: None)
    return store


def test_every_third_step_is_looked_at_and_the_last(tmp_path: Path) -> None:
    store = demonstrations(tmp_path / "store", look_every=3)
    entries = store.select()
    assert len(entries) == 6
    for entry in entries:
        looks = store.map(entry)["look_steps"].tolist()
        assert looks == sorted({*range(0, entry.steps, 3), entry.steps})


@pytest.mark.parametrize("matrix_learning_rate", [None, 4e-3])
def test_imitation_goes_on_exactly(tmp_path: Path, matrix_learning_rate: float | None) -> None:
    torch.set_num_threads(1)
    store = demonstrations(tmp_path / "store", look_every=1)

    def fresh() -> tuple[BC, WindowSampler]:
        sampler = WindowSampler(store, action_horizon=8, batch_size=8, seed=0, future_steps=(16, 32))
        torch.manual_seed(0)
        config = DenoisingPolicyConfig(vla=VLAConfig(width=32, text_width=16, depth=1))
        policy = DenoisingPolicy(config, RobotSpec.of(PointWorld(num_envs=1).spec))
        policy.normalizer.fit(*sampler.statistics())
        config = BCConfig(steps=6, warmup=2, matrix_learning_rate=matrix_learning_rate)
        return BC(policy, config, torch.Generator().manual_seed(0)), sampler

    whole, batches = fresh()
    begun = [parameter.clone() for parameter in whole.parameters]
    losses = [whole.update(batches.next_batch()) for _ in range(6)]
    assert all(
        not torch.equal(before, after) for before, after in zip(begun, whole.parameters, strict=True) if after.ndim > 1
    )
    first, batches = fresh()
    for _ in range(3):
        first.update(batches.next_batch())
    save_tree(tmp_path / "state", {"learner": first.state_dict(), "sampler": batches.state_dict()})
    second, batches = fresh()
    state = load_tree(tmp_path / "state")
    second.load_state_dict(state["learner"])
    batches.load_state_dict(state["sampler"])
    assert [second.update(batches.next_batch()) for _ in range(3)] == losses[3:]
    for one, other in zip(second.parameters, whole.parameters, strict=True):
        assert torch.equal(one, other)
