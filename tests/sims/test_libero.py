"""LIBERO's own code, task files and initial states, with placeholders for its assets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.adapters.libero import MAX_STEPS, Libero, LiberoConfig, axis_angle, fixed_starts, score_table
from sims.errors import UserError
from sims.install import interpreter
from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import StartState
from tests.sims.libero_placeholder_assets import package, placeholder_assets

installed = pytest.mark.skipif(interpreter("libero") is None, reason="vla-rl sims install libero")


def test_score_table_has_the_published_layout() -> None:
    scores = {"libero_spatial": 0.847, "libero_object": 0.884, "libero_goal": 0.792, "libero_10": 0.537}
    header, _, values = score_table(scores).splitlines()
    assert header.split(" | ") == ["Spatial", "Object", "Goal", "Long", "Average"]
    assert [float(value) for value in values.split(" | ")] == [84.7, 88.4, 79.2, 53.7, 76.5]
    assert "Average" not in score_table({"libero_10 with placeholder assets": 1.0})
    assert "placeholder" in score_table({"libero_10 with placeholder assets": 1.0})


def test_rotation_vectors() -> None:
    np.testing.assert_allclose(axis_angle([0.0, 0.0, 0.0, 1.0]), [0, 0, 0])
    np.testing.assert_allclose(axis_angle([0.0, math.sin(0.3), 0.0, math.cos(0.3)]), [0, 0.6, 0])


def test_evaluation_order() -> None:
    starts = fixed_starts(10)
    assert len(starts) == 500
    assert starts[:2] == [(0, 0), (0, 1)]
    assert starts[50] == (1, 0)


@installed
def test_error_of_missing_assets_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"(?s)looked for a folder 'scenes' in {tmp_path}.*libero.md"):
        SubprocVectorEnv(LiberoConfig(assets=str(tmp_path), num_envs=1), Libero)


@pytest.fixture(scope="module")
def kitchen() -> Iterator[SubprocVectorEnv]:
    """Two kitchens, a study and two living rooms of the long suite."""
    config = LiberoConfig(
        suite="libero_10", tasks=(0, 2, 3, 5, 9), assets=str(placeholder_assets()), image_size=(48, 64), num_envs=2,
        kept_tasks=1, fast_rendering=True,
    )  # fmt: skip
    env = SubprocVectorEnv(config, Libero)
    yield env
    env.close()


@installed
def test_placeholder_assets_are_in_the_name_and_fingerprint(kitchen: SubprocVectorEnv) -> None:
    assert kitchen.spec.name == "libero_10 with placeholder assets"
    assert kitchen.spec.fingerprint["assets"] == "placeholder, not LIBERO's"
    assert kitchen.spec.max_steps == MAX_STEPS["libero_10"] == 520
    assert kitchen.spec.tasks[1] == "turn on the stove and put the moka pot on it"


@installed
def test_every_scene_starts_and_renders(kitchen: SubprocVectorEnv) -> None:
    for task in range(5):
        kitchen.reset(start=[StartState(task=task, seed=0), StartState(task=task, seed=1)])
        obs = kitchen.observe()
        assert (obs.images.float().std((2, 3, 4)) > 5).all()
        assert not torch.equal(obs.images[0], obs.images[1])
        chunk = kitchen.advance(torch.tensor([0.0, 0, 1, 0, 0, 0, -1]).expand(2, 5, 7), 1.0)
        assert not chunk.done.any()
        assert (kitchen.observe().state[:, 2] > obs.state[:, 2] + 0.01).all()  # the hand went up


@installed
def test_fixed_starts_are_those_of_the_benchmark(kitchen: SubprocVectorEnv) -> None:
    """The third start has the robot's joints of the third state in LIBERO's file."""
    seeds = [2, 3, 2, 10**15, 10**15 + 1]
    shown = []
    for seed in seeds:
        kitchen.reset([0], start=[StartState(task=0, seed=seed)])
        shown.append(kitchen.observe([0]))
    assert torch.equal(shown[0].images, shown[2].images)
    for i, j in ((0, 1), (0, 3), (3, 4)):
        assert not torch.equal(shown[i].images, shown[j].images)
    states = next((package() / "init_files" / "libero_10").glob("LIVING_ROOM_SCENE2_put_both_the_alphabet*"))
    assert torch.load(states, weights_only=False).shape == (50, 123)
