"""NaN, infinite and exploding numbers, injected in every part: the run stops, names them, and can be resumed."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from policies.bundle import BundleError, load_bundle, save_bundle
from policies.denoising.policy import DenoisingPolicy
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from policies.pretrained.storage import StorageConfig
from policies.registry import build_policy
from sims.chunk import step_chunk
from sims.errors import RunFailure, UserError
from sims.numbers.finite import NotFinite
from sims.vector_env import StartState
from tests.policies.small_configs import CONFIGS
from tests.vla_rl.test_imitation import SMALL, demonstrations
from tests.world_models.test_imagined_env import actions
from tests.world_models.test_imagined_env import make as imagined_env
from tests.worlds import PointEnv
from vla_rl.algorithms.algorithm import Algorithm, Metrics
from vla_rl.algorithms.bc import BCConfig
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.config.environments import NoSimulatorConfig
from vla_rl.config.experiment import EvaluationConfig, Experiment, FromBundle
from vla_rl.config.loader import save_config
from vla_rl.rollouts.ahead import make_ahead
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.experience import Experience
from vla_rl.runners import reinforce as runner
from vla_rl.runners.imitation import CloningSource, clone
from vla_rl.runners.replay import repeat_update, replay
from vla_rl.runs.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint, load_tree, save_tree
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.run_dir import open_run

VALUES = {"nan": float("nan"), "inf": float("inf"), "exploding": 1e30}
UPDATE = UpdateConfig(epochs=1, minibatch=8, micro_batch=4, target_kl=None)
EXPERIMENT = Experiment(
    algorithm=PPOConfig(iterations=2, chunks=4, critic_warmup=0, update=UPDATE),
    evaluation=EvaluationConfig(validate_every=0),
    checkpoint_every=1,
)


def reinforce(folder: Path) -> Path:
    """Run to its end, or go on with it; its bundle."""
    env = PointEnv(num_envs=4)
    start = folder / "start"
    if not start.exists():
        torch.manual_seed(0)
        save_bundle(GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec)), start)
    resume = (folder / "config.yaml").exists()
    run = open_run(EXPERIMENT, folder, resume=resume, command="vla-rl train reach.yaml")
    with run.lock:
        runner.reinforce(run, env, start, folder, failures=FailureLog(folder, env))
    return run.bundle


def spoiled(tensor: Tensor, value: float) -> Tensor:
    """A copy in which the last entry is ``value``."""
    copy = tensor.detach().clone().float()
    copy[(-1,) * copy.ndim] = value
    return copy


def patch(owner: object, method: str, change: Callable) -> None:
    original = getattr(owner, method)
    setattr(owner, method, lambda *args, **options: change(original(*args, **options)))


def with_image(obs: object, value: float) -> object:
    object.__setattr__(obs, "images", spoiled(obs.images, value))  # type: ignore[attr-defined]
    return obs


def inject(place: str, algorithm: PPO, value: float) -> None:
    env, policy, update = algorithm.collector.env, algorithm.policy, algorithm.update
    assert isinstance(policy, GaussianPolicy) and update.critic is not None
    weight = policy.mean[0].weight
    match place:
        case "reward":
            patch(env, "step", lambda step: dataclasses.replace(step, reward=spoiled(step.reward, value)))
        case "state":
            patch(env, "observe", lambda obs: dataclasses.replace(obs, state=spoiled(obs.state, value)))
        case "image":
            patch(env, "observe", lambda obs: with_image(obs, value))
        case "action":
            patch(policy, "sample", lambda drawn: dataclasses.replace(drawn, action=spoiled(drawn.action, value)))
        case "gradient":
            weight.register_hook(lambda gradient: spoiled(gradient, value))
        case "weight":
            weight.data = spoiled(weight, value)
        case "normalizer":
            policy.normalizer.state_mean = spoiled(policy.normalizer.state_mean, value)
        case "critic":
            update.critic.network[-1].bias.data.fill_(value)
        case "optimizer":
            update.optimizer.state[weight]["exp_avg"].fill_(value)


NAMES = {
    "reward": r"reward is \S+ \(chunk 0, environment 3",
    "state": r"state of the observation is \S+ \(environment 3 of point",
    "image": r"image of the observation is \S+ \(environment 3 of point",
    "action": r"action is \S+ \(decision 3, step 1, dimension 1",
    "gradient": r"grad_norm is \S+ \(minibatch 0",
    "weight": r"mean\.0\.weight is",
    "normalizer": r"normalizer\.state_mean is",
    "critic": r"critic weight network\.6\.bias is|critic.network\.6\.bias is|value",
    "optimizer": r"optimizer[. ]state\.0\.exp_avg is",
}


def load_disturbed(place: str, value: float) -> Callable[..., Algorithm]:
    """``load_algorithm`` of an algorithm that has ``value`` in ``place`` from its first iteration on."""
    load = runner.load_algorithm

    def disturbed(*args: object) -> Algorithm:
        algorithm = load(*args)  # type: ignore[arg-type]
        iterate = algorithm.iterate

        def disturbed_iterate() -> dict[str, float]:
            inject(place, algorithm, value)  # type: ignore[arg-type]
            return iterate()

        algorithm.iterate = disturbed_iterate  # type: ignore[method-assign]
        return algorithm

    return disturbed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations."""
    return reinforce(tmp_path_factory.mktemp("undisturbed") / "run").parent


@pytest.fixture
def halfway(tmp_path: Path, undisturbed: Path) -> Path:
    """A copy of it that has its first iteration only."""
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    shutil.rmtree(folder / "bundle")
    (folder / "checkpoints" / "iteration_000002.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    "value", ["nan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("inf", "exploding"))]
)
@pytest.mark.parametrize("place", NAMES)
def test_the_run_stops_with_the_name_and_resumes_exactly(
    halfway: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Path, place: str, value: str
) -> None:
    """In the second iteration. What is on disk is finite, and the run then ends as the one that was never disturbed."""
    with monkeypatch.context() as patched:
        patched.setattr(runner, "load_algorithm", load_disturbed(place, VALUES[value]))
        with pytest.raises(RunFailure, match=NAMES[place]) as stopped:
            reinforce(halfway)
    message = str(stopped.value)
    assert message.startswith("iteration 1: ")
    assert "vla-rl train reach.yaml --resume" in message
    (kept,) = (halfway / "quarantine").glob("iteration_*.safetensors")
    assert f"vla-rl replay {kept}" in message
    replayed = replay(kept)
    assert replayed["batch"]
    if place == "gradient":  # it came from outside of the update
        assert replayed["reproduced"] == ""
    elif place == "optimizer" and value != "exploding":  # which the checkpoint finds
        assert re.search(NAMES[place], replayed["reproduced"])
    assert not (halfway / "bundle").exists()
    last = latest_checkpoint(halfway / "checkpoints")
    assert last is not None and load_checkpoint(last)["iteration"] == 1
    assert weights(reinforce(halfway)) == weights(undisturbed / "bundle")


def test_an_update_is_repeated_from_any_folder_and_of_a_run_that_was_moved(
    halfway: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "load_algorithm", load_disturbed("optimizer", VALUES["nan"]))
        with pytest.raises(RunFailure, match=NAMES["optimizer"]):
            reinforce(halfway.relative_to(tmp_path))
    (kept,) = halfway.rename(tmp_path / "moved").glob("quarantine/*.safetensors")
    (tmp_path / "other").mkdir()
    for cwd in (tmp_path, tmp_path / "other", kept.parent):
        monkeypatch.chdir(cwd)
        for path in (kept, Path(os.path.relpath(kept))):
            assert re.search(NAMES["optimizer"], replay(path)["reproduced"])


def test_the_update_of_a_stale_batch_is_repeated_with_the_weights_of_its_chunks() -> None:
    env = PointEnv(num_envs=4)
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(env.spec))
    config = PPOConfig(iterations=3, chunks=4, critic_warmup=0, staleness=1, update=UPDATE)
    algorithm = PPO(config, policy, env, seed=0, make_rollouts=make_ahead(Collector, 1))

    def spoil(found: tuple[Experience, Metrics]) -> tuple[Experience, Metrics]:
        weight = found[0].behavior_weight
        assert weight is not None
        return dataclasses.replace(found[0], behavior_weight=torch.full_like(weight, VALUES["nan"])), found[1]

    patch(algorithm.update, "_decouple", spoil)
    algorithm.iterate()
    with pytest.raises(NotFinite, match="behavior_weight is nan") as stopped:
        algorithm.iterate()
    record = {"batch": stopped.value.batch, "update": stopped.value.update}
    assert repeat_update(algorithm.update, algorithm.collector.collect(1), record) == str(stopped.value)


@pytest.mark.parametrize("room_gb", [8.0, 0.0], ids=["prefixes", "observations"])
def test_an_update_is_repeated_without_a_simulator(tmp_path: Path, room_gb: float) -> None:
    """Of a run of logs alone too; a record of experience holds prefixes or observations, as there was room."""
    env = PointEnv(num_envs=4)
    torch.manual_seed(0)
    storage = StorageConfig(device_gb=room_gb, host_gb=room_gb)
    policy = build_policy(dataclasses.replace(CONFIGS["pi0"], storage=storage), RobotSpec.of(env.spec))
    save_bundle(policy, tmp_path / "start")
    update = dataclasses.replace(UPDATE, frozen=("encoder",))
    config = PPOConfig(iterations=3, chunks=4, critic_warmup=0, update=update)
    algorithm = PPO(config, policy, env, seed=0)
    algorithm.iterate()
    algorithm.update.optimizer.state[algorithm.update.parameters[0]]["exp_avg"].fill_(VALUES["nan"])
    with pytest.raises(NotFinite) as stopped:
        algorithm.iterate()
    error, path = stopped.value, tmp_path / "quarantine" / "iteration_000001.safetensors"
    path.parent.mkdir()
    kept = {"quantity": error.quantity, "value": error.value, "where": error.where, "batch": error.batch}
    save_tree(path, kept | {"update": error.update, "start": "start"})
    start = FromBundle(path=tmp_path / "start")
    experiment = Experiment(sim=NoSimulatorConfig(), start=start, algorithm=config, device="cpu")
    save_config(experiment, tmp_path / "config.yaml")
    replayed = replay(path)
    assert replayed["batch"].keys() == error.batch.keys()
    assert re.search(NAMES["optimizer"], replayed["reproduced"])


def test_a_folder_is_not_what_is_replayed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name one of the files in RUN/quarantine"):
        replay(tmp_path)


def weights(bundle: Path) -> bytes:
    return next(bundle.glob("*.safetensors")).read_bytes()


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_checkpoint_that_is_not_finite_is_refused_and_the_earlier_one_resumes(
    halfway: Path, undisturbed: Path, value: float
) -> None:
    last = latest_checkpoint(halfway / "checkpoints")
    assert last is not None
    state = load_tree(last)
    state["update"]["policy"]["log_std"] = spoiled(state["update"]["policy"]["log_std"], value)
    save_tree(last, state)
    with pytest.raises(CheckpointError, match=r"update\.policy\.log_std has entries that are not finite"):
        reinforce(halfway)
    last.unlink()
    assert weights(reinforce(halfway)) == weights(undisturbed / "bundle")


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_bundle_that_is_not_finite_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=2), RobotSpec.of(PointEnv(num_envs=1).spec))
    save_bundle(policy, tmp_path / "bundle")
    good = weights(tmp_path / "bundle")
    policy.log_std.data = spoiled(policy.log_std, value)
    with pytest.raises(NotFinite, match="policy weight log_std is"):
        save_bundle(policy, tmp_path / "bundle")
    assert weights(tmp_path / "bundle") == good
    with monkeypatch.context() as patched:  # as an earlier version wrote it
        patched.setattr("policies.bundle.check_tree", lambda *args, **options: None)
        save_bundle(policy, tmp_path / "bundle")
    with pytest.raises(BundleError, match="log_std"):
        load_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_world_model_that_is_not_finite_stops_at_its_first_prediction(tmp_path: Path, value: float) -> None:
    env = imagined_env(tmp_path)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    for parameter in env.model.parameters():
        parameter.data = spoiled(parameter, value)
    with pytest.raises(NotFinite, match=r"world model weight \S+ is \S+ \(it makes prediction of the world model"):
        step_chunk(env, actions(3, 4), 1.0)


def test_behavior_cloning_that_diverges_stops(tmp_path: Path) -> None:
    store = demonstrations(tmp_path / "store", observe_every=2)
    policy = DenoisingPolicy(SMALL, RobotSpec.of(PointEnv(num_envs=1).spec))
    config = BCConfig(steps=20, warmup=1, batch_size=8, learning_rate=float("inf"))
    with pytest.raises(RunFailure, match="step 0: bc_learning_rate is inf"):
        clone(policy, [CloningSource(store=store.path)], config, tmp_path / "run", seed=0, fit_normalizer=True)
    assert not (tmp_path / "run" / "bundle").exists()
    assert list((tmp_path / "run" / "quarantine").iterdir())
