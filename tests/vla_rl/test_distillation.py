"""A student of fewer denoising steps acts as its teacher does."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from episodes.sampler import Targets, WindowSampler
from episodes.store import EpisodeStore
from policies.bundle import load_bundle, read_bundle_info, save_bundle
from policies.categorical import CategoricalPolicy, CategoricalPolicyConfig
from policies.denoising.chunk_policy import DenoisedChunks
from policies.denoising.kernels import DDIMConfig, FlowSDEConfig
from policies.denoising.policy import DenoisingPolicy
from policies.device import CPU, Device
from policies.policy import RobotSpec
from policies.pretrained.convention import Convention
from policies.pretrained.lora import LoRAConfig
from policies.pretrained.storage import StorageConfig
from policies.registry import build_policy
from sims.errors import UserError
from sims.vector_env import StartState
from tests.policies.pretrained.toy import DIFFUSION_POLICY, toy
from tests.vla_rl.test_imitation import SMALL, demonstrations
from tests.worlds import PointEnv
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.algorithms.distillation import DistillationConfig, TeacherLoss, make_student
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.report.table import distillation_lines
from vla_rl.runners.distill import distill, fit_student

TINY = Path(__file__).parents[1] / "data" / "tiny.yaml"
ROBOT = RobotSpec.of(PointEnv(num_envs=1).spec)


def cloned(store: EpisodeStore) -> DenoisingPolicy:
    """Whose velocity is far from constant along a trajectory: it has seen demonstrations."""
    torch.manual_seed(0)
    policy = DenoisingPolicy(SMALL, ROBOT)
    sampler = WindowSampler(store, action_horizon=8, batch_size=16, seed=0, future_steps=policy.spec.future_steps)
    policy.fit_normalizer(*sampler.statistics())
    bc = BC(policy, BCConfig(steps=30, warmup=5), [sampler], seed=0)
    for _ in range(30):
        bc.update()
    return policy.eval()


def test_one_step_comes_near_to_four(tmp_path: Path) -> None:
    store = demonstrations(tmp_path / "store", observe_every=3)
    teacher = cloned(store)
    student = make_student(teacher, 1, CPU)
    sampler = WindowSampler(store, action_horizon=8, batch_size=32, seed=1, future_steps=student.spec.future_steps)
    held_out = sampler.windows(sampler.next_indices()).obs
    noise = torch.randn(len(held_out), *student.spec.noise_shape, generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def error() -> float:
        """Root mean square over new draws of noise."""
        contexts = [policy.encode(held_out, policy.initial_state(len(held_out)))[0] for policy in (teacher, student)]
        wanted, got = teacher.act_from_noise(contexts[0], noise), student.act_from_noise(contexts[1], noise)
        return float((got - wanted).square().mean().sqrt())

    before = error()
    encoder = {name: tensor.clone() for name, tensor in student.state_dict().items() if name.startswith("encoder")}
    config = BCConfig(steps=80, warmup=5, learning_rate=2e-3, batch_size=32, frozen=("encoder",))
    fit = BC(student, config, [sampler], seed=0, loss=TeacherLoss(teacher=teacher))
    for _ in range(config.steps):
        fit.update()
    assert before > 0.05
    assert error() < 0.5 * before
    after = student.state_dict()
    assert encoder
    assert all(torch.equal(after[name], tensor) for name, tensor in encoder.items())


def test_a_student_goes_on_behind_a_prefix_as_its_teacher_does() -> None:
    """Chunks to the one side or the other, which the prefix alone tells."""
    torch.manual_seed(0)
    teacher = DenoisingPolicy(replace(SMALL, max_prefix=4), ROBOT).eval()
    horizon, generator = teacher.spec.action_horizon, torch.Generator().manual_seed(0)
    env = PointEnv(num_envs=64)
    env.reset(start=[StartState(task=0, seed=seed) for seed in range(64)])
    with torch.no_grad():
        context, _ = teacher.encode(env.observe(), teacher.initial_state(64))

    def drawn() -> Targets:
        side = 2.0 * torch.randint(0, 2, (64, 1, 1), generator=generator) - 1
        return Targets(action=(0.7 * side).expand(64, horizon, ROBOT.action_dim), mask=torch.ones(64, horizon))

    def fit(policy: DenoisingPolicy, loss: Callable[[Targets], torch.Tensor], steps: int) -> None:
        trained = list(policy.expert.parameters())
        optimizer = torch.optim.Adam(trained, 2e-3)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / steps)
            for parameter, gradient in zip(trained, torch.autograd.grad(loss(drawn()), trained), strict=True):
                parameter.grad = gradient
            optimizer.step()

    fit(teacher, lambda targets: teacher.bc_loss(context, targets, generator), 400)
    student = make_student(teacher, 1, CPU).eval()
    assert isinstance(student, DenoisingPolicy)

    def error(length: int) -> float:
        prefix = drawn().action[:, :length]
        wanted, got = (one.act(context, torch.Generator().manual_seed(5), prefix) for one in (teacher, student))
        return float((got - wanted)[:, length:].square().mean().sqrt())

    before = [error(length) for length in (0, 2, 4)]
    loss = TeacherLoss(teacher=teacher)
    fit(student, lambda targets: loss(student, context, targets, generator), 200)
    after = [error(length) for length in (0, 2, 4)]
    assert before[0] > 0.3 and all(now < 0.5 * then for now, then in zip(after, before, strict=True))


def test_what_cannot_be_distilled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"distillation\.fit\.progress must be null"):
        DistillationConfig(fit=BCConfig(progress=Path("runs/progress")))
    with pytest.raises(UserError, match="does not denoise"):
        make_student(CategoricalPolicy(CategoricalPolicyConfig(), ROBOT), 1, CPU)
    with pytest.raises(UserError, match="4 denoising steps already"):
        make_student(DenoisingPolicy(SMALL, ROBOT), 4, CPU)


def test_a_diffusion_policy_is_distilled_to_fewer_steps_than_ddim_trains_by_default() -> None:
    """``train_last``, 5, is of exploring alone, and what deploys does not explore."""
    teacher = build_policy(replace(DIFFUSION_POLICY, act=DDIMConfig(steps=10)), ROBOT)
    for steps in (1, 2, 5):
        student = make_student(teacher, steps, CPU)
        assert isinstance(student, DenoisedChunks) and student.act_kernel.steps == steps
    with pytest.raises(UserError, match=r"denoising_steps cannot be 3: .* must divide the objective.s 20"):
        make_student(teacher, 3, CPU)
    with pytest.raises(ValueError, match=r"train_last must be within 1\.\.4, got 5"):
        build_policy(replace(DIFFUSION_POLICY, explore=DDIMConfig(steps=4, eta=1.0)), ROBOT)


def test_a_student_with_a_trained_encoder_is_refused(tmp_path: Path) -> None:
    """Its encoding would drift, and with it what the teacher is asked to do."""
    store = demonstrations(tmp_path / "store", observe_every=3)
    teacher = cloned(store)
    experiment = load_config(Experiment, TINY, ["--distillation.fit.frozen", "[]"])
    with pytest.raises(UserError, match=r"distillation\.fit\.frozen must name what encodes observations"):
        fit_student(make_student(teacher, 1, CPU), teacher, store, experiment, tmp_path / "out")


@pytest.mark.parametrize("where", ["device", "recompute"])
def test_a_published_policy_is_distilled_wherever_its_encodings_fit(where: Any, tmp_path: Path) -> None:
    store = demonstrations(tmp_path / "store", observe_every=3)
    teacher = build_policy(replace(toy("pi0", FlowSDEConfig(steps=2)), storage=StorageConfig(where=where)), ROBOT)
    settings = ["--distillation.fit.steps", "2", "--distillation.fit.batch_size", "4"]
    experiment = load_config(Experiment, TINY, settings)
    student = make_student(teacher, 1, CPU)
    fit_student(student, teacher, store, experiment, tmp_path / "out")
    before, after = teacher.parameter_groups(), student.parameter_groups()
    for name, changed in (("encoder", False), ("expert", True)):
        same = [torch.equal(one, other) for one, other in zip(before[name], after[name], strict=True)]
        assert all(same) != changed


def test_adapted_layers_of_the_encoder_must_be_frozen(tmp_path: Path) -> None:
    store = demonstrations(tmp_path / "store", observe_every=3)
    teacher = build_policy(replace(toy("pi0", FlowSDEConfig(steps=2)), lora=LoRAConfig(rank=2)), ROBOT)
    experiment = load_config(Experiment, TINY)
    with pytest.raises(UserError, match=r"\(encoder, lora\).*got \['encoder'\], which leaves .*lora"):
        fit_student(make_student(teacher, 1, CPU), teacher, store, experiment, tmp_path / "out")


def test_a_student_computes_as_its_run_says() -> None:
    device = Device(device=torch.device("cpu"), precision="bfloat16")
    assert make_student(device.place(DenoisingPolicy(SMALL, ROBOT)), 1, device).precision == "bfloat16"


@pytest.mark.parametrize("gripper", ["as_is", "zero_to_one_inverted"])
def test_every_element_of_the_action_has_a_gradient(gripper: Any) -> None:
    """The gripper's, which is switched by its sign, and elements beyond [-1, 1] too."""
    torch.manual_seed(0)
    config = replace(toy("pi0", FlowSDEConfig(steps=2)), convention=Convention(gripper=gripper))
    teacher: Any = build_policy(config, ROBOT)
    teacher.normalizer.set_scale("action", 3 * torch.ones(2), torch.ones(2))
    student: Any = make_student(teacher, 1, CPU)
    with torch.no_grad():
        for parameter in student.parameter_groups()["expert"]:
            parameter += 0.1 * torch.randn_like(parameter)
    env = PointEnv(num_envs=4)
    env.reset(start=[StartState(task=0, seed=seed) for seed in range(4)])
    context, _ = student.encode(env.observe(), student.initial_state(4))
    targets = Targets(action=torch.zeros(4, 8, 2), mask=torch.ones(4, 8))
    TeacherLoss(teacher=teacher)(student, context, targets, torch.Generator().manual_seed(0)).backward()
    assert student.network.action_out_proj.weight.grad[:2].norm(dim=1).min() > 1e-3


def test_a_bundle_of_one_step_and_both_success_rates(tmp_path: Path) -> None:
    """Of fewer episodes than environments. Started again, it continues: nothing is recorded or fitted twice."""
    settings = ("distillation.episodes", "2", "distillation.fit.steps", "4", "distillation.fit.batch_size", "4",
                "evaluation.episodes", "2")  # fmt: skip
    overrides = [f"--{word}" if "." in word else word for word in settings]
    experiment = load_config(Experiment, TINY, overrides)
    with closing(make_env(experiment.sim)) as env:
        save_bundle(DenoisingPolicy(SMALL, RobotSpec.of(env.spec)), tmp_path / "teacher")
    result = distill(experiment, tmp_path / "teacher", tmp_path / "out")
    assert result["teacher"]["episodes"] == result["student"]["episodes"] == 2
    assert load_bundle(Path(result["bundle"])).config.act.steps == 1
    again = distill(experiment, tmp_path / "teacher", tmp_path / "out")
    assert len(EpisodeStore(tmp_path / "out" / "episodes").entries()) == 2
    assert read_bundle_info(Path(again["bundle"])).sha256 == read_bundle_info(Path(result["bundle"])).sha256
    for changes in (("distillation.denoising_steps", "2"), ("distillation.fit.steps", "5"), ("seed", "9")):
        other = load_config(Experiment, TINY, [*overrides, f"--{changes[0]}", changes[1]])
        with pytest.raises(UserError, match=r"holds a student of another policy, .*choose another --out"):
            distill(other, tmp_path / "teacher", tmp_path / "out")
    manifest = json.loads((tmp_path / "teacher/bundle.json").read_text())
    manifest["config"]["act"]["steps"] += 1
    (tmp_path / "teacher/bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="holds a student of another policy"):  # of the same weights
        distill(experiment, tmp_path / "teacher", tmp_path / "out")
    with closing(make_env(experiment.sim)) as env:
        save_bundle(DenoisingPolicy(SMALL, RobotSpec.of(env.spec)), tmp_path / "teacher")
    with pytest.raises(UserError, match="holds a student of another policy"):
        distill(experiment, tmp_path / "teacher", tmp_path / "out")
    assert len(EpisodeStore(tmp_path / "out" / "episodes").entries()) == 2
    assert distillation_lines(again).splitlines()[1].startswith("student: success ")
