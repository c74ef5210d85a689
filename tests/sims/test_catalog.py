"""Every simulator's configuration leads to a world, and the health check really steps it."""

from __future__ import annotations

import pytest

from sims import catalog
from sims.errors import UserError
from sims.libero import LiberoConfig
from sims.metaworld import MetaworldConfig
from sims.tabletop import TabletopConfig


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not catalog.is_installed(name), reason=f"{name} is not installed"))
        for name in ("tabletop", "robosuite", "metaworld", "maniskill", "pusht")
    ],
)
def test_first_steps(name: str) -> None:
    said = catalog.first_steps(name)
    assert "a step in" in said
    assert "1 cameras" in said or "2 cameras" in said


def test_what_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_RL_SIMS", "/nowhere")
    for name in ("robosuite", "metaworld", "maniskill", "libero"):
        if not catalog.is_installed(name):
            with pytest.raises(UserError, match=f"sims install {name}"):
                catalog.first_steps(name)


def test_splits_are_the_simulators_own() -> None:
    assert catalog.splits(TabletopConfig())[:2] == ("train", "ood_combination")
    assert catalog.splits(LiberoConfig()) == ("train", "benchmark")
    assert catalog.splits(MetaworldConfig()) == ("train",)
    assert catalog.with_split(LiberoConfig(), "benchmark").split == "benchmark"
    assert catalog.with_split(MetaworldConfig(), "train") == MetaworldConfig()
    with pytest.raises(UserError, match="metaworld has no split 'ood_phrasing'; it has train"):
        catalog.with_split(MetaworldConfig(), "ood_phrasing")


def test_the_benchmark_split_evaluates_its_fixed_starts() -> None:
    config = LiberoConfig(split="benchmark")
    starts = catalog.evaluation_starts(config, num_tasks=10, seed=3, episodes=500)
    assert {(start.task, start.seed) for start in starts} == {(t, s) for t in range(10) for s in range(50)}
    few = catalog.evaluation_starts(config, num_tasks=10, seed=3, episodes=20)
    assert sorted(start.task for start in few) == [task for task in range(10) for _ in range(2)]
    with pytest.raises(UserError, match="500 starts"):
        catalog.evaluation_starts(config, num_tasks=10, seed=3, episodes=501)
    drawn = catalog.evaluation_starts(LiberoConfig(), num_tasks=10, seed=3, episodes=20)
    assert min(start.seed for start in drawn) >= 50


def test_what_runs_in_workers_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "is_installed", lambda name: True)
    config, simulator = catalog.pooled("robosuite", num_envs=3, image_size=0)
    assert (config.num_envs, config.cameras, simulator.__name__) == (3, (), "Robosuite")
    config, _ = catalog.pooled("pusht", num_envs=2, image_size=128)
    assert config.arguments["visualization_width"] == 128
    with pytest.raises(UserError, match="no simulator 'tabletop' that runs in workers; there are robosuite"):
        catalog.pooled("tabletop", num_envs=1, image_size=0)


def test_every_smallest_world_has_a_constructor() -> None:
    assert {type(config) for _, config in catalog.SMALLEST.values()} == set(catalog.CONSTRUCTORS)
