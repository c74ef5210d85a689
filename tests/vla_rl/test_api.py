"""The functions for programs: a run that a program started is one for the command line too."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from policies.bundle import read_bundle_info, save_bundle
from policies.policy import RobotSpec
from policies.registry import build_policy
from sims.env_wrapper import EnvWrapper
from sims.subproc.vector_env import SubprocVectorEnv
from sims.tabletop import TabletopConfig
from tests.policies.small_configs import CONFIGS
from tests.sims.counting import Counting, PublishedConfig
from tests.vla_rl.scale_run import PPO, SIM, SMALL
from vla_rl.api import make_env, roll_out, train
from vla_rl.cli.main import parse
from vla_rl.config.experiment import EvaluationConfig, Experiment, FromBundle


def test_a_benchmark_that_publishes_its_starts_is_rolled_out_from_these() -> None:
    env = SubprocVectorEnv(PublishedConfig(num_envs=3, max_steps=4), Counting)
    try:
        wrapped = EnvWrapper(env)
        policy = build_policy(CONFIGS["gaussian"], RobotSpec.of(env.spec))
        assert roll_out(policy, wrapped, episodes=3).task.tolist() == [0, 1, 0]
        assert [(start.task, start.seed) for start in env.capture()] == [(0, 7), (1, 7), (0, 11)]
    finally:
        env.close()


def further(bundle: Path, sim: TabletopConfig) -> Experiment:
    """Two iterations of PPO from ``bundle``."""
    return Experiment(
        sim=sim,
        device="cpu",
        start=FromBundle(path=bundle),
        algorithm=replace(PPO, iterations=2),
        evaluation=EvaluationConfig(episodes=2, validate_every=0, videos_per_task=0),
    )


def test_the_command_of_a_run_of_a_program_goes_on_with_it(tmp_path: Path) -> None:
    env = make_env(SIM)
    torch.manual_seed(0)
    save_bundle(build_policy(SMALL, RobotSpec.of(env.spec)), tmp_path / "start")
    env.close()
    experiment = further(tmp_path / "start", SIM)
    folder = tmp_path / "my run"
    result = train(experiment, folder)
    words = shlex.split((folder / "command.txt").read_text())
    assert words[0] == "vla-rl"
    parse([*words[1:], "--resume", "--algorithm.iterations=3"]).run()
    assert result["rl"]["episodes"] == 2
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0)])
def test_a_bundle_that_is_trained_further_names_the_action_delay_of_its_last_simulator(
    tmp_path: Path, before: int, now: int
) -> None:
    sim = replace(SIM, action_delay=now)
    env = make_env(sim)
    robot = replace(RobotSpec.of(env.spec), action_delay=before)
    env.close()
    torch.manual_seed(0)
    save_bundle(build_policy(SMALL, robot), tmp_path / "start")
    train(further(tmp_path / "start", sim), tmp_path / "run")
    for bundle in ("imitation/bundle", "bundle"):
        assert read_bundle_info(tmp_path / "run" / bundle).robot.action_delay == now
