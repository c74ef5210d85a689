"""Every simulator's configuration leads to a world, and the health check really steps it."""

from __future__ import annotations

import pytest

from sims import registry
from sims.adapters.libero import LiberoConfig
from sims.adapters.metaworld import MetaworldConfig
from sims.errors import UserError
from sims.tabletop import TabletopConfig


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not registry.is_installed(name), reason=f"{name} is not installed"))
        for name in ("tabletop", "robosuite", "metaworld", "maniskill", "pusht")
    ],
)
def test_first_steps(name: str) -> None:
    said = registry.first_steps(name)
    assert "a step in" in said
    assert "1 cameras" in said or "2 cameras" in said


def test_what_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_RL_SIMS", "/nowhere")
    for name in ("robosuite", "metaworld", "maniskill", "libero"):
        if not registry.is_installed(name):
            with pytest.raises(UserError, match=f"sims install {name}"):
                registry.first_steps(name)


def test_splits_are_the_simulators_own() -> None:
    assert registry.splits(TabletopConfig())[:2] == ("train", "ood_combination")
    assert registry.splits(LiberoConfig()) == ("train", "benchmark")
    assert registry.splits(MetaworldConfig()) == ("train",)
    assert registry.with_split(LiberoConfig(), "benchmark").split == "benchmark"
    assert registry.with_split(MetaworldConfig(), "train") == MetaworldConfig()
    with pytest.raises(UserError, match="metaworld has no split 'ood_phrasing'; it has train"):
        registry.with_split(MetaworldConfig(), "ood_phrasing")


def test_the_benchmark_split_evaluates_its_fixed_starts() -> None:
    config = LiberoConfig(split="benchmark")
    starts = registry.evaluation_starts(config, num_tasks=10, seed=3, episodes=500)
    assert {(start.task, start.seed) for start in starts} == {(t, s) for t in range(10) for s in range(50)}
    few = registry.evaluation_starts(config, num_tasks=10, seed=3, episodes=20)
    assert sorted(start.task for start in few) == [task for task in range(10) for _ in range(2)]
    with pytest.raises(UserError, match="500 starts"):
        registry.evaluation_starts(config, num_tasks=10, seed=3, episodes=501)
    drawn = registry.evaluation_starts(LiberoConfig(), num_tasks=10, seed=3, episodes=20)
    assert min(start.seed for start in drawn) >= 50


def test_what_runs_in_workers_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "is_installed", lambda name: True)
    config, simulator = registry.pooled("robosuite", num_envs=3, image_size=0)
    assert (config.num_envs, config.cameras, simulator.__name__) == (3, (), "Robosuite")
    config, _ = registry.pooled("pusht", num_envs=2, image_size=128)
    assert config.arguments["visualization_width"] == 128
    with pytest.raises(UserError, match="no simulator 'tabletop' that runs in workers; there are robosuite"):
        registry.pooled("tabletop", num_envs=1, image_size=0)


def test_every_smallest_world_has_a_constructor() -> None:
    assert {type(config) for _, config in registry.SMALLEST.values()} == set(registry.CONSTRUCTORS)
