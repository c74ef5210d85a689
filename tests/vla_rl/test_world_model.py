"""Fits of world models in stages, their configuration, and videos from keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from episodes.schema import Episode
from episodes.store import EpisodeStore
from policies.bundle import Provenance, save_bundle
from policies.compact_encoder import HasCompactEncoder
from policies.device import CPU
from policies.registry import build_policy
from sims.errors import UserError
from sims.vector_env import StartState, Step, VectorEnv
from tests import dot_episodes
from tests.policies.small_configs import CONFIGS
from tests.vla_rl.command import answer
from vla_rl.config.environments import NoSimulatorConfig
from vla_rl.config.errors import ConfigError
from vla_rl.config.experiment import Experiment, FromBundle
from vla_rl.config.imagination import ImaginationConfig, WorldModelConfig
from vla_rl.config.loader import load_config, save_config
from vla_rl.runners.checks import check_experiment
from vla_rl.runners.evaluate import PolicyActor, run_episodes
from vla_rl.runners.imagination import Rounds
from vla_rl.runners.imagined_success import compare_success
from vla_rl.runners.logs import evaluate_imagined, recorded_spec
from vla_rl.runners.world_model import (
    WORLD_MODEL_FILE,
    evaluate_world_model,
    fit_world_model,
    make_imagined_env,
    no_action_path,
    open_clips,
    open_clips_for,
)
from vla_rl.runners.world_model_videos import KEY_SPEED, KEY_STEPS, key_actions, recorded_chunks
from vla_rl.runs.run_dir import Run
from world_models.bundle import FittedWorldModel, load_world_model, save_world_model
from world_models.data.clip import HELD_OUT, part_of
from world_models.data.keyframes import RecordedStarts
from world_models.evaluation.action_sequences import startable
from world_models.imagined_env import ImaginedEnvConfig
from world_models.models.autoencoder import AutoencoderConfig
from world_models.models.conv_flow import ConvFlowConfig
from world_models.models.latent_dit import LatentDiT, LatentDiTConfig
from world_models.models.wan import WanConfig
from world_models.training.autoencoder import AutoencoderFitConfig
from world_models.training.distillation import DistillConfig
from world_models.training.dynamics import DynamicsFitConfig
from world_models.training.optimization import Optimization
from world_models.world_model import WorldModelError

TINY = AutoencoderConfig(
    settings={
        "encoder_block_out_channels": [8, 8, 8],
        "decoder_block_out_channels": [8, 8, 8],
        "num_encoder_blocks": [1, 1, 1],
        "num_decoder_blocks": [1, 1, 1],
        "latent_channels": 4,
    },
)
DIT = LatentDiTConfig(
    action_horizon=dot_episodes.HORIZON, autoencoder=TINY, width=64, depth=2, heads=2, steps=2, context_noise=0.2
)
ONE_STEP = WorldModelConfig(
    dynamics=dot_episodes.DYNAMICS,
    kinematics_steps=1,
    fit=DynamicsFitConfig(steps=1, batch_size=2, warmup=1),
    reward_model=replace(dot_episodes.REWARD_MODEL, steps=1, imagined_clips=4),
)


def test_a_world_model_is_fitted_in_stages_that_are_not_repeated(tmp_path: Path) -> None:
    """Autoencoder, kinematics, dynamics, student, reward model; from their checkpoints the same file comes again."""
    store = dot_episodes.store(tmp_path / "store", 24)
    short = {"batch_size": 4, "warmup": 1}
    config = WorldModelConfig(
        dynamics=DIT,
        kinematics_steps=3,
        fit=DynamicsFitConfig(steps=3, **short),
        autoencoder_fit=AutoencoderFitConfig(steps=3, **short),
        distill=DistillConfig(steps=2, **short),
        reward_model=replace(dot_episodes.REWARD_MODEL, steps=2),
    )
    path = tmp_path / "fit" / WORLD_MODEL_FILE
    fit_world_model(config, [store.path], tmp_path / "fit", seed=0)
    first = load_world_model(path)
    assert isinstance(first.dynamics, LatentDiT)
    assert first.dynamics.config.steps == 1
    assert (first.dynamics.codec.scale != 1).all()
    path.unlink()

    def update_again(fit: Optimization) -> dict[str, float]:
        raise AssertionError("every stage is finished: nothing may be fitted again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimization, "update", update_again)
        fit_world_model(config, [store.path], tmp_path / "fit", seed=0)
    assert load_world_model(path).sha256 == first.sha256


def test_a_folder_goes_on_with_what_it_was_fitted_to_alone(tmp_path: Path) -> None:
    """A finished world model is not taken for that of other episodes, settings or another seed."""
    stores = [dot_episodes.store(tmp_path / name, count).path for name, count in (("store", 24), ("more", 30))]
    folder = tmp_path / "fit"
    fit_world_model(ONE_STEP, stores[:1], folder, seed=0)
    first = load_world_model(folder / WORLD_MODEL_FILE).sha256
    for other, episodes, seed in (
        (ONE_STEP, stores[1:], 0),
        (ONE_STEP, stores[:1], 1),
        (replace(ONE_STEP, fit=replace(ONE_STEP.fit, learning_rate=1e-4)), stores[:1], 0),
        (replace(ONE_STEP, imagined_env=ImaginedEnvConfig(reward_every=2)), stores[:1], 0),
    ):
        with pytest.raises(WorldModelError, match="holds a world model, or a part of its fit, with other settings"):
            fit_world_model(other, episodes, folder, seed=seed)
    unlike = replace(ONE_STEP, imagined_env=ImaginedEnvConfig(num_envs=2, branch_steps=4), no_action_steps=1)
    fit_world_model(unlike, stores[:1], folder, seed=0)
    assert load_world_model(folder / WORLD_MODEL_FILE).sha256 == first


def test_a_folder_goes_on_with_the_encoder_that_it_was_fitted_with_alone(tmp_path: Path) -> None:
    """A finished world model is not taken for one that keeps another policy's encoder, or a policy's at all."""

    def policy(seed: int) -> HasCompactEncoder:
        torch.manual_seed(seed)
        policy = build_policy(CONFIGS["denoising"], dot_episodes.ROBOT)
        assert isinstance(policy, HasCompactEncoder)
        return policy

    stores = [dot_episodes.store(tmp_path / "store", 24).path]
    same = replace(ONE_STEP.reward_model, encoder=policy(1).encoder.config)
    kept = replace(ONE_STEP, reward_model=replace(same, frozen_encoder=True))
    fit_world_model(kept, stores, tmp_path / "kept", seed=0, policy=policy(1))
    with pytest.raises(WorldModelError, match="holds a world model, or a part of its fit, with other settings"):
        fit_world_model(kept, stores, tmp_path / "kept", seed=0, policy=policy(2))
    fit_world_model(kept, stores, tmp_path / "kept", seed=0, policy=policy(1))
    begun = replace(ONE_STEP, reward_model=same)
    fit_world_model(begun, stores, tmp_path / "none", seed=0)
    with pytest.raises(WorldModelError, match="the encoder of another policy"):
        fit_world_model(begun, stores, tmp_path / "none", seed=0, policy=policy(1))
    fit_world_model(ONE_STEP, stores, tmp_path / "other", seed=0)
    fit_world_model(ONE_STEP, stores, tmp_path / "other", seed=0, policy=policy(1))  # it takes nothing of this one


def test_a_world_model_has_the_robot_of_the_policy_whose_encoder_it_takes(tmp_path: Path) -> None:
    """Its cameras in its order, whatever the order of recording: one encoder would see through another's camera."""
    stores = [dot_episodes.store(tmp_path / "store", 24).path]

    def fitted(frozen_encoder: bool, **robot: Any) -> FittedWorldModel:
        policy = build_policy(CONFIGS["denoising"], replace(dot_episodes.ROBOT, **robot))
        assert isinstance(policy, HasCompactEncoder)
        taken = replace(ONE_STEP.reward_model, encoder=policy.encoder.config, frozen_encoder=frozen_encoder)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        try:
            fit_world_model(replace(ONE_STEP, reward_model=taken), stores, folder, seed=0, policy=policy)
        except WorldModelError:
            assert not folder.exists()
            raise
        return load_world_model(folder / WORLD_MODEL_FILE)

    for frozen, cameras in ((True, dot_episodes.ROBOT.cameras[::-1]), (False, ("front",))):
        assert fitted(frozen, cameras=cameras).info.robot.cameras == cameras
    for frozen in (True, False):
        with pytest.raises(WorldModelError, match=r"policy whose encoder .* recorded robot: state_dim 3, not 2"):
            fitted(frozen, state_dim=3)


def evaluate(config: WorldModelConfig, folder: Path, stores: Sequence[Path], env: VectorEnv | None = None) -> Any:
    return evaluate_world_model(config, folder, stores, sim=NoSimulatorConfig(), env=env, seed=0)


def test_the_baseline_without_actions_is_the_one_of_the_setting(tmp_path: Path) -> None:
    """Other steps are another baseline, which is fitted beside the first; 0 steps are none."""
    stores, fitted = [dot_episodes.store(tmp_path / "store", 60).path], []
    for steps in (1, 2):
        config = replace(ONE_STEP, no_action_steps=steps)
        fit_world_model(config, stores, tmp_path / "fit", seed=0)
        fitted.append({path.name for path in (tmp_path / "fit").iterdir() if "no_action" in path.name})
        assert evaluate(config, tmp_path / "fit", stores)["no_action_hallucinated_success"] is not None
    assert fitted[0] < fitted[1]
    assert evaluate(ONE_STEP, tmp_path / "fit", stores)["no_action_hallucinated_success"] is None
    with pytest.raises(WorldModelError, match="no such world model; fit one with: vla-rl world-model fit"):
        evaluate(replace(ONE_STEP, no_action_steps=3), tmp_path / "fit", stores)


def test_the_baseline_without_actions_sees_the_latents_of_the_world_model(tmp_path: Path) -> None:
    """In the first round and in one whose world model is an earlier one, fitted further."""
    short = {"batch_size": 4, "warmup": 1}
    config = replace(ONE_STEP, dynamics=DIT, autoencoder_fit=AutoencoderFitConfig(steps=3, **short), no_action_steps=1)
    few, more = (dot_episodes.store(tmp_path / name, count).path for name, count in (("few", 40), ("more", 50)))
    fit_world_model(config, [few], tmp_path / "first", seed=0)
    fit_world_model(config, [more], tmp_path / "second", seed=0, start=tmp_path / "first" / WORLD_MODEL_FILE)
    for name in ("first", "second"):
        fitted, baseline = (
            load_world_model(path).dynamics.codec.state_dict()
            for path in (tmp_path / name / WORLD_MODEL_FILE, no_action_path(tmp_path / name, 1))
        )
        assert all(torch.equal(fitted[key], baseline[key]) for key in fitted), name


def test_the_seed_is_that_of_the_configuration_unless_another_is_given(tmp_path: Path) -> None:
    store = dot_episodes.store(tmp_path / "store", 24)
    file = tmp_path / "config.yaml"
    save_config(Experiment(seed=5, device="cpu", imagination=ImaginationConfig(model=ONE_STEP)), file)
    for name, own in (("of_config", ()), ("given", ("--seed", 7))):
        answer("world-model", "fit", file, "--episodes", store.path, "--out", tmp_path / name, *own, "--json")
    noted = [json.loads((tmp_path / name / "fitted_to.json").read_text())["seed"] for name in ("of_config", "given")]
    assert noted == [5, 7]


def test_too_few_successes_are_refused_before_anything_is_fitted(tmp_path: Path) -> None:
    store = dot_episodes.store(tmp_path / "store", 24)
    config = WorldModelConfig(
        dynamics=dot_episodes.DYNAMICS, reward_model=replace(dot_episodes.REWARD_MODEL, min_successes=99)
    )
    with pytest.raises(WorldModelError, match="a reward needs at least 99; record more"):
        fit_world_model(config, [store.path], tmp_path / "fit", seed=0)
    assert not (tmp_path / "fit").exists()


def test_episodes_of_another_robot_are_not_evaluated(tmp_path: Path) -> None:
    other = EpisodeStore(tmp_path / "other", create=True)
    other.add_all(
        replace(one, images={name: pixels[:, ::2, ::2] for name, pixels in one.images.items()})
        for one in map(dot_episodes.episode, range(24))
    )
    dynamics, reward_model = dot_episodes.models()
    save_world_model(
        dynamics, reward_model, tmp_path / WORLD_MODEL_FILE, reference_error=1.0, metrics={}, reward_every=4
    )
    same = dot_episodes.store(tmp_path / "same", 24)
    fitted = load_world_model(tmp_path / WORLD_MODEL_FILE)
    assert open_clips_for(fitted, [same.path], "held_out").image_size == (16, 16)
    message = r"the recorded robot does not fit the world model: image_size \(8, 8\), not \(16, 16\)"
    with pytest.raises(WorldModelError, match=message):
        evaluate(ONE_STEP, tmp_path, [other.path])


def changed_store(path: Path, change: Callable[[Episode], Episode]) -> Path:
    store = EpisodeStore(path, create=True)
    store.add_all(change(dot_episodes.episode(seed, drift=(0.6, -0.6, 0.1)[seed % 3])) for seed in range(60))
    return path


def with_a_camera_more(one: Episode) -> Episode:
    """In another order than the environment's, and of another size."""
    front, flipped = (one.images[name] for name in ("front", "flipped"))
    return replace(one, images={"side": front[:, ::2, ::2], "flipped": flipped, "front": front})


def test_the_environments_cameras_are_predicted_whatever_a_store_holds(tmp_path: Path) -> None:
    path, env, bundle = changed_store(tmp_path / "store", with_a_camera_more), dot_episodes.DotEnv(), tmp_path / "start"
    save_bundle(build_policy(CONFIGS["gaussian"], dot_episodes.ROBOT), bundle)
    settings = ImaginationConfig(stores=(path,), model=ONE_STEP)
    experiment = Experiment(sim=NoSimulatorConfig(), device="cpu", start=FromBundle(path=bundle), imagination=settings)
    check_experiment(experiment, env, start=bundle)
    (tmp_path / "run").mkdir()
    with (tmp_path / "lock").open("w") as lock:
        run = Run(experiment=experiment, device=CPU, dir=tmp_path / "run", lock=lock)
        rounds = Rounds(run, env.spec, settings, env=env)
        rounds.fit(0, bundle)
        assert rounds.evaluate(0)["episodes"] > 0
    assert load_world_model(rounds.folder(0) / WORLD_MODEL_FILE).info.robot == dot_episodes.ROBOT


def test_a_task_without_an_episode_to_start_from_is_refused_before_the_fit(tmp_path: Path) -> None:
    path, bundle = dot_episodes.store(tmp_path / "store", 60).path, tmp_path / "start"
    save_bundle(build_policy(CONFIGS["gaussian"], dot_episodes.ROBOT), bundle)
    settings = ImaginationConfig(stores=(path,), model=ONE_STEP)
    experiment = Experiment(sim=NoSimulatorConfig(), device="cpu", start=FromBundle(path=bundle), imagination=settings)
    with (tmp_path / "lock").open("w") as lock:
        run = Run(experiment=experiment, device=CPU, dir=tmp_path, lock=lock)
        rounds = Rounds(run, replace(dot_episodes.DotEnv().spec, tasks=("go", "wait")), settings, env=None)
        with pytest.raises(WorldModelError, match="no recorded episode of task 'wait' to start from"):
            rounds.fit(0, bundle)
        assert not rounds.folder(0).exists()


class CountedSteps(dot_episodes.DotEnv):
    """``taken``: control steps of episodes that had not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.ended = 0, True

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        self.ended = False
        super().reset(env_ids, start=start)

    def step(self, action: torch.Tensor) -> Step:
        self.taken += not self.ended
        step = super().step(action)
        self.ended = bool(step.done.any())
        return step


def test_real_steps_of_the_evaluation_are_counted(tmp_path: Path) -> None:
    """Those of swapped sequences, and of their videos."""
    store = dot_episodes.store(tmp_path / "store", 120)
    path = tmp_path / WORLD_MODEL_FILE
    save_world_model(*dot_episodes.models(), path, reference_error=1.0, metrics={}, reward_every=4)
    env = CountedSteps()
    report = evaluate(ONE_STEP, tmp_path, [store.path], env)
    assert report["control_steps"] == env.taken > 0
    assert evaluate(ONE_STEP, tmp_path, [store.path])["control_steps"] == 0


def test_other_episodes_than_those_of_the_fit_are_refused(tmp_path: Path) -> None:
    """A run that is resumed would imagine episodes from other starts, and compare policies from other ones."""
    store, bundle, began = dot_episodes.store(tmp_path / "store", 60), tmp_path / "start", list[VectorEnv]()
    save_bundle(build_policy(CONFIGS["gaussian"], dot_episodes.ROBOT), bundle)
    settings = ImaginationConfig(stores=(store.path,), model=ONE_STEP)
    experiment = Experiment(sim=NoSimulatorConfig(), device="cpu", start=FromBundle(path=bundle), imagination=settings)
    fitted, held_out = (next(one.id for one in store.select() if part_of(one) == part) for part in ("fit", "held_out"))
    (tmp_path / "run").mkdir()

    def reinforce(run: Run, env: VectorEnv, start: Path, folder: Path) -> dict[str, Any]:
        began.append(env)
        return {}

    @contextmanager
    def without(episode: str) -> Iterator[None]:
        store.delete(episode, author="anna")
        with pytest.raises(
            UserError, match="hold other episodes than those that the world model of round 0 was fitted"
        ):
            yield
        store.label(episode, "deleted", False, author="anna")

    with (tmp_path / "lock").open("w") as lock:
        run = Run(experiment=experiment, device=CPU, dir=tmp_path / "run", lock=lock)
        rounds = Rounds(run, recorded_spec(experiment), settings, env=None)
        rounds.fit(0, bundle)
        with without(held_out):
            rounds.evaluate(0)
        report = rounds.evaluate(0)
        with without(fitted):
            rounds.imagine(0, report, bundle, reinforce)
        assert not began
        rounds.imagine(0, report, bundle, reinforce)
        assert len(began) == 1
        with without(held_out):
            evaluate_imagined(run, rounds.spec, bundle)


def test_episodes_without_observations_a_chunk_apart_are_not_fitted_to(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    store.add_all(dot_episodes.episode(seed, every=3, drift=(0.6, -0.6, 0.1)[seed % 3]) for seed in range(30))
    with pytest.raises(WorldModelError, match=r"control steps later, .* an observe_every that divides 4"):
        fit_world_model(ONE_STEP, [store.path], tmp_path / "fit", seed=0)
    assert not (tmp_path / "fit").exists()


def test_calibration_episodes_have_the_cameras_of_the_model_in_its_order(tmp_path: Path) -> None:
    """The first store has none of them, and the second was recorded with another order."""

    def recorded(seed: int, order: Sequence[str]) -> Episode:
        one = dot_episodes.episode(seed, drift=(0.6, -0.6, 0.1)[seed % 3])
        images = {**one.images, "flipped": one.images["flipped"] // 2}
        return replace(one, images={name: images[name] for name in order})

    cameras = dot_episodes.ROBOT.cameras
    few, other = (EpisodeStore(tmp_path / name, create=True) for name in ("few", "other"))
    few.add_all(recorded(seed, cameras) for seed in range(4))
    other.add_all(recorded(seed, cameras[::-1]) for seed in range(4, 30))
    assert {part_of(entry) for entry in few.select()} == {"fit"}
    for folder, named in (("first", None), ("named", cameras)):
        fit_world_model(ONE_STEP, [few.path, other.path], tmp_path / folder, seed=0, cameras=named)
    first, named_first = (load_world_model(tmp_path / name / WORLD_MODEL_FILE) for name in ("first", "named"))
    assert first.info.robot.cameras == cameras
    assert first.sha256 == named_first.sha256


def test_a_fitted_world_model_is_evaluated_in_its_own_chunks(tmp_path: Path) -> None:
    path, stores = tmp_path / WORLD_MODEL_FILE, [dot_episodes.store(tmp_path / "store", 60).path]
    save_world_model(*dot_episodes.models(), path, reference_error=1.0, metrics={}, reward_every=4)
    longer = replace(ONE_STEP, dynamics=replace(dot_episodes.DYNAMICS, action_horizon=8))
    own, other = evaluate(ONE_STEP, tmp_path, stores), evaluate(longer, tmp_path, stores)
    assert own["psnr"] == other["psnr"]


def test_another_interval_than_that_of_the_thresholds_is_refused(tmp_path: Path) -> None:
    path, stores = tmp_path / WORLD_MODEL_FILE, [dot_episodes.store(tmp_path / "store", 60).path]
    save_world_model(*dot_episodes.models(), path, reference_error=1.0, metrics={}, reward_every=2)
    fitted = load_world_model(path)
    clips = open_clips_for(fitted, stores, "held_out")
    starts = RecordedStarts(clips, startable(clips, None), tasks=("go",))
    message = "reward_every is 4, and the world model's thresholds were set with 2: set it to 2"
    with pytest.raises(WorldModelError, match=message):
        evaluate(ONE_STEP, tmp_path, stores)
    with pytest.raises(WorldModelError, match=message):
        make_imagined_env(ONE_STEP, fitted, starts, limits={"go": 8})


def test_a_task_that_the_simulator_lacks_is_refused(tmp_path: Path) -> None:
    env, bundle = dot_episodes.DotEnv(), tmp_path / "start"
    path = changed_store(tmp_path / "store", lambda one: replace(one, task="fly"))
    world = tmp_path / WORLD_MODEL_FILE
    save_world_model(*dot_episodes.models(), world, reference_error=1.0, metrics={}, reward_every=4)
    message = r"the episodes' task 'fly' is not one of the simulator's: \('go',\)"
    with pytest.raises(UserError, match=message):
        evaluate(ONE_STEP, tmp_path, [path], env)
    save_bundle(build_policy(CONFIGS["gaussian"], dot_episodes.ROBOT), bundle)
    settings = ImaginationConfig(stores=(path,), model=ONE_STEP)
    experiment = Experiment(sim=NoSimulatorConfig(), device="cpu", start=FromBundle(path=bundle), imagination=settings)
    with pytest.raises(UserError, match=f"'imagination.stores': {message}"):
        check_experiment(experiment, env, start=bundle)


class NotedStarts(dot_episodes.DotEnv):
    """``seeds``: of all episodes that it began."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        self.seeds += [one.seed for one in start]
        super().reset(env_ids, start=start)


def test_policies_start_in_the_simulator_where_they_start_in_the_world_model(tmp_path: Path) -> None:
    dynamics, reward_model = dot_episodes.models()
    save_world_model(
        dynamics, reward_model, tmp_path / WORLD_MODEL_FILE, reference_error=1.0, metrics={}, reward_every=4
    )
    store = dot_episodes.store(tmp_path / "store", 60)
    held_out = [entry for entry in store.select() if entry.fold == HELD_OUT]
    store.trim(held_out[0].id, 1, held_out[0].steps, author="anna")
    torch.manual_seed(0)
    policy = build_policy(CONFIGS["gaussian"], dot_episodes.ROBOT)
    save_bundle(policy, tmp_path / "bundle", provenance=Provenance())
    config = WorldModelConfig(dynamics=dot_episodes.DYNAMICS, imagined_env=ImaginedEnvConfig(num_envs=4))
    bundles, whole = [tmp_path / "bundle"], [entry.seed for entry in held_out[1:]]
    env = NotedStarts()
    found = compare_success(config, tmp_path, [store.path], env=env, bundles=bundles, count=50, seed=0)
    assert env.seeds == whole
    assert found["policies"][0]["episodes"] == len(whole)
    alone = compare_success(config, tmp_path, [store.path], env=None, bundles=bundles, count=50, seed=0)
    assert alone["policies"][0]["episodes"] == len(held_out)


def test_one_setting_selects_the_kind_of_model(tmp_path: Path) -> None:
    path = tmp_path / "imagined.yaml"
    path.write_text(f"extends: {Path(__file__).parents[1] / 'data' / 'tiny.yaml'}\nimagination: {{}}\n")

    def dynamics(*overrides: str) -> object:
        imagination = load_config(Experiment, path, overrides).imagination
        assert imagination is not None
        return imagination.model.dynamics

    key = "--imagination.model.dynamics"
    assert isinstance(dynamics(), ConvFlowConfig)
    assert dynamics(f"{key}.name", "latent_dit", f"{key}.depth", "12") == LatentDiTConfig(depth=12)
    assert dynamics(f"{key}.name", "wan", f"{key}.folder", "here") == WanConfig(folder=Path.cwd() / "here")
    with pytest.raises(ConfigError, match=r"distill\.to must divide the teacher's 1 steps"):
        dynamics("--imagination.model.distill.to", "2")


@pytest.mark.parametrize("every", [1, 3, dot_episodes.HORIZON])
def test_a_recorded_episode_is_shown_to_its_end(every: int, tmp_path: Path) -> None:
    """Also where chunks are shorter than the model's because the episode was not observed at their ends."""
    stores = [dot_episodes.store(tmp_path / "store", 12, every=every).path]
    clips = open_clips(stores, dot_episodes.DYNAMICS, "all")
    for episode, entry in enumerate(clips.entries):
        shown = recorded_chunks(clips, episode, dot_episodes.HORIZON)
        assert shown.length.sum() == entry.steps
        assert (shown.length > 0).all()


def test_keys_move_one_dimension_and_held_commands_stay() -> None:
    action = key_actions("aCb", torch.tensor([0.3, 0.3, 1.0]), held=[2])
    assert action.shape == (3 * KEY_STEPS, 3)
    expected = torch.tensor([[KEY_SPEED, 0, 1], [0, 0, -1], [0, KEY_SPEED, -1]])
    assert torch.equal(action[::KEY_STEPS], expected)
    assert torch.equal(action, action[::KEY_STEPS].repeat_interleave(KEY_STEPS, dim=0))
    with pytest.raises(WorldModelError, match=r"keys \['d'\]; allowed are abc \(up\) and ABC \(down\)"):
        key_actions("ad", torch.zeros(3), held=[])
    with pytest.raises(WorldModelError, match=r"held dimension 3 is not within 0\.\.2"):
        key_actions("a", torch.zeros(3), held=[3])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_policy_acts_in_an_imagined_environment(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = build_policy(config, dot_episodes.ROBOT)
    env = dot_episodes.imagined_env(tmp_path / "episodes", max_steps=8)
    for stochastic in (True, False):
        actor = PolicyActor(policy, env.spec.num_envs, torch.Generator().manual_seed(0), stochastic=stochastic)
        results = run_episodes(env, actor, [StartState(task=0, seed=seed) for seed in range(4)])
        assert results.steps.tolist() == [8] * 4  # its thresholds end no episode
