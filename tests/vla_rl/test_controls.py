"""What the controls of an evaluation change."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vla_rl.runners.train
from policies.bundle import save_bundle
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from sims.adapters.libero import LiberoConfig
from sims.env_wrapper import EnvWrapper
from sims.errors import UserError
from sims.starts import StartSequence
from sims.vector_env import Observation, StartState
from tests.worlds import PointEnv
from vla_rl.config.controls import CONTROLS, Control
from vla_rl.config.experiment import EvaluationConfig, Experiment
from vla_rl.runners.checks import check_experiment
from vla_rl.runners.controls import make_change, why_not
from vla_rl.runners.evaluate import run_episodes
from vla_rl.runners.train import evaluate_controls
from vla_rl.runs.run_dir import open_run

OBS = Observation(
    images=torch.arange(4 * 2 * 3, dtype=torch.uint8).reshape(4, 2, 1, 1, 3),
    state=torch.ones(4, 5),
    instruction=PointEnv(num_envs=1).instructions[[0, 1, 2, 1]],
)
PARTS = ("images", "state", "instruction")


def changed(control: Control) -> Observation:
    """``OBS`` in episodes of all tasks of PointEnv."""
    starts = [StartState(task=task, seed=0) for task in range(3)]
    return make_change(control, PointEnv(num_envs=2), starts, torch.Generator().manual_seed(0))(OBS)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_changes_one_part(control: Control) -> None:
    obs = changed(control)
    different = {part for part in PARTS if not torch.equal(getattr(obs, part), getattr(OBS, part))}
    kind, part = control.split("_")
    assert different == {{"cameras": "images"}.get(part, part)}
    if kind == "blank":
        assert not getattr(obs, part).any()


def test_none_changes_nothing() -> None:
    assert changed("none") is OBS


def test_a_shuffled_instruction_is_a_different_one_of_the_episodes() -> None:
    given = changed("shuffled_instruction").instruction
    assert (given != OBS.instruction).any(1).all()
    assert {bytes(row) for row in given.numpy()} <= {bytes(row) for row in OBS.instruction.numpy()}


@pytest.mark.parametrize("num_envs", [1, 2, 8])
def test_who_follows_a_shuffled_instruction_fails(num_envs: int) -> None:
    """In episodes of two tasks, whichever run beside each other, and while the last one runs alone."""
    env = PointEnv(num_envs=num_envs)
    starts = [start for start in StartSequence("evaluation", seed=0, num_tasks=3).take(60) if start.task < 2]
    for control, least, most in (("none", 0.9, 1.0), ("shuffled_instruction", 0.0, 0.2)):
        result = run_episodes(env, Follower(env, control, starts), starts)
        assert least <= result.success.float().mean() <= most


class Follower:
    """Goes to the square that the instruction names."""

    def __init__(self, env: PointEnv, control: Control, starts: Sequence[StartState]) -> None:
        self.env, self.change = env, make_change(control, env, starts, torch.Generator().manual_seed(0))

    def begin(self, env_ids: Sequence[int]) -> None: ...

    def __call__(self, obs: Observation, env_ids: Sequence[int]) -> Tensor:
        ids, env = torch.tensor(env_ids), self.env
        named = (self.change(obs).instruction[:, None] == env.instructions).all(-1).long().argmax(1)
        way = (env.squares[ids, named] - env.point[ids]) / 0.1
        return (way / way.norm(dim=-1, keepdim=True).clamp(min=1))[:, None].repeat(1, 2, 1)


def test_swapped_cameras_are_in_reverse_order() -> None:
    assert torch.equal(changed("swapped_cameras").images[:, 0], OBS.images[:, 1])


def test_a_control_that_would_change_nothing_says_why() -> None:
    env = PointEnv(num_envs=2)
    one, two = ([StartState(task=task, seed=i) for i, task in enumerate(tasks)] for tasks in ((1, 1, 1), (1, 1, 0)))
    assert why_not("swapped_cameras", env, two) == "one camera"
    assert why_not("shuffled_instruction", env, one) == "one instruction"
    assert why_not("shuffled_instruction", env, two) == ""  # not in the same batch of environments, at first
    assert why_not("shuffled_instruction", PointEnv(num_envs=1), two) == ""
    assert not any(why_not(control, env, one) for control in CONTROLS if control.startswith("blank"))
    env.spec = dataclasses.replace(env.spec, cameras=())
    assert [control for control in CONTROLS if why_not(control, env, two) == "no camera"] == [
        "blank_images", "swapped_cameras",
    ]  # fmt: skip


class LiberoStarts(EnvWrapper):
    """PointEnv in place of LIBERO; ``seeds`` of the starts by split."""

    def __init__(self, config: LiberoConfig, seeds: dict[str, set[int]]) -> None:
        super().__init__(PointEnv(num_envs=4))
        self.seen = seeds.setdefault(config.split, set())
        assert config.suite_of_files  # UserError where LIBERO-PRO has none

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        self.seen |= {one.seed for one in start}
        super().reset(env_ids, start=start)


def of_splits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sim: LiberoConfig
) -> tuple[dict[str, set[int]], dict[str, dict]]:
    """(seeds of the starts by split, what ``evaluate_controls`` returns)."""
    seeds: dict[str, set[int]] = {}
    env = LiberoStarts(sim, seeds)
    monkeypatch.setattr(vla_rl.runners.train, "make_env", lambda config: LiberoStarts(config, seeds))
    experiment = Experiment(sim=sim, evaluation=EvaluationConfig(control_episodes=6), device="cpu")
    run = open_run(experiment, folder, resume=False, command="")
    save_bundle(GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec)), run.bundle)
    with run.lock:
        return seeds, evaluate_controls(run, env)


@pytest.mark.parametrize("split", ["train", "standard"])
def test_every_split_is_evaluated_from_its_own_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """LIBERO publishes those of seeds 0 to 49; ``train`` has others."""
    seeds, found = of_splits(tmp_path / "run", monkeypatch, LiberoConfig(split=split))
    assert set(found["splits"]) == set(seeds) - {split}
    assert seeds["standard"] == {0, 1} == seeds["pro_language"]
    assert min(seeds["train"]) >= 50


def test_a_split_that_cannot_be_made_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a whole training nothing else may be lost for it."""
    _, found = of_splits(tmp_path / "run", monkeypatch, LiberoConfig(suite="libero_90"))
    assert found["splits"]["standard"]["episodes"] == 6
    assert found["splits"]["pro_language"] is None
    assert "LIBERO-PRO has no pro_language of libero_90" in found["not_applicable"]["pro_language"]


def test_more_episodes_than_a_split_has_are_refused_before_training(tmp_path: Path) -> None:
    env = PointEnv(num_envs=2)
    save_bundle(GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec)), tmp_path / "start")
    evaluation = EvaluationConfig(control_episodes=600)
    experiment = Experiment(sim=LiberoConfig(split="train"), evaluation=evaluation, device="cpu")
    with pytest.raises(UserError, match=r"'evaluation.control_episodes': the benchmark has 150 starts"):
        check_experiment(experiment, env, start=tmp_path / "start")
