"""Names of the videos of a run's evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from tests.worlds import PointEnv
from vla_rl.config.experiment import EvaluationConfig, Experiment
from vla_rl.runners.videos import file_name, write_task_videos


def test_every_task_has_a_name_of_its_own_that_a_file_system_takes() -> None:
    """Instructions are UTF-8 of any length."""
    tasks = (
        "把红色方块推到盘子上",
        "Положи кубик в коробку",
        "Put A on B.",
        "put a on b!",
        "pick up the red cube that lies between the two plates and " * 5,
    )
    names = {file_name(number, task) for number, task in enumerate(tasks)}
    assert len(names) == len(tasks)
    assert max(len(name.encode()) for name in names) < 100
    assert {"0", "2_put_a_on_b", "3_put_a_on_b"} < names


@pytest.mark.parametrize("prefix", ["bc", "rl"])
def test_videos_of_an_earlier_evaluation_do_not_stay_beside_the_new_ones(tmp_path: Path, prefix: str) -> None:
    """As where a run goes on with fewer ``videos_per_task``."""
    for name in ("bc_0_reach.mp4", "rl_0_reach.mp4", "rl_0_reach_1.mp4"):
        (tmp_path / name).touch()
    env = PointEnv(num_envs=2)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec))
    experiment = Experiment(evaluation=EvaluationConfig(videos_per_task=0))
    assert write_task_videos(policy, experiment, env, tmp_path, prefix=prefix) == []
    assert {path.name.partition("_")[0] for path in tmp_path.iterdir()} == {"bc", "rl"} - {prefix}
