"""Recorded episodes in, policy and evaluated world model out, with no simulator in the configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from episodes.store import EpisodeStore
from policies.bundle import read_bundle_info
from policies.device import CPU
from policies.policy import RobotSpec
from policies.residual.policy import residual_on
from sims.errors import UserError
from sims.tabletop.config import CAMERAS
from tests import dot_episodes
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.cli.arguments import load_experiment
from vla_rl.cli.main import main
from vla_rl.cli.world_model import Drive, Evaluate, Fit, Imagine, WorldModelCommand
from vla_rl.config.experiment import Imitation
from vla_rl.runners.checks import SpecOnly
from vla_rl.runners.imagined_success import whole_episodes
from vla_rl.runners.imitation import cloning_source, new_policy
from vla_rl.runners.logs import recorded_spec
from vla_rl.runners.reinforce import with_demonstrations
from vla_rl.runners.world_model import WORLD_MODEL_FILE, open_clips_for, time_limits
from vla_rl.runs.listing import summarize
from vla_rl.runs.run_dir import open_run
from world_models.bundle import load_world_model, save_world_model
from world_models.data.clip import HELD_OUT, Part
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.action_sequences import startable

CONFIG = """\
sim: {name: none}
start:
  store: store
  policy: {encoder: {width: 32, text_width: 32}, expert: {depth: 1}}
  bc: {steps: 2, batch_size: 4}
imagination:
  stores: [store]
  model:
    dynamics: {action_horizon: 4, width: 8, deep_width: 16, blocks: 1, deep_blocks: 1, condition: 16}
    kinematics_steps: 2
    fit: {steps: 2, batch_size: 2}
    reward_model:
      encoder: {width: 32, text_width: 32}
      steps: 2
      batch_size: 8
      imagined_clips: 4
      min_successes: 1
    imagined_env: {num_envs: 4, reward_every: 2}
"""


@pytest.mark.slow
def test_a_world_model_is_fitted_and_evaluated_without_a_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dot_episodes.store(tmp_path / "store", 60)
    config, world = tmp_path / "logs.yaml", str(tmp_path / "world")
    config.write_text(CONFIG)
    main(["imitate", str(config), "--out", str(tmp_path / "cloned")])
    main(["world-model", "fit", str(config), "--out", world])
    main(["world-model", "imagine", str(config), "--out", world])
    capsys.readouterr()
    bundle = str(tmp_path / "cloned" / "bundle")
    main(["world-model", "evaluate", str(config), "--out", world, "--bundles", bundle, "--json"])
    report = json.loads(capsys.readouterr().out)
    (row,) = report["policies"]
    assert row["real"] is None
    low, high = row["interval"]
    assert low - 1e-9 <= row["imagined"] <= high + 1e-9
    assert row["episodes"] == report["episodes"]
    assert report["delta_success"] is not None  # of the recorded actions


TABLETOP = """\
extends: {tiny}
sim: {{tasks: [reach], max_steps: 32}}
"""
TRAINED = """\
extends: {logs}
algorithm:
  name: ppo
  iterations: 1
  chunks: 1
  critic_warmup: 0
  update: {{minibatch: 4, micro_batch: 4, epochs: 1, average: 0.9}}
imagination:
  model:
    dynamics: {{action_horizon: 8}}
    imagined_env: {{branch_steps: 8}}
  thresholds: {{stop_below_auc: 0.0}}
evaluation: {{videos_per_task: 0}}
"""


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    """What a command prints with --json."""
    main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_from_a_lerobot_data_set_to_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sequence of docs/world-models.md: data set, store, train without a simulator, and only then the simulator."""
    simulator, logs, config = (tmp_path / f"{name}.yaml" for name in ("simulator", "logs", "trained"))
    simulator.write_text(TABLETOP.format(tiny=Path(__file__).parents[1] / "data" / "tiny.yaml"))
    logs.write_text(
        CONFIG.replace("[store]", f"[{tmp_path / 'store'}]").replace("store: store", f"store: {tmp_path / 'store'}")
    )
    config.write_text(TRAINED.format(logs=logs))
    answer(
        capsys,
        "collect",
        simulator,
        "--episodes",
        "40",
        "--out",
        tmp_path / "recorded",
        "--failures",
        "--start.noise",
        "1.0",
    )
    answer(capsys, "data", "export", tmp_path / "recorded", "--out", tmp_path / "lerobot")
    cameras = ["--camera", *(f"{name}=observation.images.{name}" for name in CAMERAS)]
    answer(
        capsys, "data", "import", tmp_path / "store", "--source", tmp_path / "lerobot", *cameras,
        "--state", "observation.state", "--task", "reach",
    )  # fmt: skip
    result = answer(capsys, "train", config, "--run-dir", tmp_path / "run")
    assert result["trained"]
    assert {"before", "after"} == set(result["imagined"])
    assert result["imagined"]["after"]["episodes"] == result["world_model"]["episodes"] == result["episodes"]
    assert "bc" not in result  # no success but an imagined one
    stages = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert sum(result["wall_s"].values()) == pytest.approx(sum(one["wall_s"] for one in stages.values()), abs=0.1)
    info = read_bundle_info(tmp_path / "run" / "bundle")
    assert info.provenance.parent == read_bundle_info(tmp_path / "run" / "imitation" / "bundle").sha256
    assert summarize(tmp_path / "run").success is None
    page = (tmp_path / "run" / "report.html").read_text()
    assert "imagined success after training" in page
    assert "no simulator and no robot was asked" in page
    evaluated = answer(capsys, "eval", tmp_path / "run" / "bundle", "--sim", simulator, "--episodes", "2")
    assert evaluated["episodes"] == 2


def test_held_out_episodes_are_not_cloned(tmp_path: Path) -> None:
    store = dot_episodes.store(tmp_path / "store", 60)
    config = tmp_path / "logs.yaml"
    config.write_text(CONFIG)
    source = cloning_source(load_experiment(config), store.path)
    cloned = {entry.seed for entry in store.select(source.where)}
    evaluated = {entry.seed for entry in ClipSampler([store], action_horizon=4, part="held_out").entries}
    succeeded = {entry.seed for entry in store.select() if entry.success}
    assert evaluated & succeeded
    assert cloned == succeeded - evaluated


def test_episodes_that_imagination_cannot_start_from_are_refused_before_anything_is_fitted(tmp_path: Path) -> None:
    """A task whose only start is held out; keyframes further from the end than any episode is long."""
    store, config = dot_episodes.store(tmp_path / "store", 60), tmp_path / "logs.yaml"
    config.write_text(CONFIG)
    assert recorded_spec(load_experiment(config)).tasks == ("go",)
    too_early = ("--imagination.model.keyframes.before_end", "[40, 60]")
    with pytest.raises(
        UserError,
        match="no episode of task 'go' whose outcome is known was observed 40 to 60 control",
    ):
        recorded_spec(load_experiment(config, too_early))
    rare = EpisodeStore(tmp_path / "rare", create=True)
    rare.add_all(dataclasses.replace(dot_episodes.episode(seed), task="rare") for seed in range(60))
    store.add(rare.read(next(entry.id for entry in rare.select() if entry.fold == HELD_OUT)))
    with pytest.raises(UserError, match=r"no recorded episode of task 'rare' to start from; recorded are \['go'\]"):
        recorded_spec(load_experiment(config))


def test_imagined_episodes_are_as_long_as_the_longest_recorded_one_of_their_task(tmp_path: Path) -> None:
    """Held out or not, in training as in the evaluation of bundles."""
    store, config = EpisodeStore(tmp_path / "store", create=True), tmp_path / "logs.yaml"
    store.add_all(dot_episodes.episode(seed, drift=(0.6, -0.6, 0.0)[seed % 3]) for seed in range(60))
    long = [dataclasses.replace(dot_episodes.episode(seed, steps=24), task="wait") for seed in range(60)]
    store.add_all(long)
    config.write_text(CONFIG)
    limits = recorded_spec(load_experiment(config)).limits
    assert (limits["go"], limits["wait"]) == (14, max(len(one.action) for one in long))
    assert limits["wait"] > 14
    settings = load_experiment(config).imagination
    assert settings is not None
    dynamics, reward_model = dot_episodes.models()
    for name in ("reward", "success", "failed"):
        getattr(reward_model, f"{name}_threshold").fill_(1.0)
    path = tmp_path / WORLD_MODEL_FILE
    save_world_model(dynamics, reward_model, path, reference_error=1.0, metrics={}, reward_every=2)
    fitted = load_world_model(path)
    assert time_limits(None, fitted, [store.path]) == limits
    clips = open_clips_for(fitted, [store.path], "held_out")
    env, starts = whole_episodes(settings.model, fitted, clips, startable(clips, None), limits=limits, count=2)
    assert [start.task for start in starts] == [0, 1]
    env.reset(start=starts)
    truncated = torch.stack([env.step(torch.zeros(2, 2)).truncated for _ in range(limits["wait"])])
    assert (~truncated).sum(0).tolist() == [limits["go"] - 1, limits["wait"] - 1]


def test_held_out_episodes_are_in_no_replay(tmp_path: Path) -> None:
    store = dot_episodes.store(tmp_path / "store", 60)
    config = tmp_path / "logs.yaml"
    config.write_text(CONFIG.replace("start:\n", "algorithm: {name: off_policy}\nstart:\n  residual: {}\n"))
    experiment = load_experiment(config)
    spec = recorded_spec(experiment)
    assert isinstance(experiment.start, Imitation)
    assert experiment.start.residual is not None
    policy = new_policy(experiment.start, RobotSpec.of(spec), seed=0, device=CPU)
    run = open_run(experiment, tmp_path / "run", resume=False, command="vla-rl train logs.yaml")
    with run.lock:
        configured = with_demonstrations(run).algorithm
    learner = build_algorithm(configured, residual_on(policy, experiment.start.residual), SpecOnly(spec), seed=0)
    assert isinstance(learner, OffPolicy)
    assert learner.demonstrations is not None
    replayed = {tuple(one.tolist()) for one in learner.demonstrations.entries().action[:, 0]}

    def shown(part: Part) -> list[bool]:
        clips = ClipSampler([store], action_horizon=4, part=part)
        return [tuple(clips.actions(i)[0].tolist()) in replayed for i in range(len(clips.entries))]

    assert all(shown("fit") + shown("calibration"))
    assert not any(shown("held_out"))


@pytest.mark.parametrize("verb", [Fit, Evaluate, Imagine, Drive])
def test_the_commands_take_the_episodes_that_training_takes(verb: type[WorldModelCommand], tmp_path: Path) -> None:
    """From logs alone ``start.store``, unless others are given; with a simulator it holds demonstrations alone."""
    logs, (arm, other, third) = Path("imagined_logs"), (tmp_path / name for name in ("arm", "other", "third"))
    given, others = ("--start.store", str(arm)), ("--imagination.stores", f"[{other}]")
    assert verb(config=logs, overrides=given).opened()[2] == (arm,)
    assert verb(config=logs, overrides=(*given, *others)).opened()[2] == (other,)
    assert verb(config=logs, overrides=(*given, *others), episodes=(third,)).opened()[2] == (third,)
    for config, overrides in ((logs, ("--start.store", "null")), (Path("imagined_reach"), given)):
        with pytest.raises(UserError, match="no episodes: give stores with --episodes, or as"):
            verb(config=config, overrides=overrides).opened()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["start.store", "imagination.stores"], "give recorded episodes as start.store or imagination.stores"),
        (["imagination"], "this needs a simulator: name one in section sim, or add a section imagination"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: list[str], message: str
) -> None:
    settings = yaml.safe_load(CONFIG)
    for path in changed:
        *sections, name = path.split(".")
        del (settings[sections[0]] if sections else settings)[name]
    config = tmp_path / "logs.yaml"
    config.write_text(yaml.safe_dump(settings))
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(config), "--run-dir", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
