"""Categorical and Gaussian policies learn through the interface that denoising policies use."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.policy_families import ALGORITHMS, POLICIES
from tests.family_learning import clone, improve, success
from tests.reach_env import ReachEnv


@pytest.mark.parametrize("name", ["gaussian", pytest.param("categorical", marks=pytest.mark.slow)])
def test_cloned_then_improved_by_ppo_and_grpo(name: str) -> None:
    torch.set_num_threads(1)
    base = clone(POLICIES[name], ReachEnv, episodes=6, steps=60, seed=0)
    before = success(base, ReachEnv)
    for algorithm in (ALGORITHMS["ppo"], replace(ALGORITHMS["grpo"], iterations=15)):
        improved: Any = improve(copy.deepcopy(base), ReachEnv(num_envs=96), algorithm, seed=0)
        assert success(improved, ReachEnv) > before + 0.3
