"""Everything that computes, on the fake second device. Run by test_second_device.py in a process of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.device.fake_device import install

DEVICE = install()

from episodes.recorder import RecordedEnv, keep_successes  # noqa: E402 - generators are made after install
from episodes.sampler import WindowSampler  # noqa: E402
from episodes.store import EpisodeStore  # noqa: E402
from policies.bundle import save_bundle  # noqa: E402
from policies.compact_encoder import CompactEncoderConfig  # noqa: E402
from policies.denoising.action_expert import ActionExpertConfig  # noqa: E402
from policies.denoising.kernels import DDIMConfig  # noqa: E402
from policies.denoising.objectives import DiffusionConfig  # noqa: E402
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig  # noqa: E402
from policies.device import CPU, Device, select_device  # noqa: E402
from policies.policy import Policy, RobotSpec  # noqa: E402
from policies.registry import build_policy  # noqa: E402
from policies.residual.ensemble import EnsembleConfig  # noqa: E402
from policies.residual.policy import ResidualConfig, SquashedNoiseConfig, residual_on  # noqa: E402
from real_robot.serving.protocol import ActRequest  # noqa: E402
from real_robot.serving.registry import load_backend  # noqa: E402
from sims.devices.crossing import CROSSINGS, crossing  # noqa: E402
from sims.devices.env_on_device import on_device  # noqa: E402
from sims.starts import StartSequence  # noqa: E402
from sims.tabletop import TabletopConfig, TabletopEnv  # noqa: E402
from sims.tabletop import backend as tabletop_backend  # noqa: E402
from sims.tabletop.mujoco_backend import MujocoBackend  # noqa: E402
from sims.tabletop.tasks.registry import all_tasks  # noqa: E402
from sims.vector_env import StartState  # noqa: E402
from tests import dot_episodes  # noqa: E402
from tests.policies.test_every_policy import CONFIGS, ROBOT, observe  # noqa: E402
from tests.rewards.small_classifier import ALWAYS, sensors_of, untrained  # noqa: E402
from tests.rewards.test_fit import SMALL as SMALL_CLASSIFIER  # noqa: E402
from tests.worlds import PointEnv  # noqa: E402
from vla_rl.algorithms.algorithm import Algorithm  # noqa: E402
from vla_rl.algorithms.bc import BC, BCConfig  # noqa: E402
from vla_rl.algorithms.grpo import GRPO, GRPOConfig, GRPOUpdateConfig  # noqa: E402
from vla_rl.algorithms.off_policy import OffPolicy  # noqa: E402
from vla_rl.algorithms.off_policy_settings import EntropyConfig, OffPolicyConfig  # noqa: E402
from vla_rl.algorithms.ppo import PPO, PPOConfig  # noqa: E402
from vla_rl.algorithms.update_settings import UpdateConfig  # noqa: E402
from vla_rl.bench.options import BenchOptions  # noqa: E402
from vla_rl.bench.train import bench_train  # noqa: E402
from vla_rl.bench.transfers import TransferCounter  # noqa: E402
from vla_rl.config.imagination import WorldModelConfig  # noqa: E402
from vla_rl.rewards.bundle import load_classifier  # noqa: E402
from vla_rl.rewards.classified_env import ClassifiedEnv  # noqa: E402
from vla_rl.runners.demonstrations import Attempts, run_expert  # noqa: E402
from vla_rl.runners.evaluate import evaluate_policy  # noqa: E402
from vla_rl.runners.iterations import algorithm_state, restore_algorithm  # noqa: E402
from vla_rl.runners.reward import fit_classifier  # noqa: E402
from vla_rl.runners.world_model import (  # noqa: E402
    WORLD_MODEL_FILE,
    fit_reward_model,
    make_imagined_env,
    open_clips,
    usual_error,
)
from vla_rl.runs.checkpoint import load_tree, save_tree  # noqa: E402
from world_models.bundle import load_world_model, save_world_model  # noqa: E402
from world_models.data.keyframes import KeyframeConfig, Keyframes  # noqa: E402
from world_models.evaluation.evaluate import WorldModelEvaluation  # noqa: E402
from world_models.registry import build_world_model  # noqa: E402
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig  # noqa: E402
from world_models.training.kinematics import KinematicsFit  # noqa: E402
from world_models.training.reward_model import RewardModelFit, imagine_observations  # noqa: E402

SECOND = select_device("fakegpu")
ENCODER = CompactEncoderConfig(width=32, text_width=16, image_widths=(8,), queries=2, query_heads=2)
EXPERT = ActionExpertConfig(depth=1)
FLOW = DenoisingPolicyConfig(encoder=ENCODER, expert=EXPERT)
DPPO = DenoisingPolicyConfig(
    encoder=ENCODER,
    expert=EXPERT,
    objective=DiffusionConfig(),
    act=DDIMConfig(),
    explore=DDIMConfig(eta=1.0, train_last=2),
)
UPDATE = UpdateConfig(
    minibatch=8, micro_batch=4, epochs=1, average=0.9, entropy_weight=0.01, reference_weight=0.1, target_kl=None
)
STEPWISE = UpdateConfig(
    minibatch=8, micro_batch=4, epochs=1, reduction="step_mean", denoising_discount=0.9, clip_first_step=0.01
)
GROUPS = GRPOConfig(
    groups=2,
    group_size=2,
    min_success=0.0,
    max_success=1.0,
    update=GRPOUpdateConfig(minibatch=8, micro_batch=8, epochs=1, reference_weight=0.1),
)
ALGORITHMS: dict[str, Callable[[Policy, PointEnv], Algorithm]] = {
    "ppo": lambda policy, env: PPO(PPOConfig(chunks=2, critic_warmup=0, update=UPDATE), policy, env, seed=1),
    "dppo": lambda policy, env: PPO(PPOConfig(chunks=2, critic_warmup=0, update=STEPWISE), policy, env, seed=1),
    "grpo": lambda policy, env: GRPO(GROUPS, policy, env, seed=1),
}
CRITIC = EnsembleConfig(hidden=(16,), members=3)
OFF_POLICY = OffPolicyConfig(
    chunks=4, warmup=8, warmup_noise=0.1, critic_warmup=2, batch_size=16, demonstration_share=0.0, critic=CRITIC
)
TD3 = ResidualConfig(action_horizon=4, hidden=(16,))
SAC = dataclasses.replace(TD3, noise=SquashedNoiseConfig(), encoder=ENCODER)
ALGORITHMS |= {
    "off_policy_td3": lambda policy, env: OffPolicy(OFF_POLICY, residual_on(policy, TD3), env, seed=1),
    "off_policy_sac": lambda policy, env: OffPolicy(
        dataclasses.replace(OFF_POLICY, entropy=EntropyConfig()), residual_on(policy, SAC), env, seed=1
    ),
}
SIDES = {"environment on the host": torch.device("cpu"), "environment on the device": DEVICE}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def policy_of(env: PointEnv, device: Device, config: Any = FLOW) -> Policy:
    torch.manual_seed(0)
    policy = build_policy(config, RobotSpec.of(env.spec))
    policy.prepare_to_explore()
    return device.place(policy)


def algorithm(name: str, device: Device, side: torch.device) -> Algorithm:
    env = PointEnv(num_envs=4, max_steps=24, device=side)
    return ALGORITHMS[name](policy_of(env, device, DPPO if name == "dppo" else FLOW), env)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in policy.state_dict().items()}


def rewarded(device: Device, side: torch.device) -> Algorithm:
    """PPO whose only reward is a classifier that always declares success at its second classified observation."""
    env = PointEnv(num_envs=4, max_steps=24, device=side)
    model = device.place(untrained(sensors_of(env.spec), threshold=ALWAYS, every=2, consecutive=2))
    return ALGORITHMS["ppo"](policy_of(env, device), ClassifiedEnv(env, model))


# -- the device itself ------------------------------------------------------------------------------------------------


def test_the_device_refuses_what_cuda_refuses() -> None:
    here, there = torch.ones(3, device=DEVICE), torch.ones(3)
    for operation in (
        lambda: here + there,
        lambda: torch.stack([here, there]),
        lambda: here.clamp(torch.tensor(0.0), torch.tensor(1.0)),
        lambda: here.numpy(),
        lambda: torch.randn(3, device=DEVICE, generator=torch.Generator()),
        lambda: torch.randn(3, generator=torch.Generator(DEVICE)),
        lambda: torch.Generator(DEVICE).set_state(torch.Generator().get_state()),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            operation()
    assert (here + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0, 2.0]
    assert here[torch.tensor([0, 2])].device == DEVICE
    table = torch.zeros(3, 2, device=DEVICE)
    table[[0, 2], 1], table[torch.tensor([1]), 0], table[..., 0] = 1.0, 2.0, 3.0
    assert table.cpu().tolist() == [[3.0, 1.0], [3.0, 0.0], [3.0, 1.0]]


# -- algorithms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES.keys())
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_trains_and_only_named_tensors_cross(name: str, side: torch.device) -> None:
    learner = algorithm(name, SECOND, side)
    before = weights(learner.policy)
    learner.iterate()
    with TransferCounter() as counter:
        metrics = learner.iterate()
    assert counter.unnamed == {}
    assert {"outcomes", "metrics"} <= counter.counts.keys()
    assert ("observations" in counter.counts) == ("actions" in counter.counts) == (side.type == "cpu")
    assert all(np.isfinite(value) for key, value in metrics.items() if key != "success"), metrics
    after = weights(learner.policy)
    assert any(not torch.equal(after[key], value) for key, value in before.items())
    assert {parameter.device for parameter in learner.policy.parameters()} == {DEVICE}
    assert {tensor.device for tensor in learner.collector._state.tensors()} <= {DEVICE}


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES.keys())
def test_a_success_classifier_is_the_reward_and_only_named_tensors_cross(side: torch.device, tmp_path: Path) -> None:
    whole = rewarded(SECOND, side)
    with TransferCounter() as counter:
        metrics = whole.iterate()
    assert counter.unnamed == {}
    assert metrics["success"] == 1.0
    save_tree(tmp_path / "state.safetensors", algorithm_state(whole))
    resumed = rewarded(SECOND, side)
    restore_algorithm(resumed, load_tree(tmp_path / "state.safetensors"))
    whole.iterate()
    resumed.iterate()
    assert all(torch.equal(value, weights(whole.policy)[key]) for key, value in weights(resumed.policy).items())


def test_a_success_classifier_is_fitted(tmp_path: Path) -> None:
    dot_episodes.store(tmp_path / "episodes", 60).close()
    config = dataclasses.replace(
        SMALL_CLASSIFIER, steps=3, mined_steps=2, precision=0.0, batch_size=8, train_encoder=False
    )
    report = fit_classifier(config, [tmp_path / "episodes"], tmp_path / "classifier", seed=0, device=SECOND)
    assert load_classifier(tmp_path / "classifier", SECOND).device == DEVICE
    assert report["threshold"] == load_classifier(tmp_path / "classifier").threshold.item()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_is_the_same_run(name: str, tmp_path: Path) -> None:
    """Through a checkpoint on the host."""
    whole = algorithm(name, SECOND, DEVICE)
    whole.iterate()
    save_tree(tmp_path / "state.safetensors", algorithm_state(whole))
    whole.iterate()
    resumed = algorithm(name, SECOND, DEVICE)
    restore_algorithm(resumed, load_tree(tmp_path / "state.safetensors"))
    resumed.iterate()
    assert all(torch.equal(value, weights(whole.policy)[key]) for key, value in weights(resumed.policy).items())


def test_a_checkpoint_goes_to_another_device_and_back(tmp_path: Path) -> None:
    learner = algorithm("ppo", CPU, torch.device("cpu"))
    for device, side in ((SECOND, DEVICE), (CPU, torch.device("cpu"))):
        learner.iterate()
        save_tree(tmp_path / "state.safetensors", algorithm_state(learner))
        there = algorithm("ppo", device, side)
        restore_algorithm(there, load_tree(tmp_path / "state.safetensors"))
        assert all(torch.equal(value, weights(learner.policy)[key]) for key, value in weights(there.policy).items())
        learner = there
    assert learner.iterate()["control_steps"] > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_every_policy_acts_and_learns(name: str) -> None:
    torch.manual_seed(0)
    policy = SECOND.place(build_policy(CONFIGS[name], ROBOT))
    policy.prepare_to_explore()
    obs, generator = observe(3).to(DEVICE), torch.Generator(DEVICE)
    context, _ = policy.encode(obs, policy.initial_state(len(obs)))
    sample = policy.sample(context, generator)
    assert policy.act(context, generator).device == DEVICE
    again = policy.log_prob(policy.restore(policy.store(context)), sample.trace)
    (again.mean() + policy.entropy(context, sample.trace).mean()).backward()
    torch.testing.assert_close(again.detach().cpu(), sample.log_prob.cpu(), rtol=0, atol=1e-3)


def test_bench_train_counts_only_named_transfers() -> None:
    rows = {row["name"]: row["value"] for row in bench_train(BenchOptions(device="fakegpu"))}
    assert rows["transfers, unnamed"] == 0
    assert rows["transfers, actions"] == 4  # one for each chunk
    assert {name for name in rows if name.startswith("transfers, ")} <= {
        "transfers, unnamed",
        *(f"transfers, {name}" for name in CROSSINGS),
    }


# -- faults -----------------------------------------------------------------------------------------------------------


def on_the_host(method: Callable[..., Any]) -> Callable[..., Any]:
    """``policy.sample`` with a ``.cpu()`` in it."""
    return lambda context, generator: dataclasses.replace(
        sample := method(context, generator), action=sample.action.cpu()
    )


def with_a_cpu_generator(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda context, generator: method(context, torch.Generator())


def with_zeros_on_the_host(method: Callable[..., Any]) -> Callable[..., Any]:
    """A ``torch.zeros`` without device."""
    return lambda context, generator: dataclasses.replace(
        sample := method(context, generator), log_prob=sample.log_prob + torch.zeros(sample.log_prob.shape)
    )


def read_at_every_decision(method: Callable[..., Any]) -> Callable[..., Any]:
    """An ``.item()``, which is correct but makes the host wait."""

    def sample(context: Any, generator: torch.Generator) -> Any:
        drawn = method(context, generator)
        assert drawn.action.sum().item() < 1e9
        return drawn

    return sample


@pytest.mark.parametrize("fault", [on_the_host, with_a_cpu_generator, with_zeros_on_the_host, read_at_every_decision])
def test_a_planted_fault_is_found(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    learner = algorithm("ppo", SECOND, DEVICE)
    monkeypatch.setattr(learner.policy, "sample", fault(learner.policy.sample))
    with TransferCounter() as counter:
        try:
            learner.iterate()
        except RuntimeError as error:
            found = str(error)
        else:
            found = str(counter.unnamed)
    assert "device" in found or "generator" in found or "_local_scalar_dense" in found


# -- simulators, demonstrations ---------------------------------------------------------------------------------------


class OnSecondDevice(MujocoBackend):
    """The physics of C MuJoCo, whose tensors are on the device, as those of MuJoCo Warp are."""

    device = DEVICE

    @property
    def qpos(self) -> torch.Tensor:
        with crossing("observations"):
            return super().qpos.clone().to(DEVICE)

    def step(self, running: torch.Tensor, controls: torch.Tensor) -> None:
        with crossing("actions"):
            on_host = running.cpu(), controls.cpu()
        super().step(*on_host)

    def render(self, env_ids: Sequence[int]) -> torch.Tensor:
        with crossing("observations"):
            return super().render(env_ids).to(DEVICE)


def open_on_second_device(config: TabletopConfig) -> MujocoBackend:
    size = {"cameras": config.cameras, "image_size": config.image_size}
    return OnSecondDevice(num_envs=config.num_envs, threads=1, renderer=config.renderer, **size)


@pytest.fixture
def tabletop(monkeypatch: pytest.MonkeyPatch) -> Iterator[TabletopEnv]:
    monkeypatch.setattr(tabletop_backend, "BACKENDS", {"mujoco": open_on_second_device})
    tasks = tuple(all_tasks())
    config = TabletopConfig(
        tasks=tasks,
        num_envs=len(tasks),
        demonstrator="human",
        acceleration_limits=True,
        action_delay=2,
        reward="shaped",
    )
    env = TabletopEnv(config)
    yield env
    env.close()


def test_every_tabletop_task_steps_without_waiting(tabletop: TabletopEnv) -> None:
    starts = [StartState(task=i, seed=i) for i in range(tabletop.spec.num_envs)]
    tabletop.reset(start=starts)
    expert = tabletop.expert(noise=1.0, seed=0)
    tabletop.step(expert.act())  # constants are made once
    tabletop.observe()
    with TransferCounter() as counter:
        for _ in range(3):
            step = tabletop.step(expert.act())
        obs = tabletop.observe()
    assert counter.unnamed == {}
    assert {step.reward.device, obs.images.device, obs.state.device, obs.instruction.device} == {DEVICE}
    captured = tabletop.capture([2, 0])
    tabletop.reset([0, 2], start=captured)
    assert torch.equal(tabletop.observe([2, 0]).state.cpu(), obs.state.cpu()[[0, 2]])


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES.keys())
def test_demonstrations_are_recorded(side: torch.device, tmp_path: Path) -> None:
    env = PointEnv(num_envs=4, device=side)
    store = EpisodeStore(tmp_path / "demonstrations", create=True)
    record(env, store)
    assert len(store.entries()) == 4


def record(env: PointEnv, store: EpisodeStore) -> None:
    recorder = RecordedEnv(env, store, source="expert", split="train", keep=keep_successes)
    starts, attempts = StartSequence("demos", seed=0, num_tasks=3), Attempts(3)
    expert = env.expert(noise=0.3, seed=0)
    run_expert(recorder, expert, starts, attempts, episodes=4, observe_every=2, on_recorded=lambda count: None)


# -- behavior cloning, evaluation, serving -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> EpisodeStore:
    store = EpisodeStore(tmp_path_factory.mktemp("demonstrations"), create=True)
    record(PointEnv(num_envs=4), store)
    return store


@pytest.mark.parametrize("frozen", [(), ("encoder",)], ids=["images", "encoded once"])
def test_behavior_cloning(demonstrations: EpisodeStore, frozen: tuple[str, ...], tmp_path: Path) -> None:
    def cloning(device: Device) -> BC:
        policy = policy_of(PointEnv(num_envs=1), device)
        sampler = WindowSampler(demonstrations, action_horizon=8, future_steps=(16, 32), batch_size=6, seed=0)
        policy.fit_normalizer(*sampler.statistics())
        return BC(policy, BCConfig(steps=4, frozen=frozen, shards=2, matrix_learning_rate=1e-3), [sampler], seed=0)

    whole = cloning(SECOND)
    whole.update()
    save_tree(tmp_path / "state.safetensors", whole.state_dict())
    with TransferCounter() as counter:
        whole.update()
    assert counter.unnamed == {}
    resumed = cloning(SECOND)
    resumed.load_state_dict(load_tree(tmp_path / "state.safetensors"))
    resumed.update()
    assert all(torch.equal(value, weights(whole.policy)[key]) for key, value in weights(resumed.policy).items())


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES.keys())
def test_evaluation(side: torch.device) -> None:
    env = PointEnv(num_envs=3, max_steps=16, device=side)
    starts = StartSequence("evaluation", seed=0, num_tasks=3).take(5)
    for stochastic in (False, True):
        with TransferCounter() as counter:
            result = evaluate_policy(
                policy_of(env, SECOND), env, starts, seed=0, stochastic=stochastic, control="shuffled_instruction"
            )
        assert result["episodes"] == 5
        assert counter.unnamed == {}


def test_serving(tmp_path: Path) -> None:
    """Also with committed actions and guidance, which differentiates through the network."""
    policy = policy_of(PointEnv(num_envs=1), CPU, dataclasses.replace(FLOW, max_prefix=3))
    assert isinstance(policy, DenoisingPolicy)
    save_bundle(policy, tmp_path / "bundle")
    backend = load_backend(tmp_path / "bundle", "eager", SECOND)
    hello = backend.hello
    for method in ("prefix", "replace", "guided", "jacobian_free"):
        request = ActRequest(
            id=0,
            images={camera: np.zeros((*hello.image_size, 3), np.uint8) for camera in hello.cameras},
            state=np.zeros(hello.state_dim, np.float32),
            instruction="go",
            method=method,  # type: ignore[arg-type]
            leftover=np.full((3, hello.action_dim), 0.25, np.float32),
            delay=2,
            execute_steps=4,
        )
        with TransferCounter() as counter:
            actions, _ = backend.act(request, backend.initial_state())
        assert actions.shape == (8, 2)
        assert set(counter.counts) <= {"requests"}


# -- world models ------------------------------------------------------------------------------------------------------

WORLD = WorldModelConfig(
    dynamics=dot_episodes.DYNAMICS,
    fit=DynamicsFitConfig(steps=4, batch_size=4, warmup=1, roll_in_from=0.0),
    reward_model=dataclasses.replace(dot_episodes.REWARD_MODEL, steps=3, batch_size=8, imagined_clips=8),
    imagined_env=dot_episodes.ImaginedEnvConfig(num_envs=4, reward_every=2),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The episodes, and a world model that was fitted to them on the second device: dynamics, then the reward model."""
    folder = tmp_path_factory.mktemp("world")
    store = dot_episodes.store(folder / "store", 40)
    clips, calibration = open_clips([store.path], WORLD, "fit"), open_clips([store.path], WORLD, "calibration")
    with TransferCounter() as counter:
        torch.manual_seed(0)
        dynamics = SECOND.place(build_world_model(WORLD.dynamics, dot_episodes.ROBOT))
        with crossing("scales"):
            dynamics.fit_scales(*(part.to(DEVICE) for part in clips.statistics()))
        dot_episodes.finish(KinematicsFit(dynamics, clips, seed=0, steps=3))
        dot_episodes.finish(DynamicsFit(dynamics, WORLD.fit, clips, seed=0))
        reward_model, metrics = fit_reward_model(
            WORLD, dynamics.eval(), clips, calibration, folder / "reward_model", seed=0, policy=None
        )
        usual = usual_error(dynamics, calibration, seed=0)
        save_world_model(dynamics, reward_model, folder / WORLD_MODEL_FILE, usual_error=usual, metrics=metrics)
    assert counter.unnamed == {}
    return store.path, folder


def test_world_model_evaluation(world: tuple[Path, Path]) -> None:
    store, folder = world
    fitted = load_world_model(folder / WORLD_MODEL_FILE, SECOND)
    assert fitted.dynamics.device == fitted.reward_model.device == DEVICE
    clips = open_clips([store], WORLD, "held_out")
    evaluation = WorldModelEvaluation(reward_model=fitted.reward_model, clips=clips, reward_every=2, seed=0)
    report = evaluation.report(fitted.dynamics, env=None, no_action=None, locate=None, horizons=(1,), swaps=2)
    assert report["episodes"] == len(clips.entries)


def test_a_resumed_world_model_fit_is_the_same_fit(world: tuple[Path, Path], tmp_path: Path) -> None:
    store, folder = world
    clips, fits = open_clips([store], WORLD, "fit"), []
    for _ in range(2):
        fitted = load_world_model(folder / WORLD_MODEL_FILE, SECOND)
        imagined = imagine_observations(fitted.dynamics, clips, fitted.reward_model.config, count=4, seed=0)
        parts = (
            DynamicsFit(fitted.dynamics.train(), WORLD.fit, clips, seed=0),
            RewardModelFit(fitted.reward_model, clips, imagined, seed=0),
        )
        fits.append(parts)
    for whole, resumed in zip(*fits, strict=True):
        whole.update()
        save_tree(tmp_path / "state.safetensors", whole.state_dict())
        expected = whole.update()
        resumed.load_state_dict(load_tree(tmp_path / "state.safetensors"))
        assert resumed.update() == expected


def test_ppo_in_imagined_rollouts(world: tuple[Path, Path]) -> None:
    store, folder = world
    fitted = load_world_model(folder / WORLD_MODEL_FILE, SECOND)
    keyframes = Keyframes(open_clips([store], WORLD, "fit"), KeyframeConfig(), tasks=("go",))
    env = make_imagined_env(WORLD, fitted, keyframes, max_steps=8)
    assert env.spec.device == DEVICE
    assert on_device(env, DEVICE) is env
    torch.manual_seed(0)
    config = dataclasses.replace(FLOW, action_horizon=4, expert=ActionExpertConfig(depth=1, action_patch=4))
    policy = SECOND.place(build_policy(config, dot_episodes.ROBOT))
    learner = PPO(PPOConfig(chunks=2, critic_warmup=0, update=UPDATE), policy, env, seed=0)
    learner.iterate()
    with TransferCounter() as counter:
        learner.iterate()
    assert counter.unnamed == {}
    restore_algorithm(learner, algorithm_state(learner))
    learner.iterate()
