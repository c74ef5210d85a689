"""The functions for programs: a run that a program started is one for the command line too."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import torch

from policies.bundle import save_bundle
from policies.policy import RobotSpec
from policies.registry import build_policy
from tests.vla_rl.scale_run import PPO, SIM, SMALL
from vla_rl.api import make_env, train
from vla_rl.cli.main import parse
from vla_rl.config.experiment import EvaluationConfig, Experiment, FromBundle


def test_the_command_of_a_run_of_a_program_goes_on_with_it(tmp_path: Path) -> None:
    env = make_env(SIM)
    torch.manual_seed(0)
    save_bundle(build_policy(SMALL, RobotSpec.of(env.spec)), tmp_path / "start")
    env.close()
    experiment = Experiment(
        sim=SIM,
        device="cpu",
        start=FromBundle(path=tmp_path / "start"),
        algorithm=replace(PPO, iterations=2),
        evaluation=EvaluationConfig(episodes=2, validate_every=0, videos_per_task=0),
    )
    folder = tmp_path / "my run"
    result = train(experiment, folder)
    words = shlex.split((folder / "command.txt").read_text())
    assert words[0] == "vla-rl"
    parse([*words[1:], "--resume", "--algorithm.iterations=3"]).run()
    assert result["rl"]["episodes"] == 2
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
