"""``vla-rl bench train``: stages of an iteration beside what their work takes alone."""

from pathlib import Path

import pytest
import torch

from policies.bundle import save_bundle
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from policies.residual.policy import ResidualPolicy
from sims.errors import UserError
from sims.tabletop import TabletopConfig, TabletopEnv
from vla_rl.bench.train import Measured, bench_train, time_rows, untrained
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config

CONFIG = """
sim: {name: tabletop, tasks: [reach], num_envs: 2, max_steps: 12, cameras: []}
start: {name: bundle, path: start}
algorithm: {name: ppo, iterations: 3, chunks: 2, update: {minibatch: 2, micro_batch: 1, epochs: 3}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    env = TabletopEnv(TabletopConfig(tasks=("reach",), num_envs=2, cameras=()))
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=4, hidden=(8,)), RobotSpec.of(env.spec))
    save_bundle(policy, folder / "start")
    env.close()
    (folder / "config.yaml").write_text(CONFIG)
    return folder / "config.yaml"


def test_achieved_over_attainable_of_an_experiment(config: Path) -> None:
    rows = {row["name"]: row for row in bench_train(config, device="cpu")}
    stages = {name for name, row in rows.items() if row["against"] == "alone / here"}
    assert stages == {"simulate", "render", "encode", "infer", "learn"}
    parts = sum(rows[name]["value"] * rows[name]["ratio"] for name in stages)
    assert parts == pytest.approx(rows["attainable iteration"]["value"])
    total = rows["iteration"]["value"]
    assert rows["achieved / attainable"]["value"] == pytest.approx(parts / total)
    assert sum(rows[name]["value"] for name in (*stages, "sync", "other") if name in rows) == pytest.approx(total)
    assert rows["transfers, unnamed"]["value"] == 0


def test_the_residual_is_measured_that_would_be_trained(config: Path) -> None:
    with_residual = config.with_name("residual.yaml")
    with_residual.write_text("extends: config.yaml\nstart: {residual: {scale: 0.1}}\n")
    experiment = load_config(Experiment, with_residual, ["--device", "cpu"])
    env = make_env(experiment.sim)
    assert isinstance(untrained(experiment, env), ResidualPolicy)
    env.close()
    rows = {row["name"]: row for row in bench_train(with_residual, device="cpu")}
    assert {name for name, row in rows.items() if row["against"]} >= {"simulate", "encode", "infer", "learn"}


def test_other_algorithms_are_refused(config: Path) -> None:
    other = config.with_name("grpo.yaml")
    other.write_text("extends: config.yaml\nalgorithm: {name: grpo, groups: 1, group_size: 2}\n")
    with pytest.raises(UserError, match="bench train measures algorithm ppo, got grpo"):
        bench_train(other, device="cpu")


def test_shares_by_hand() -> None:
    measured = Measured(total=10.0, seconds={"simulate": 4.0, "learn": 5.0, "sync": 0.5}, calls={}, steps=1.0)
    rows = {row["name"]: row for row in time_rows(measured, {"simulate": 3.0, "learn": 4.5})}
    assert (rows["simulate"]["ratio"], rows["learn"]["ratio"], rows["sync"]["ratio"]) == (0.75, 0.9, None)
    assert rows["other"]["value"] == 0.5
    assert rows["achieved / attainable"]["value"] == 0.75
    assert rows["most is lost in simulate"]["value"] == 1.0
