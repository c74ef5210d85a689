"""Demonstrations and behavior cloning: what is observed, and that an interrupted training continues exactly."""

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from episodes.recorder import RecordedEnv, keep_successes
from episodes.sampler import WindowBatch, WindowSampler
from episodes.schema import EpisodeError
from episodes.store import EpisodeStore
from policies.bundle import BundleError, BundleInfo, load_bundle, read_bundle_info, save_bundle
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.kernels import DDIMConfig, DDPMConfig
from policies.denoising.objectives import DiffusionConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec, trained_parameters
from policies.pretrained.convention import Convention
from policies.pretrained.flow_policy import cache_bytes
from policies.pretrained.pi0.policy import Pi0
from policies.pretrained.storage import GB, StorageConfig
from policies.registry import build_policy
from policies.residual.policy import ResidualConfig
from sims.errors import UserError
from sims.starts import StartSequence
from tests.policies.encoding import encode
from tests.policies.pretrained.toy import PI0
from tests.worlds import PointEnv
from vla_rl.algorithms.bc import BC, BCConfig, bc_loss, encoded_bc_loss
from vla_rl.algorithms.encoded_windows import EncodedWindows
from vla_rl.algorithms.shards import GradientShards
from vla_rl.config.experiment import EvaluationConfig, Experiment, FromBundle, Imitation
from vla_rl.runners.demonstrations import Attempts, run_expert
from vla_rl.runners.imitation import CloningSource, clone, imitate
from vla_rl.runners.reinforce import load_algorithm
from vla_rl.runners.train import given_bundle
from vla_rl.runs.checkpoint import load_tree, save_tree
from vla_rl.runs.run_dir import experiment_device, open_run

SMALL = DenoisingPolicyConfig(encoder=CompactEncoderConfig(width=32, text_width=16), expert=ActionExpertConfig(depth=1))


def demonstrations(path: Path, *, observe_every: int, action_delay: int = 0) -> EpisodeStore:
    world = PointEnv(num_envs=4)
    world.spec = replace(world.spec, action_delay=action_delay)
    store = EpisodeStore(path, create=True)
    recorder = RecordedEnv(world, store, source="expert", split="train", keep=keep_successes)
    starts = StartSequence("demos", seed=0, num_tasks=3)
    expert = world.expert(noise=0.2, seed=0)
    run_expert(
        recorder,
        expert,
        starts,
        Attempts(len(recorder.spec.tasks)),
        episodes=6,
        observe_every=observe_every,
        on_recorded=lambda count: None,
    )
    return store


def test_every_third_step_is_looked_at_and_the_last(tmp_path: Path) -> None:
    store = demonstrations(tmp_path / "store", observe_every=3)
    entries = store.select()
    assert len(entries) == 6
    for entry in entries:
        looks = store.map(entry)["observation_steps"].tolist()
        assert looks == sorted({*range(0, entry.steps, 3), entry.steps})


def imitation(store: EpisodeStore, config: BCConfig) -> BC:
    sampler = WindowSampler(store, action_horizon=8, batch_size=8, seed=0, future_steps=(16, 32))
    torch.manual_seed(0)
    policy = DenoisingPolicy(SMALL, RobotSpec.of(PointEnv(num_envs=1).spec))
    policy.normalizer.fit(*sampler.statistics())
    return BC(policy, config, [sampler], seed=0)


def test_stores_without_a_success_are_passed_over(tmp_path: Path) -> None:
    """An empty store changes nothing, a second one with successes does; nothing but failures is one clear line."""
    torch.set_num_threads(1)
    stores = {name: demonstrations(tmp_path / name, observe_every=every).path for name, every in (("a", 1), ("b", 2))}
    empty = EpisodeStore(tmp_path / "empty", create=True).path

    def cloned(*paths: Path) -> BundleInfo:
        torch.manual_seed(0)
        policy = DenoisingPolicy(
            SMALL,
            RobotSpec.of(PointEnv(num_envs=1).spec),
        )
        folder = tmp_path / "_".join(path.name for path in paths)
        config = BCConfig(steps=3, warmup=1, batch_size=9)
        bundle = clone(
            policy,
            [CloningSource(store=path) for path in paths],
            config,
            folder,
            seed=0,
            fit_normalizer=True,
            parent="earlier",
        )
        return read_bundle_info(bundle)

    alone = cloned(stores["a"])
    assert alone.provenance.parent == "earlier"
    assert cloned(stores["a"], empty).sha256 == alone.sha256
    assert cloned(stores["a"], stores["b"]).sha256 != alone.sha256
    with pytest.raises(EpisodeError, match="no episode matches"):
        cloned(empty)


def test_a_folder_goes_on_with_what_was_cloned_in_it_alone(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    store, folder = demonstrations(tmp_path / "store", observe_every=3).path, tmp_path / "out"
    start = Imitation(policy=SMALL, bc=BCConfig(steps=2, warmup=1, batch_size=8))
    experiment = Experiment(start=start, device="cpu")

    def cloned(changed: Experiment) -> str:
        return read_bundle_info(imitate(changed, folder, store=store)).sha256

    def bc(**changes: Any) -> Experiment:
        return replace(experiment, start=replace(start, bc=replace(start.bc, **changes)))

    with pytest.raises(UserError, match="no parameter group"):  # nothing is fitted: no reason to refuse what comes next
        cloned(bc(frozen=("vision",)))
    first = cloned(experiment)
    refused = pytest.raises(UserError, match=r"holds a cloned policy.*with other settings.*choose another --out")
    deeper = replace(SMALL, expert=ActionExpertConfig(depth=2))
    for other in (bc(learning_rate=1e-4), bc(steps=3), replace(experiment, start=replace(start, policy=deeper))):
        with refused:
            cloned(other)
    with refused:
        cloned(replace(experiment, seed=1))
    assert cloned(replace(experiment, evaluation=EvaluationConfig(episodes=3), compile=False)) == first
    (folder / "fitted_to.json").unlink()
    with pytest.raises(UserError, match="choose a new or an empty folder"):
        cloned(experiment)


def test_the_bundle_names_the_action_delay_of_the_recorded_environment(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    store = demonstrations(tmp_path / "store", observe_every=3, action_delay=2).path
    experiment = Experiment(start=Imitation(policy=SMALL, bc=BCConfig(steps=1, warmup=1, batch_size=8)), device="cpu")
    assert read_bundle_info(imitate(experiment, tmp_path / "out", store=store)).robot.action_delay == 2


def converted(path: Path, config: Any, **robot: Any) -> BundleInfo:
    """A bundle with scales of its own, as a published policy has them."""
    torch.manual_seed(1)
    policy: Any = build_policy(config, replace(RobotSpec.of(PointEnv(num_envs=1).spec), **robot))
    policy.normalizer.action_scale.fill_(0.7)
    return save_bundle(policy, path)


CONVENTION = Convention(cameras=("top",), relative_actions=2)


@pytest.mark.parametrize("config", [SMALL, replace(PI0, convention=CONVENTION)], ids=["own", "relative actions"])
def test_a_bundle_is_cloned_into_with_the_scales_that_it_has(tmp_path: Path, config: Any) -> None:
    torch.set_num_threads(1)
    store = demonstrations(tmp_path / "store", observe_every=3, action_delay=2).path
    given = converted(tmp_path / "bundle", config)
    bc = BCConfig(steps=2, warmup=1, batch_size=8)
    experiment = Experiment(start=FromBundle(path=tmp_path / "bundle", store=store, bc=bc), device="cpu")
    learned = read_bundle_info(imitate(experiment, tmp_path / "out", store=None))
    assert learned.config == given.config and learned.provenance.parent == given.sha256
    assert learned.robot == replace(given.robot, action_delay=2)
    before, after = (load_bundle(path).state_dict() for path in (tmp_path / "bundle", tmp_path / "out" / "bundle"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > 10 and not any(name.startswith("normalizer.") for name in changed)


def test_a_folder_that_was_cloned_from_another_bundle_is_refused(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    store = demonstrations(tmp_path / "store", observe_every=3).path
    converted(tmp_path / "bundle", SMALL)
    start = FromBundle(path=tmp_path / "bundle", bc=BCConfig(steps=1, warmup=1, batch_size=8))
    experiment = Experiment(start=start, device="cpu")
    with pytest.raises(UserError, match="imitate needs episodes: give --store STORE"):
        imitate(experiment, tmp_path / "out", store=None)
    first = read_bundle_info(imitate(experiment, tmp_path / "out", store=store))
    assert read_bundle_info(imitate(experiment, tmp_path / "out", store=store)).sha256 == first.sha256
    converted(tmp_path / "bundle", replace(SMALL, max_prefix=2))
    with pytest.raises(UserError, match=r"holds a cloned policy.*from another bundle.*choose another --out"):
        imitate(experiment, tmp_path / "out", store=store)
    converted(tmp_path / "bundle", SMALL, state_dim=9)
    with pytest.raises(BundleError, match="made for another robot or simulator: state_dim 9, not"):
        imitate(experiment, tmp_path / "other", store=store)


def test_what_is_evaluated_before_training_explores_as_training_does(tmp_path: Path) -> None:
    """A DPPO policy that was trained on takes its first denoising steps with the weights that it had before that."""
    diffusion = {"objective": DiffusionConfig(levels=20), "act": DDIMConfig(steps=4)}
    dppo, env = replace(SMALL, explore=DDPMConfig(steps=4, train_last=2), **diffusion), PointEnv(num_envs=2)
    policy = build_policy(dppo, RobotSpec.of(env.spec))
    policy.fit_normalizer(torch.randn(8, env.spec.state_dim), torch.randn(8, env.spec.action_dim))
    policy.prepare_to_explore()
    with torch.no_grad():
        for parameter in trained_parameters(policy):
            parameter.add_(0.1)
    save_bundle(policy, tmp_path / "bundle")
    start = FromBundle(path=tmp_path / "bundle")
    experiment = Experiment(start=start, device="cpu")
    run = open_run(experiment, tmp_path / "run", resume=False, command="")
    with run.lock:
        before = load_bundle(run.dir / given_bundle(run, env, start)["bundle"])
    trained = load_algorithm(experiment, env, tmp_path / "bundle", experiment_device(experiment)).policy
    expected = trained.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in before.state_dict().items())


def test_imitate_says_that_it_adds_no_residual(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    store = demonstrations(tmp_path / "store", observe_every=3).path
    start = Imitation(policy=SMALL, bc=BCConfig(steps=1, warmup=1, batch_size=8))
    said = []
    for residual in (None, ResidualConfig(hidden=(16,))):
        experiment = Experiment(start=replace(start, residual=residual), device="cpu")
        imitate(experiment, tmp_path / "out", store=store)
        said.append(" ".join(capsys.readouterr().err.split()))
    notice = "start.residual has no effect here: vla-rl train adds it to the cloned policy"
    assert notice not in said[0] and notice in said[1]


@pytest.mark.parametrize(
    ("matrix_learning_rate", "shards", "frozen"), [(None, 1, ()), (4e-3, 1, ()), (4e-3, 3, ()), (None, 1, ("encoder",))]
)
def test_imitation_goes_on_exactly(
    tmp_path: Path, matrix_learning_rate: float | None, shards: int, frozen: tuple[str, ...]
) -> None:
    torch.set_num_threads(1)
    store = demonstrations(tmp_path / "store", observe_every=1)

    def fresh() -> BC:
        config = BCConfig(
            steps=6,
            warmup=2,
            matrix_learning_rate=matrix_learning_rate,
            batch_size=8,
            shards=shards,
            frozen=frozen,
        )
        return imitation(store, config)

    whole = fresh()
    begun = [parameter.clone() for parameter in whole.parameters]
    losses = [whole.update() for _ in range(6)]
    assert all(
        not torch.equal(before, after) for before, after in zip(begun, whole.parameters, strict=True) if after.ndim > 1
    )
    first = fresh()
    for _ in range(3):
        first.update()
    save_tree(tmp_path / "state", first.state_dict())
    second = fresh()
    second.load_state_dict(load_tree(tmp_path / "state"))
    assert [second.update() for _ in range(3)] == losses[3:]
    for one, other in zip(second.parameters, whole.parameters, strict=True):
        assert torch.equal(one, other)


def test_shards_give_the_same_figures_with_and_without_processes(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    store = demonstrations(tmp_path / "store", observe_every=1)
    learned = []
    for processes in (False, True):
        learner = imitation(store, BCConfig(steps=4, warmup=1, batch_size=8, shards=2))
        learner.shards.close()
        learner.shards = GradientShards(learner.policy, bc_loss, count=2, processes=processes)
        losses = [learner.update() for _ in range(4)]
        learner.close()
        learned.append((losses, [parameter.clone() for parameter in learner.parameters]))
    (losses, serial), (other_losses, parallel) = learned
    assert losses == other_losses
    for one, other in zip(serial, parallel, strict=True):
        assert torch.equal(one, other)


def test_a_shard_is_its_part_of_the_batch(tmp_path: Path) -> None:
    """The mean over shards of equal size is the gradient of the whole, where the loss draws nothing."""
    torch.set_num_threads(1)
    store = demonstrations(tmp_path / "store", observe_every=1)
    learner = imitation(store, BCConfig(batch_size=8))
    batch = learner.samplers[0].next_batch()
    gradients = []
    for count in (1, 4):
        shards = GradientShards(learner.policy, forecast_loss, count=count, processes=False)
        shards.backward(batch, [torch.Generator() for _ in range(count)])
        gradients.append(torch.cat([p.grad.flatten() for p in shards.parameters if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
    assert gradients[0].abs().max() > 1e-4


def forecast_loss(policy: DenoisingPolicy, batch: WindowBatch, generator: torch.Generator) -> Tensor:
    return policy.forecast(encode(policy, batch.obs).encoding.pooled).square().mean()


def test_a_frozen_encoder_is_not_changed_and_encoding_once_gives_the_same_loss(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    store = demonstrations(tmp_path / "store", observe_every=2)
    config = BCConfig(steps=4, warmup=1, batch_size=8, frozen=("encoder",), matrix_learning_rate=4e-3)
    bc = imitation(store, config)
    (encoded,) = bc.samplers
    assert isinstance(encoded, EncodedWindows)
    whole = WindowSampler(store, action_horizon=8, batch_size=8, seed=0, future_steps=(16, 32))
    for _ in range(3):
        same = [torch.Generator().manual_seed(1) for _ in range(2)]
        once = encoded_bc_loss(bc.policy, encoded.next_batch(), same[0])
        again = bc_loss(bc.policy, whole.next_batch(), same[1])
        assert abs(once.item() - again.item()) < 1e-4
    before = {name: tensor.clone() for name, tensor in bc.policy.state_dict().items()}
    bc.update()
    changed = {name.split(".")[0] for name, new in bc.policy.state_dict().items() if not torch.equal(new, before[name])}
    assert changed == {"expert"}


def test_a_policy_that_is_frozen_whole_is_an_error(tmp_path: Path) -> None:
    store = demonstrations(tmp_path / "store", observe_every=2)
    with pytest.raises(UserError, match=r"frozen: encoder, expert are all"):
        imitation(store, BCConfig(frozen=("encoder", "expert")))


def test_a_frozen_expert_leaves_observations_to_be_encoded(tmp_path: Path) -> None:
    bc = imitation(demonstrations(tmp_path / "store", observe_every=2), BCConfig(batch_size=8, frozen=("expert",)))
    assert isinstance(bc.samplers[0], WindowSampler)
    assert bc.update()["bc_loss"] > 0


@pytest.mark.parametrize(("fit", "kept"), [(1.5, WindowSampler), (2.5, EncodedWindows)])
def test_encodings_of_all_stores_together_must_fit(tmp_path: Path, fit: float, kept: type) -> None:
    """``fit``: how often the encodings of one of two stores do."""
    store, robot = demonstrations(tmp_path / "store", observe_every=2), RobotSpec.of(PointEnv(num_envs=1).spec)
    samplers = [WindowSampler(store, action_horizon=12, batch_size=4, seed=0) for _ in range(2)]
    record = cache_bytes(PI0, cameras=len(robot.cameras), precision="float32")
    storage = StorageConfig(device_gb=fit * len(samplers[0]) * record / GB, host_gb=0.0)
    bc = BC(Pi0(replace(PI0, storage=storage), robot), BCConfig(frozen=("encoder",)), samplers, seed=0)
    assert [type(sampler) for sampler in bc.samplers] == [kept, kept]
    assert bc.update()["bc_loss"] > 0


def test_a_process_that_is_killed_stops_imitation_and_says_so(tmp_path: Path) -> None:
    store = demonstrations(tmp_path / "store", observe_every=1)
    learner = imitation(store, BCConfig(batch_size=8))
    learner.shards = GradientShards(learner.policy, bc_loss, count=2, processes=True)
    generators = [torch.Generator(), torch.Generator()]
    assert learner.shards.backward(learner.samplers[0].next_batch(), generators) > 0
    (helper,) = multiprocessing.active_children()
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"ended with exit code -9 .*--resume.*start.bc.shards 1"):
        learner.shards.backward(learner.samplers[0].next_batch(), generators)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_end_to_the_whole_group_lets_processes_compute_until_the_trainer_hangs_up(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The trainer lets its update end, for which it needs them."""
    store = demonstrations(tmp_path / "store", observe_every=1)
    learner = imitation(store, BCConfig(batch_size=8))
    shards = GradientShards(learner.policy, bc_loss, count=2, processes=True)
    batch, (helper,) = learner.samplers[0].next_batch(), multiprocessing.active_children()
    for _ in range(2):
        assert shards.backward(batch, [torch.Generator(), torch.Generator()]) > 0
        assert helper.pid is not None
        os.kill(helper.pid, number)
    shards.close()
    assert helper.exitcode == 0


def test_a_trainer_that_is_interrupted_in_a_batch_leaves_helpers_that_end_quietly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = demonstrations(tmp_path / "store", observe_every=1)
    learner = imitation(store, BCConfig(batch_size=8))
    shards = GradientShards(learner.policy, bc_loss, count=2, processes=True)
    batch, (helper,) = learner.samplers[0].next_batch(), multiprocessing.active_children()
    shards._helpers[0].begin(batch, torch.Generator())
    shards.close()  # before the gradient was fetched
    assert helper.exitcode == 0
    assert capfd.readouterr().err == ""
