"""Demonstrations, imitation, PPO and evaluation in every simulator, with one configuration except for ``sim:``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from sims.examples import is_installed
from sims.registry import SimulatorConfig, make_env
from sims.vector_env import VectorEnv
from tests.sims.recordings import write_lerobot, write_robomimic
from vla_rl.cli import main as cli
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.runs.metrics import read_metrics

BASE = Path(__file__).parents[1] / "data" / "any_sim.yaml"
PATIENT = {"step_timeout_s": 300.0, "reset_timeout_s": 600.0}  # other work may have the cores
SMALL = {"image_size": [48, 48], "num_envs": 2, "workers": PATIENT}
PUSHT = {
    "name": "gymnasium", "id": "gym_pusht:gym_pusht/PushT-v0", "images": {"top": "render"}, "num_envs": 2,
    "max_steps": 24, "workers": {"environment": "pusht", **PATIENT}, "instruction": "push the T onto its outline",
    "arguments": {"render_mode": "rgb_array", "visualization_width": 96, "visualization_height": 96},
    "reward": "shaped",
}  # fmt: skip


def recorded_hdf5(folder: Path, env: VectorEnv) -> list[str]:
    """Arguments of ``vla-rl data import`` for a robomimic file."""
    cameras = [f"{camera}={camera}_rgb" for camera in env.spec.cameras]
    source = write_robomimic(folder / "demo.hdf5", env, episodes=2, steps=12)
    return ["--source", str(source), "--state", "state", "--control-hz", "20", "--camera", *cameras]


def recorded_lerobot(folder: Path, env: VectorEnv) -> list[str]:
    source = write_lerobot(folder / "pusht", env, episodes=2, steps=12)
    return ["--source", str(source), "--state", "observation.state", "--camera", "top=observation.images.top"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """``sim``: the section. ``demonstrations``: where the simulator has no expert, arguments that import some.

    ``sparse``: without success there is no reward, so PPO does not change the policy.
    """

    sim: Callable[[], dict[str, Any]]
    needs: str
    demonstrations: Callable[[Path, VectorEnv], list[str]] | None = None
    sparse: bool = False


CASES = {
    "tabletop": Case(
        sim=lambda: {"name": "tabletop", "tasks": ["reach"], "reward": "shaped", "num_envs": 2}, needs="tabletop"
    ),
    "maniskill": Case(
        sim=lambda: {"name": "maniskill", "task": "PickCube-v1", "reward": "shaped", **SMALL}, needs="maniskill"
    ),
    "robosuite": Case(
        sim=lambda: {"name": "robosuite", "task": "Lift", "reward": "shaped", "max_steps": 60, **SMALL},
        needs="robosuite",
    ),
    "metaworld": Case(
        sim=lambda: {"name": "metaworld", "tasks": ["reach"], "reward": "shaped", "max_steps": 100, **SMALL},
        needs="metaworld",
    ),
    "pusht": Case(sim=lambda: PUSHT, needs="pusht", demonstrations=recorded_lerobot),
    "libero": Case(
        sim=lambda: {
            "name": "libero", "suite": "libero_object", "tasks": [0], "max_steps": 24, "fast_rendering": True, **SMALL,
        },
        needs="libero",
        demonstrations=recorded_hdf5,
        sparse=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(not is_installed(case.needs), reason=f"vla-rl sims install {case.needs}")
        )
        for name, case in CASES.items()
    ],
)
def test_only_the_simulator_changes(name: str, tmp_path: Path) -> None:
    case, run = CASES[name], tmp_path / "run"
    tree = yaml.safe_load(BASE.read_text()) | {"sim": case.sim()}
    if case.demonstrations is not None:
        tree["start"]["store"] = str(tmp_path / "store")
    config = tmp_path / "experiment.yaml"
    config.write_text(yaml.safe_dump(tree))
    experiment = load_config(Experiment, config)
    if case.demonstrations is not None:
        import_demonstrations(experiment.sim, case.demonstrations, tmp_path)

    cli.main(["train", str(config), "--run-dir", str(run)])

    result = json.loads((run / "result.json").read_text())
    assert result["rl"]["episodes"] == 2
    assert [record["iteration"] for record in read_metrics(run)] == [0, 1]
    assert not (run / "failures.jsonl").exists()
    (video,) = (run / "videos").glob("rl_*.mp4")
    assert video.stat().st_size > 500
    before, after = (load_file(next((run / place).glob("*.safetensors"))) for place in ("imitation/bundle", "bundle"))
    assert case.sparse or any(not torch.equal(before[key], after[key]) for key in before)
    assert load_config(Experiment, run / "config.yaml") == experiment


def import_demonstrations(sim: SimulatorConfig, record: Callable[[Path, VectorEnv], list[str]], folder: Path) -> None:
    env = make_env(sim)
    try:
        words = record(folder, env)
    finally:
        env.close()
    cli.main(["data", "import", str(folder / "store"), *words])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--sim.name", "metawrld"], "did you mean 'metaworld'?"),
        (["--sim.tasks", "[grasp]"], "got 'grasp', allowed are"),
        (["--sim.tsks", "[reach]"], "unknown key 'sim.tsks'; did you mean 'tasks'?"),
        (["--sim.name", "gymnasium"], "'sim.id' is required"),
    ],
)
def test_error_of_a_wrong_simulator_is_one_line(
    change: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", str(BASE), "--run-dir", "/nowhere", *change])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


def test_error_of_a_missing_simulator_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLA_RL_SIMS", str(tmp_path))
    if is_installed("robosuite"):
        pytest.skip("robosuite is in the interpreter of the tests")
    config = tmp_path / "x.yaml"
    config.write_text("sim: {name: robosuite, num_envs: 1}\n")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", str(config), "--run-dir", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "vla-rl: robosuite is not installed. Run: vla-rl sims install robosuite\n"
