"""The registry of simulators, and the health check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from sims import examples, registry
from sims.adapters.isaaclab import IsaacLabConfig
from sims.adapters.libero import LiberoConfig
from sims.adapters.metaworld import MetaworldConfig
from sims.errors import UserError
from sims.tabletop import TabletopConfig


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not examples.is_installed(name), reason=f"{name} is not installed"))
        for name in ("tabletop", "robosuite", "metaworld", "maniskill", "pusht")
    ],
)
def test_check_simulator(name: str) -> None:
    report = examples.check_simulator(name)
    assert "a step in" in report
    assert "1 cameras" in report or "2 cameras" in report


def test_error_of_a_missing_simulator_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_RL_SIMS", "/nowhere")
    for name in ("robosuite", "metaworld", "maniskill", "libero"):
        if not examples.is_installed(name):
            with pytest.raises(UserError, match=f"sims install {name}"):
                examples.check_simulator(name)


def test_splits_are_the_simulators_own() -> None:
    assert registry.splits(TabletopConfig())[:2] == ("train", "ood_combination")
    assert registry.splits(LiberoConfig())[:3] == ("train", "standard", "pro_language")
    assert registry.splits(MetaworldConfig()) == ("train",)
    assert registry.with_split(LiberoConfig(), "standard").split == "standard"
    assert registry.with_split(MetaworldConfig(), "train") == MetaworldConfig()
    with pytest.raises(UserError, match="metaworld has no split 'ood_phrasing'; it has train"):
        registry.with_split(MetaworldConfig(), "ood_phrasing")


def test_standard_split_evaluates_the_fixed_starts() -> None:
    config = LiberoConfig(split="standard")
    starts = registry.evaluation_starts(config, num_tasks=10, seed=3, episodes=500)
    assert {(start.task, start.seed) for start in starts} == {(t, s) for t in range(10) for s in range(50)}
    every = registry.evaluation_starts(config, num_tasks=10, seed=3, episodes=None)
    assert len(every) == 500
    few = registry.evaluation_starts(config, num_tasks=10, seed=3, episodes=20)
    assert sorted(start.task for start in few) == [task for task in range(10) for _ in range(2)]
    with pytest.raises(UserError, match="500 starts"):
        registry.evaluation_starts(config, num_tasks=10, seed=3, episodes=501)
    drawn = registry.evaluation_starts(LiberoConfig(), num_tasks=10, seed=3, episodes=20)
    assert min(start.seed for start in drawn) >= 50


def test_protocol() -> None:
    changed = LiberoConfig(tasks=(3,), max_steps=10, num_envs=2, split="train")
    assert registry.under_protocol(changed, "standard") == LiberoConfig(num_envs=2, split="standard")
    with pytest.raises(UserError, match="metaworld publishes no starts, so it has no protocol 'standard'"):
        registry.under_protocol(MetaworldConfig(), "standard")


def test_settings_that_published_numbers_belong_to() -> None:
    assert registry.is_under_protocol(LiberoConfig(split="standard", num_envs=2))
    assert registry.is_under_protocol(LiberoConfig(split="pro_swap"))
    for other in (LiberoConfig(split="standard", tasks=(0,)), LiberoConfig(split="train"), MetaworldConfig()):
        assert not registry.is_under_protocol(other)


def test_evaluation_suites() -> None:
    config = LiberoConfig(tasks=(3,), max_steps=10, num_envs=2)
    suites = registry.evaluation_suites(config, ("all",))
    assert [suite.suite for suite in suites] == ["libero_spatial", "libero_object", "libero_goal", "libero_10"]
    assert {(suite.tasks, suite.max_steps, suite.num_envs) for suite in suites} == {((), None, 2)}
    assert [suite.suite for suite in registry.evaluation_suites(config, ("90", "libero_goal"))] == [
        "libero_90",
        "libero_goal",
    ]
    assert len(registry.evaluation_suites(config, ("spatial", "libero_spatial"))) == 1  # its episodes count once
    with pytest.raises(UserError, match="LIBERO has no suite 'libero_11'; it has libero_spatial"):
        registry.evaluation_suites(config, ("libero_11",))
    with pytest.raises(UserError, match="tabletop has no evaluation suites, got all"):
        registry.evaluation_suites(TabletopConfig(), ("all",))
    assert registry.score_table(TabletopConfig(), {"tabletop": 1.0}) is None


def test_optional_methods_of_a_configuration() -> None:
    assert registry.video_config(MetaworldConfig(), image_size=256, num_envs=2) is None
    larger = registry.video_config(TabletopConfig(split="ood_phrasing"), image_size=256, num_envs=2)
    assert larger == TabletopConfig(split="ood_phrasing", image_size=(256, 256), num_envs=2)
    assert registry.object_locator(MetaworldConfig(), ("corner2",)) is None
    assert registry.object_locator(TabletopConfig(), ("wrist",)) is None
    locate = registry.object_locator(TabletopConfig(), ("wrist", "agent"))
    assert locate is not None
    blank = torch.full((2, 2, 64, 64, 3), 128, dtype=torch.uint8)
    assert locate(blank, ["pick up the red block", "wait"]).isnan().all()


def test_examples_for_the_throughput_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "is_installed", lambda name: True)
    config, simulator = examples.worker_example("robosuite", num_envs=3, image_size=0)
    assert (config.num_envs, config.cameras, simulator.__name__) == (3, (), "Robosuite")
    config, _ = examples.worker_example("pusht", num_envs=2, image_size=128)
    assert config.arguments["visualization_width"] == 128
    with pytest.raises(UserError, match="no simulator 'tabletop' that runs in worker processes; there are robosuite"):
        examples.worker_example("tabletop", num_envs=1, image_size=0)


@dataclass(frozen=True, kw_only=True)
class Bare:
    name: Literal["bare"] = "bare"
    num_envs: int = 4


@dataclass(frozen=True, kw_only=True)
class Needy(Bare):
    name: Literal["needy"] = "needy"  # type: ignore[assignment]
    level: int


def test_examples_of_registered_simulators_need_no_settings_of_cameras() -> None:
    for image_size in (0, 64):
        assert examples._with_cameras(Bare)(3, image_size) == Bare(num_envs=3)
    with pytest.raises(UserError, match=r"^needy: Needy.level has no default; give it one"):
        examples._with_cameras(Needy)(3, 64)


def test_every_built_in_simulator_has_an_example() -> None:
    missing = set(registry.BUILT_IN) - {type(example.smallest) for example in examples.EXAMPLES.values()}
    assert not missing, f"add an Example to sims/examples.py for {missing}"
    assert examples.EXAMPLES["isaaclab"].smallest == IsaacLabConfig(num_envs=2)
