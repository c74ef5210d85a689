"""Simulators, recorded demonstrations, and training in a simulator as `vla-rl bench train` measures it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from episodes.store import EpisodeStore
from sims.devices.crossing import CROSSINGS, crossing
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.tabletop import backend as tabletop_backend
from sims.tabletop.mujoco_backend import MujocoBackend
from sims.tabletop.tasks.registry import all_tasks
from sims.vector_env import StartState
from tests.device.second_device import DEVICE
from tests.device.small_models import SIDES, record
from tests.worlds import PointEnv
from vla_rl.bench.train import bench_train
from vla_rl.bench.transfers import TransferCounter

SMALL = """
sim: {name: tabletop, tasks: [pick], num_envs: 2, image_size: [16, 16]}
start:
  policy:
    encoder: {width: 32, text_width: 16, image_widths: [8]}
    expert: {depth: 1}
algorithm: {chunks: 4, critic_warmup: 0, update: {minibatch: 8, micro_batch: 4, epochs: 1}}
"""


class OnSecondDevice(MujocoBackend):
    """The physics of C MuJoCo, whose tensors are on the device, as those of MuJoCo Warp are."""

    device = DEVICE

    @property
    def qpos(self) -> torch.Tensor:
        with crossing("observations"):
            return super().qpos.clone().to(DEVICE)

    def step(self, running: torch.Tensor, controls: torch.Tensor) -> None:
        with crossing("actions"):
            on_host = running.cpu(), controls.cpu()
        super().step(*on_host)

    def render(self, env_ids: Sequence[int]) -> torch.Tensor:
        with crossing("observations"):
            return super().render(env_ids).to(DEVICE)


def open_on_second_device(config: TabletopConfig) -> MujocoBackend:
    return OnSecondDevice(
        num_envs=config.num_envs,
        threads=1,
        cameras=config.cameras,
        image_size=config.image_size,
        renderer=config.renderer,
        shadows=config.shadows,
        detail=config.detail,
    )


@pytest.fixture
def tabletop(monkeypatch: pytest.MonkeyPatch) -> Iterator[TabletopEnv]:
    monkeypatch.setattr(tabletop_backend, "BACKENDS", {"mujoco": open_on_second_device})
    tasks = tuple(all_tasks())
    config = TabletopConfig(
        tasks=tasks,
        num_envs=len(tasks),
        demonstrator="human",
        acceleration_limits=True,
        action_delay=2,
        reward="shaped",
    )
    env = TabletopEnv(config)
    yield env
    env.close()


def test_every_tabletop_task_steps_without_waiting(tabletop: TabletopEnv) -> None:
    starts = [StartState(task=i, seed=i) for i in range(tabletop.spec.num_envs)]
    tabletop.reset(start=starts)
    expert = tabletop.expert(noise=1.0, seed=0)
    tabletop.step(expert.act())  # constants are made once
    tabletop.observe()
    with TransferCounter() as counter:
        for _ in range(3):
            step = tabletop.step(expert.act())
        obs = tabletop.observe()
    assert counter.unnamed == {}
    assert {step.reward.device, obs.images.device, obs.state.device, obs.instruction.device} == {DEVICE}
    captured = tabletop.capture([2, 0])
    tabletop.reset([0, 2], start=captured)
    assert torch.equal(tabletop.observe([2, 0]).state.cpu(), obs.state.cpu()[[0, 2]])


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES.keys())
def test_demonstrations_are_recorded(side: torch.device, tmp_path: Path) -> None:
    env = PointEnv(num_envs=4, device=side)
    store = EpisodeStore(tmp_path / "demonstrations", create=True)
    record(env, store)
    assert len(store.entries()) == 4


def test_bench_train_counts_only_named_transfers(tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(SMALL)
    rows = {row["name"]: row["value"] for row in bench_train(config, device="fakegpu")}
    assert rows["transfers, unnamed"] == 0
    assert rows["transfers, actions"] == 4  # one for each chunk
    assert {name for name in rows if name.startswith("transfers, ")} <= {
        "transfers, unnamed",
        *(f"transfers, {name}" for name in CROSSINGS),
    }
