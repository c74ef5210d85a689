"""Reinforcement learning in a world model, whole and small: every stage happens, nothing is learned."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.world_model import one_seed
from episodes.recorder import RecordedEnv
from episodes.store import EpisodeStore
from policies.bundle import read_bundle_info, save_bundle
from policies.registry import build_policy
from policies.residual.policy import ResidualConfig, residual_on
from sims.errors import UserError
from sims.registry import make_env
from sims.vector_env import Observation, StartState, VectorEnv
from tests import dot_episodes
from tests.policies.small_configs import CONFIGS
from tests.vla_rl.command import vla_rl
from tests.worlds import ChainEnv
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.off_policy_settings import OffPolicyConfig, RecapConfig
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.cli.arguments import load_experiment
from vla_rl.cli.main import main
from vla_rl.config.environments import NoSimulatorConfig
from vla_rl.config.errors import ConfigError
from vla_rl.config.experiment import Experiment, FromBundle, Imitation
from vla_rl.config.imagination import EvaluationThresholds, ImaginationConfig, WorldModelConfig
from vla_rl.config.loader import load_config
from vla_rl.runners.checks import SpecOnly, check_experiment, check_imagined_time_limit
from vla_rl.runners.imagination import (
    Perturbed,
    Rounds,
    Validated,
    branch_steps,
    misled,
    missed,
    not_measured,
    refusal,
)
from vla_rl.runners.iterations import algorithm_state, restore_algorithm
from vla_rl.runners.observe_every import ObserveEvery
from vla_rl.runners.world_model import WORLD_MODEL_FILE, open_clips
from vla_rl.runners.world_model_videos import recorded_chunks, replayed_chunks
from vla_rl.runs.run_dir import experiment_of, open_run
from world_models.data.keyframes import KeyframeConfig
from world_models.evaluation.action_sequences import recorded_sequences
from world_models.imagined_env import ImaginedEnvConfig

CONFIG = """\
extends: {tiny}
seed: 3
sim: {{tasks: [reach], num_envs: 4, max_steps: 32, image_size: [32, 32]}}
start: {{episodes: 16}}
algorithm: {{iterations: 2, chunks: 1}}
imagination:
  rounds: 2
  real_episodes: 5
  clone_successes: {{steps: 3, batch_size: 8}}
  model:
    kinematics_steps: 2
    no_action_steps: 1
    dynamics: {{width: 8, deep_width: 16, blocks: 1, deep_blocks: 1, condition: 16}}
    fit: {{steps: 2, batch_size: 2}}
    reward_model:
      encoder: {{width: 64, text_width: 32}}
      steps: 2
      batch_size: 8
      imagined_clips: 4
      min_successes: 1
    imagined_env: {{num_envs: 4, branch_steps: 8}}
  thresholds: {{stop_below_auc: 0.0}}
evaluation: {{episodes: 2, validation_episodes: 2, videos_per_task: 0}}
"""


def train(config: Path, folder: Path, *options: str) -> None:
    ended = vla_rl("train", config, "--run-dir", folder, *options)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "imagined.yaml"
    path.write_text(CONFIG.format(tiny=Path(__file__).parents[1] / "data" / "tiny.yaml"))
    return path


@pytest.fixture(scope="module")
def run(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(config, folder)
    return folder


def walk_right(env: VectorEnv, seeds: Sequence[int], env_ids: Sequence[int] | None = None, *, steps: int) -> None:
    """Begin and observe these episodes (default: all), then step every environment."""
    env.reset(env_ids, start=[StartState(task=0, seed=seed) for seed in seeds])
    env.observe(env_ids)
    for _ in range(steps):
        env.step(torch.ones(env.spec.num_envs, 1))


def observed_steps(store: EpisodeStore) -> dict[int, list[int]]:
    return {entry.seed: store.read(entry.id).observation_steps.tolist() for entry in store.entries()}


def test_regular_observation_includes_every_end(tmp_path: Path) -> None:
    """Environments whose episodes end between two observations, and one that is reset in the meantime."""
    world = ChainEnv(num_envs=3)
    store = EpisodeStore(tmp_path / "store", create=True)
    env = ObserveEvery(RecordedEnv(world, store, source="policy", split="train"), every=4)
    walk_right(env, (8, 6, 0), steps=8)
    walk_right(env, (3,), [0], steps=8)
    assert observed_steps(store) == {8: [0, 1], 6: [0, 3], 0: [0, 4, 8, 9], 3: [0, 4, 6]}
    assert all(entry.success for entry in store.entries())


def test_the_reset_of_one_environment_does_not_shift_the_observations_of_the_others(tmp_path: Path) -> None:
    """Environment 1 begins 3 steps after environment 0, and each is observed every 4 steps of its own episode."""
    store = EpisodeStore(tmp_path / "store", create=True)
    env = ObserveEvery(RecordedEnv(ChainEnv(num_envs=2, length=20), store, source="policy", split="train"), every=4)
    walk_right(env, (8,), [0], steps=3)
    walk_right(env, (9,), [1], steps=10)
    assert observed_steps(store) == {8: [0, 4, 8, 11], 9: [0, 4, 8, 10]}


class ConstantActor:
    def begin(self, env_ids: Sequence[int]) -> None:
        pass

    def __call__(self, obs: Observation, env_ids: Sequence[int]) -> torch.Tensor:
        return torch.full((len(env_ids), 8, 3), 0.95)


def test_a_share_of_the_chunks_is_offset_as_a_whole() -> None:
    """One offset per chunk, within the action range; the other chunks are unchanged."""
    settings = ImaginationConfig(perturbed_chunks=0.25, perturbation=0.1)
    obs = ChainEnv(num_envs=1).observe([0])
    act = Perturbed(ConstantActor(), settings, torch.Generator().manual_seed(0))
    action = act(obs, range(4000))
    assert torch.equal(action, action[:, :1].expand_as(action))
    assert action.max() == 1.0
    offset = (action[:, 0] != 0.95).any(1)
    assert offset.float().mean() == pytest.approx(0.25, abs=0.03)
    below = 0.95 - action[offset, 0].clamp(max=0.95)
    assert below[below > 0].square().mean().sqrt() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("start", "stores"),
    [
        ("{store: recorded}", ["other", "recorded"]),
        ("{store: other}", ["other"]),
        ("{}", ["other", "run/demonstrations"]),
        ("{name: bundle, path: bundle}", ["other"]),
    ],
)
def test_the_world_model_is_fitted_to_what_the_run_starts_from(
    start: str, stores: list[str], config: Path, tmp_path: Path
) -> None:
    """Demonstrations that are recorded first and a store of earlier ones alike, each store once."""
    path = tmp_path / "imagined.yaml"
    path.write_text(f"extends: {config}\nstart: {start}\nimagination: {{stores: [other]}}\n")
    run = open_run(load_config(Experiment, path), tmp_path / "run", resume=False, command="vla-rl train imagined.yaml")
    with run.lock:
        assert run.experiment.imagination is not None
        env = ChainEnv(num_envs=1)
        rounds = Rounds(run, env.spec, run.experiment.imagination, env=env)
    assert rounds.stores == [*rounds.given, *rounds.demonstrations] == [tmp_path / name for name in stores]


def test_every_real_step_is_counted(run: Path) -> None:
    stages = json.loads((run / "stages.json").read_text())
    recorded = [EpisodeStore(run / "imagination" / f"round_{number}" / "episodes") for number in range(2)]
    steps = [sum(entry.steps for entry in store.entries()) for store in recorded]
    assert [len(store.entries()) for store in recorded] == [5, 5]
    assert [stages[f"record_{number}"]["control_steps"] for number in range(2)] == steps
    assert stages["reinforce"]["real_steps"] == sum(steps)
    validations = [stage for name, stage in stages.items() if name.startswith("validate_")]
    assert len(validations) == 5
    assert stages["reinforce"]["validation_steps"] == sum(2 * stage["mean_steps"] for stage in validations)
    evaluated = [stages[f"evaluate_model_{number}"]["control_steps"] for number in range(2)]
    assert stages["reinforce"]["evaluation_steps"] == sum(evaluated)
    starts = [entry.seed for store in recorded for entry in store.entries()]
    assert len(set(starts)) == 10
    for store in recorded:
        assert all(store.read(entry.id).observation_steps[-1] == entry.steps for entry in store.entries())
    for number in range(2):
        report = stages[f"evaluate_model_{number}"]
        assert {"hallucinated_success", "success_auc", "delta_success", "fps"} <= set(report)
        assert 0 <= stages[f"validate_{number}"]["success"] <= 1
    assert (run / "result.json").exists()


def test_the_report_shows_the_evaluation_and_its_videos(run: Path) -> None:
    report = json.loads((run / "stages.json").read_text())["evaluate_model_1"]
    assert all(Path(video).is_file() for video in report["videos"])
    assert {Path(video).parent for video in report["videos"]} == {run / "imagination" / "round_1" / "videos"}
    page = (run / "report.html").read_text()
    assert "Evaluation of the world model" in page
    assert page.count("<video") == len(report["videos"])


def test_a_replayed_episode_shows_what_was_recorded(run: Path) -> None:
    experiment = experiment_of(run)
    assert experiment.imagination is not None
    clips = open_clips([run / "imagination" / "round_0" / "episodes"], experiment.imagination.model.dynamics, "all")
    env = make_env(experiment.sim)
    try:
        for sequence in recorded_sequences(clips)[:2]:
            again, _ = replayed_chunks(env, clips, sequence, 8)
            shown = recorded_chunks(clips, sequence.episode, 8)
            for name in ("action", "length", "frames"):
                assert torch.equal(getattr(again, name), getattr(shown, name)), name
    finally:
        env.close()


@pytest.mark.parametrize(("success", "kept"), [(0.25, "old"), (0.5, "new"), (0.75, "new")])
def test_the_better_of_two_policies_is_kept_and_of_equal_ones_the_newer(success: float, kept: str) -> None:
    assert Validated(Path("old"), 0.5).or_better(Validated(Path("new"), success)).bundle == Path(kept)


def test_every_round_starts_from_the_best_validated_policy(run: Path) -> None:
    """Cloning starts from the best so far, imagined training from the better of both; the best of all is shipped.

    Where all succeed equally often, as they may in so small a run, the newest is the best.
    """
    stages, sha = json.loads((run / "stages.json").read_text()), lambda bundle: read_bundle_info(bundle).sha256
    best, success = run / "imitation" / "bundle", stages["validate_start"]["success"]
    for number in range(2):
        folder = run / "imagination" / f"round_{number}"
        for stage, bundle in (("validate_clone", folder / "clone" / "bundle"), ("validate", folder / "bundle")):
            assert read_bundle_info(bundle).provenance.parent == sha(best)
            if stages[f"{stage}_{number}"]["success"] >= success:
                best, success = bundle, stages[f"{stage}_{number}"]["success"]
    assert sha(run / "bundle") == sha(best)


@pytest.mark.slow
def test_the_world_model_can_be_fitted_after_several_rounds_of_cloning(config: Path, tmp_path: Path) -> None:
    train(config, tmp_path / "run", "--imagination.imagine_every", "2")
    stages = json.loads((tmp_path / "run" / "stages.json").read_text())
    rounds = [name for name in stages if name[-1].isdigit()]
    first, second = ["record_0", "clone_0"], ["record_1", "clone_1", "validate_clone_1", "fit_1", "evaluate_model_1"]
    assert rounds == [*first, *second, "imagine_1", "validate_1"]
    clones = [tmp_path / "run" / "imagination" / f"round_{number}" / "clone" / "bundle" for number in range(2)]
    assert read_bundle_info(clones[1]).provenance.parent == read_bundle_info(clones[0]).sha256
    page = (tmp_path / "run" / "report.html").read_text()
    assert "round 1" in page
    assert "round 0" not in page


def test_rounds_after_the_last_fit_are_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(config), "--run-dir", str(tmp_path / "run"), "--imagination.imagine_every", "3"])
    assert stopped.value.code == 2
    assert "imagination.rounds 2 is no multiple of imagination.imagine_every 3" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(run: Path, config: Path, tmp_path: Path) -> None:
    """Everything after the second round's fit is lost; resuming gives the same again without recording again."""
    again = tmp_path / "again"
    shutil.copytree(run, again)
    stages = json.loads((again / "stages.json").read_text())
    for name in ("evaluate_model_1", "imagine_1", "validate_1", "reinforce", "evaluate_after"):
        del stages[name]
    (again / "stages.json").write_text(json.dumps(stages))
    shutil.rmtree(again / "imagination" / "round_1" / "checkpoints")
    shutil.rmtree(again / "bundle")
    train(config, again, "--resume")
    before, after = ((folder / "imagination/round_1/bundle/bundle.json") for folder in (run, again))
    assert json.loads(before.read_text())["sha256"] == json.loads(after.read_text())["sha256"]


def test_training_in_the_middle_of_imagined_chunks_is_resumed_exactly(tmp_path: Path) -> None:
    """The policy executes half a chunk of the world model: what it observed is part of the environment's state, since
    predicting it again, for other environments at once, would give other last bits."""

    def learner(name: str) -> PPO:
        imagined = ImaginedEnvConfig(num_envs=16, reward_every=2)
        env = dot_episodes.imagined_env(tmp_path / name, max_steps=12, episode_starts=0.3, config=imagined)
        torch.manual_seed(5)
        for weight in env.model.parameters():
            weight.data += 0.2 * torch.randn_like(weight) if weight.dim() > 1 else 0.0
        env.reward_model.reward_threshold.fill_(0.33)  # some episodes succeed
        small = CONFIGS["denoising"]
        half = replace(small, action_horizon=2, expert=replace(small.expert, action_patch=2))
        update = replace(PPOConfig().update, minibatch=16, micro_batch=16, epochs=1)
        config = PPOConfig(iterations=5, chunks=3, update=update, critic_warmup=0)
        return PPO(config, build_policy(half, dot_episodes.ROBOT), env, seed=0)

    uninterrupted, resumed = learner("uninterrupted"), learner("resumed")
    for _ in range(3):
        uninterrupted.iterate()
    restore_algorithm(resumed, copy.deepcopy(algorithm_state(uninterrupted)))
    for _ in range(2):
        found, again = uninterrupted.iterate(), resumed.iterate()
        assert {name: found[name] for name in found if not name.endswith("_s")} == {
            name: again[name] for name in again if not name.endswith("_s")
        }
    weights, same = uninterrupted.policy.state_dict(), resumed.policy.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_the_commands(run: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episodes = str(run / "imagination" / "round_0" / "episodes")
    common = [
        str(config),
        "--episodes",
        episodes,
        str(run / "demonstrations"),
        "--out",
        str(tmp_path / "world"),
        "--json",
    ]
    main(["world-model", "fit", *common])
    assert json.loads(capsys.readouterr().out)["world"] == str(tmp_path / "world" / WORLD_MODEL_FILE)
    main(["world-model", "evaluate", *common, "--bundles", str(run / "bundle"), "--starts", "2"])
    report = json.loads(capsys.readouterr().out)
    keys = "horizons psnr copy_psnr object_error_m copy_object_error_m hallucinated_success fps delta_success"
    assert set(keys.split()) | {"no_action_hallucinated_success", "success_auc"} <= set(report)
    assert len(report["policies"]) == 1
    with pytest.raises(SystemExit):
        main(["world-model", "fit", *common, "--imagination.model.fit.steps", "3"])
    assert "holds a world model, or a part of its fit, with other settings" in capsys.readouterr().err
    main(["world-model", "imagine", *common])
    assert Path(json.loads(capsys.readouterr().out)["video"]).stat().st_size > 0
    main(["world-model", "imagine", *common, "--keys", "aBgG", "--held", "6"])
    assert Path(json.loads(capsys.readouterr().out)["video"]).stat().st_size > 0
    with pytest.raises(SystemExit) as stopped:
        main(["world-model", "imagine", *common, "--keys", "z"])
    assert stopped.value.code == 2
    assert "keys ['z']; allowed are" in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_compares_the_loop_with_its_parts_and_the_simulator(config: Path, tmp_path: Path) -> None:
    settings = ["--imagination.imagine_every", "2", "--imagination.model.reward_model.min_successes", "1"]
    experiment = load_config(Experiment, config, settings)
    found = one_seed(experiment, experiment, tmp_path, times=[1])
    names = {"imitation", "self-imitation", "imagination", "loop", "simulator 1x", "simulator 1x, last weights"}
    assert set(found["success"]) == names
    assert found["real_control_steps"]["simulator 1x"] >= found["real_control_steps"]["loop"] > 0
    alone = experiment_of(tmp_path / "alone")
    assert alone.imagination is not None
    assert alone.imagination.clone_successes is None
    # stages that are kept are not repeated
    begun = [json.loads((tmp_path / name / "stages.json").read_text()) for name in ("imagined", "alone")]
    assert begun[0]["fit_1"] == begun[1]["fit_1"]


def test_a_config_without_the_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["world-model", "fit", str(Path(__file__).parents[1] / "data" / "tiny.yaml")])
    assert stopped.value.code == 2
    assert "has no section 'imagination'" in capsys.readouterr().err


def test_an_imagined_episode_that_is_cut_off_may_not_count_as_failed(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(config), "--run-dir", str(tmp_path / "run"), "--algorithm.time_limit", "failure"])
    assert stopped.value.code == 2
    assert "'algorithm.time_limit' must be bootstrap with imagination" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("simulated", "imagined"), [(64, 4), (1, 64)])
def test_imagined_environments_count_for_the_warm_up(simulated: int, imagined: int, tmp_path: Path) -> None:
    """Not those of the simulator, in which the algorithm never acts."""
    env = dot_episodes.DotEnv()
    env.spec = replace(env.spec, num_envs=simulated)
    save_bundle(build_policy(CONFIGS["gaussian"], dot_episodes.ROBOT), tmp_path / "bundle")
    model = WorldModelConfig(
        dynamics=dot_episodes.DYNAMICS, imagined_env=ImaginedEnvConfig(num_envs=imagined, reward_every=2)
    )
    experiment = Experiment(
        sim=NoSimulatorConfig(),
        device="cpu",
        start=FromBundle(path=tmp_path / "bundle", residual=ResidualConfig()),
        algorithm=OffPolicyConfig(iterations=5, chunks=20, warmup=500, demonstration_share=0.0, shift=0),
        imagination=ImaginationConfig(model=model),
    )
    if 5 * 20 * imagined > 500:
        check_experiment(experiment, SpecOnly(env.spec))
    else:
        with pytest.raises(UserError, match=r"must be below the 400 chunks .* 20 in each of 4 environments"):
            check_experiment(experiment, SpecOnly(env.spec))


@pytest.mark.parametrize(("pays", "recorded"), [("sparse", "shaped"), ("shaped", "sparse"), ("shaped", None)])
def test_recorded_episodes_beside_imagined_ones_have_sparse_rewards(
    pays: str, recorded: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As imagined ones do, whatever the simulator pays. ``recorded``: of a store; None: the run records its own."""
    env, path, bundle = dot_episodes.DotEnv(), tmp_path / "store", tmp_path / "bundle"
    env.spec = replace(env.spec, fingerprint={"reward": pays})
    store = EpisodeStore(path, create=True)
    store.add(replace(dot_episodes.episode(0), fingerprint={"reward": recorded or pays}))
    base = build_policy(CONFIGS["gaussian"], dot_episodes.ROBOT)
    save_bundle(residual_on(base, ResidualConfig()), bundle)
    model = WorldModelConfig(dynamics=dot_episodes.DYNAMICS, imagined_env=ImaginedEnvConfig(reward_every=2))
    settings = OffPolicyConfig(stores=(path,) if recorded else None, shift=0)
    experiment = Experiment(
        device="cpu",
        start=Imitation(residual=ResidualConfig()),
        algorithm=settings,
        imagination=ImaginationConfig(model=model),
    )
    with_sparse = pytest.raises(UserError, match=r"'sim.reward': imagined episodes pay 1 for success, .* with shaped")
    with nullcontext() if recorded == "sparse" else with_sparse:
        check_experiment(experiment, env, start=bundle)
    undrawn = replace(settings, demonstration_share=0.0)
    check_experiment(replace(experiment, algorithm=undrawn), env, start=bundle)
    notice = "imagined episodes pay 1 for success; sim.reward has no effect on them"
    assert (notice in capsys.readouterr().err) == (pays == "shaped")


def test_keyframes_further_from_the_end_than_an_episode_lasts_are_refused(tmp_path: Path) -> None:
    """Before anything is recorded for the world model, or fitted."""
    env, bundle = dot_episodes.DotEnv(), tmp_path / "bundle"
    save_bundle(build_policy(CONFIGS["gaussian"], dot_episodes.ROBOT), bundle)

    def check(**keyframes: Any) -> None:
        model = WorldModelConfig(dynamics=dot_episodes.DYNAMICS, keyframes=KeyframeConfig(**keyframes))
        settings = ImaginationConfig(model=model)
        check_experiment(Experiment(device="cpu", start=FromBundle(path=bundle), imagination=settings), env)

    longest = env.spec.max_steps
    check(before_end=(longest - 1, 60))
    check(before_end=(longest, 60), episode_starts=1.0)
    with pytest.raises(UserError, match=r"keyframes.before_end must begin below .* time limit of task 'go' .*got"):
        check(before_end=(longest, 60))


def test_own_demonstrations_that_hold_no_whole_chunk_are_refused(tmp_path: Path) -> None:
    """The policy acts 4 control steps at a time; a store that is given may have been observed at any of them."""
    env, bundle = dot_episodes.DotEnv(), tmp_path / "bundle"
    base = build_policy(replace(CONFIGS["gaussian"], action_horizon=4), dot_episodes.ROBOT)
    save_bundle(residual_on(base, ResidualConfig(action_horizon=4)), bundle)

    def check(every: int, **settings: Any) -> None:
        start = Imitation(observe_every=every, residual=ResidualConfig(action_horizon=4))
        algorithm = OffPolicyConfig(shift=0, **settings)
        check_experiment(Experiment(device="cpu", start=start, algorithm=algorithm), env, start=bundle)

    check(2)
    check(3, demonstration_share=0.0)
    check(3, stores=(dot_episodes.store(tmp_path / "store", 3).path,))
    for every in (3, 8):
        with pytest.raises(UserError, match=rf"start.observe_every must divide .*\(4\).*, got {every}"):
            check(every)


def test_groups_run_side_by_side_in_imagined_environments_alone() -> None:
    """The simulator records and validates only, in as many environments as it likes."""
    assert load_experiment(Path("imagined_grpo"), ("--sim.num_envs", "1")).sim.num_envs == 1
    with pytest.raises(ConfigError, match=r"imagined_env.num_envs \(12\) must be a multiple of algorithm.group_size"):
        load_experiment(Path("imagined_grpo"), ("--imagination.model.imagined_env.num_envs", "12"))


@pytest.mark.parametrize("setting", ["imagination.observe_every", "start.observe_every"])
def test_observations_that_do_not_meet_the_ends_of_chunks_are_refused(
    setting: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(config), "--run-dir", str(tmp_path / "run"), f"--{setting}", "3"])
    assert stopped.value.code == 2
    assert f"{setting} must divide imagination.model.dynamics.action_horizon (8), got 3" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_imagined_episodes_are_halved_for_every_missed_threshold(config: Path) -> None:
    imagination = load_config(Experiment, config).imagination
    assert imagination is not None
    thresholds = imagination.thresholds
    good = {"success_auc": 0.99, "length_matched_auc": None, "hallucinated_success": 0.0, "delta_success": 0.05}
    good |= {"length_matched_pairs": 0}
    good |= {"psnr": [30.0, 20.0], "copy_psnr": [20.0, 15.0]}
    assert branch_steps(good, thresholds, 64, 100) == 64
    assert branch_steps(good | {"success_auc": 0.7}, thresholds, 64, 100) == 32
    matched = {"length_matched_auc": 0.7, "length_matched_pairs": 20}
    assert branch_steps(good | matched, thresholds, 64, 100) == 32
    assert branch_steps(good | {"copy_psnr": [20.0, 20.5]}, thresholds, 64, 100) == 32
    assert branch_steps(good | {"success_auc": 0.7, "hallucinated_success": 0.5}, thresholds, 64, 100) == 16
    unmeasured = good | {"hallucinated_success": None}
    assert branch_steps(unmeasured, thresholds, 64, 100) == 32
    assert missed(unmeasured, thresholds) == not_measured(unmeasured) == ["hallucinated_success"]
    assert missed(unmeasured, replace(thresholds, max_hallucinated=1.0)) == []  # whatever it were
    unseen = good | {"psnr": [None, None], "copy_psnr": [None, None]}  # no held-out episode is as long as a chunk
    assert missed(unseen, thresholds) == not_measured(unseen) == ["psnr"]
    assert missed(good | {"psnr": [30.0, None], "copy_psnr": [20.0, None]}, thresholds) == []
    assert not_measured(good) == []
    for configured, longest in ((8, 100), (None, 8)):  # shorter than what halving stops at: not lengthened
        assert branch_steps(good | {"success_auc": 0.7}, thresholds, configured, longest) == 8


def test_grpo_is_not_trained_in_episodes_that_are_cut_off(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would count them as failed; PPO bootstraps there."""
    thresholds = EvaluationThresholds()
    good = {"success_auc": 0.99, "hallucinated_success": 0.0, "delta_success": 0.05}
    good |= {"psnr": [30.0], "copy_psnr": [20.0]}
    poor = good | {"hallucinated_success": 0.5}
    assert refusal(good, thresholds, GRPOConfig()) is refusal(poor, thresholds, PPOConfig()) is None
    why = refusal(poor, thresholds, GRPOConfig())
    assert why is not None
    assert "it misses hallucinated_success, which would halve imagined episodes" in why
    for algorithm in (GRPOConfig(), PPOConfig()):
        assert "below stop_below_auc (0.6)" in str(refusal(good | {"success_auc": 0.5}, thresholds, algorithm))
    grpo = tmp_path / "grpo.yaml"
    grpo.write_text(f"extends: {config}\nalgorithm: {{name: grpo, iterations: 1, groups: 1, group_size: 2}}\n")
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(grpo), "--run-dir", str(tmp_path / "run")])
    assert stopped.value.code == 2
    message = "imagination.model.imagined_env.branch_steps must be null with algorithm grpo, got 8"
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_recap_is_not_trained_in_episodes_that_are_cut_off() -> None:
    """Their return would be 0, that of a failure; off-policy learning without it goes on with the value there."""
    recap, plain = OffPolicyConfig(recap=RecapConfig()), OffPolicyConfig()
    poor = {
        "success_auc": 0.99,
        "hallucinated_success": 0.5,
        "delta_success": 0.05,
        "psnr": [30.0],
        "copy_psnr": [20.0],
    }
    why = refusal(poor, EvaluationThresholds(), recap)
    assert why is not None
    assert "which would halve imagined episodes, and algorithm.recap needs whole ones" in why
    assert refusal(poor, EvaluationThresholds(), plain) is None
    for setting in ({"branch_steps": 16}, {"max_error": 2.0}):
        check_imagined_time_limit(plain, ImaginedEnvConfig(**setting))
        with pytest.raises(UserError, match=rf"imagined_env.{next(iter(setting))} must be null with algorithm.recap"):
            check_imagined_time_limit(recap, ImaginedEnvConfig(**setting))
    check_imagined_time_limit(recap, ImaginedEnvConfig())


@pytest.mark.parametrize(("matched", "overall"), [(0.0, 0.95), (1.0, 0.3)])
def test_few_matched_pairs_do_not_decide_whether_anything_is_trained(matched: float, overall: float) -> None:
    report = {"success_auc": overall, "length_matched_auc": matched}
    thresholds = EvaluationThresholds()
    assert misled(report | {"length_matched_pairs": 19}, thresholds) == (overall < 0.6)
    assert misled(report | {"length_matched_pairs": 20}, thresholds) == (matched < 0.6)
    assert misled({"success_auc": None, "length_matched_auc": None, "length_matched_pairs": 0}, thresholds)
