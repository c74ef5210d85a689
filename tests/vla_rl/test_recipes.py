"""Every recipe for a published policy runs one iteration in a real simulator, at toy width."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from policies.bundle import save_bundle
from policies.denoising.kernels import FlowNoiseConfig, FlowSDEConfig
from policies.policy import RobotSpec
from policies.registry import build_policy
from tests.policies.pretrained.toy import DIFFUSION_POLICY, OPENVLA, OPENVLA_OFT, toy
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.runners.train import train

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
TOYS: dict[str, Any] = {
    "pi_rl_libero_pi0": toy("pi0", FlowSDEConfig(steps=3)),
    "pi_rl_libero_pi05": toy("pi05", FlowSDEConfig(steps=3)),
    "reinflow_libero_pi0": toy("pi0", FlowNoiseConfig(steps=3)),
    "smolvla_libero": toy("smolvla", FlowSDEConfig(steps=3)),
    "simplevla_rl_libero": OPENVLA_OFT,
    "rl4vla_maniskill_openvla": OPENVLA,
    "dppo_diffusion_policy": DIFFUSION_POLICY,
}
TABLETOP = "{name: tabletop, tasks: [reach], num_envs: 4, max_steps: 16}"
SMALLER = [
    *("--algorithm.iterations", "1", "--evaluation.episodes", "2", "--evaluation.validation_episodes", "2"),
    *("--evaluation.videos_per_task", "0", "--algorithm.update.minibatch", "8", "--algorithm.update.micro_batch", "4"),
]
OF_ALGORITHM = {
    "ppo": ["--algorithm.chunks", "2", "--algorithm.critic_warmup", "0"],
    "grpo": ["--algorithm.groups", "2", "--algorithm.group_size", "2", "--algorithm.min_success", "0"],
}


def test_every_recipe_has_a_toy() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(TOYS)


@pytest.mark.parametrize("name", TOYS)
def test_a_recipe_runs_an_iteration(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    probe = load_config(Experiment, RECIPES / f"{name}.yaml", ["--sim", "{name: tabletop, num_envs: 64}"])
    robot, bundle = RobotSpec.of(make_env(probe.sim).spec), tmp_path / "bundle"
    config = TOYS[name]
    if hasattr(config, "padded_dim"):
        config = replace(config, padded_dim=max(robot.state_dim, robot.action_dim))
    save_bundle(build_policy(config, robot), bundle)
    algorithm = OF_ALGORITHM[probe.algorithm.name]
    overrides = ["--sim", TABLETOP, "--start.path", str(bundle), *SMALLER, *algorithm]
    experiment = load_config(Experiment, RECIPES / f"{name}.yaml", overrides)
    train(experiment, tmp_path / "run", resume=False, command="")
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) >= 1 and metrics[-1]["iteration"] == 0
