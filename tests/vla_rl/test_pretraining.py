"""Pretraining on labeled scenes: the file that it leaves, and that an interrupted one continues exactly."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as load_tensors

from policies.backbone import load_backbone
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.device import CPU
from policies.policy import RobotSpec
from sims.errors import UserError
from sims.registry import pretraining_scenes
from sims.tabletop import TabletopConfig
from tests.worlds import PointEnv
from vla_rl.algorithms.pretraining import Pretraining, PretrainingConfig, ScenePool
from vla_rl.config.experiment import EvaluationConfig, Experiment, Imitation
from vla_rl.runners.pretrain import pretrain
from vla_rl.runs.checkpoint import load_tree, save_tree

SIM = TabletopConfig(image_size=(16, 16), num_envs=1)
POLICY = DenoisingPolicyConfig(
    encoder=CompactEncoderConfig(width=16, text_width=16, image_widths=(8,), landmarks=32),
    expert=ActionExpertConfig(depth=1),
)
ROBOT = RobotSpec(action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(16, 16), control_hz=20.0)
FIT = PretrainingConfig(steps=4, batch_size=8, fresh=4, pool=20, warmup=1)


@pytest.fixture(autouse=True)
def few_test_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering all of them takes longer than everything else here."""
    monkeypatch.setattr("vla_rl.algorithms.pretraining.TEST_SCENES", 16)


def test_pretraining_leaves_a_backbone_and_reports_errors(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    experiment = Experiment(sim=SIM, start=Imitation(policy=POLICY), pretraining=FIT)
    out = tmp_path / "encoder.safetensors"
    errors = pretrain(experiment, tmp_path / "run", out=out)
    assert errors["object_all_median_mm"] > 0
    load_backbone(DenoisingPolicy(POLICY, ROBOT), str(out))
    further = replace(experiment, seed=1, pretraining=replace(FIT, start=out))
    assert pretrain(further, tmp_path / "further", out=out) != errors


def test_a_folder_goes_on_with_what_was_pretrained_in_it_alone(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    experiment = Experiment(sim=SIM, start=Imitation(policy=POLICY), pretraining=replace(FIT, steps=1))
    run_dir, out, other = (tmp_path / name for name in ("run", "a.safetensors", "b.safetensors"))
    pretrain(experiment, run_dir, out=out)
    for changes in (
        {"seed": 1},
        {"pretraining": replace(FIT, steps=1, start=out)},
        {"pretraining": replace(FIT, steps=1, learning_rate=1e-4)},
        {"sim": replace(SIM, cameras=("agent",))},
        {"sim": replace(SIM, detail="low")},
        {"sim": replace(SIM, shadows=True)},
    ):
        with pytest.raises(UserError, match=r"holds a pretraining with other settings.*choose another --run-dir"):
            pretrain(replace(experiment, **changes), run_dir, out=other)  # type: ignore[arg-type]
    assert not other.exists()
    elsewhere = replace(experiment, sim=replace(SIM, num_envs=2, threads=1), evaluation=EvaluationConfig(episodes=3))
    pretrain(elsewhere, run_dir, out=other)
    assert load_tensors(other).keys() == load_tensors(out).keys()
    assert all(torch.equal(tensor, load_tensors(out)[name]) for name, tensor in load_tensors(other).items())


def test_a_folder_goes_on_with_the_start_that_it_had(tmp_path: Path) -> None:
    """Not with what is in that file now."""
    torch.set_num_threads(1)
    experiment = Experiment(sim=SIM, start=Imitation(policy=POLICY), pretraining=replace(FIT, steps=1))
    start, out = tmp_path / "start.safetensors", tmp_path / "out.safetensors"
    pretrain(experiment, tmp_path / "first", out=start)
    further = replace(experiment, seed=1, pretraining=replace(FIT, steps=1, start=start))
    pretrain(further, tmp_path / "run", out=out)
    moved = start.rename(tmp_path / "moved.safetensors")
    pretrain(replace(further, pretraining=replace(FIT, steps=1, start=moved)), tmp_path / "run", out=out)
    pretrain(replace(experiment, seed=2), tmp_path / "second", out=moved)
    with pytest.raises(UserError, match="another start"):
        pretrain(replace(further, pretraining=replace(FIT, steps=1, start=moved)), tmp_path / "run", out=out)


def test_an_interrupted_pretraining_continues_exactly(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    source = pretraining_scenes(SIM)

    def fresh() -> Pretraining:
        torch.manual_seed(0)
        return Pretraining(DenoisingPolicy(POLICY, ROBOT), FIT, source, seed=0, fit_normalizer=True)

    whole, first, second = fresh(), fresh(), fresh()
    losses = [whole.update() for _ in range(4)]
    for _ in range(2):
        first.update()
    save_tree(tmp_path / "state", first.state_dict())
    second.load_state_dict(load_tree(tmp_path / "state"))
    assert [second.update() for _ in range(2)] == losses[2:]
    assert second.evaluate() == whole.evaluate()
    for one, other in zip(second.parameters, whole.parameters, strict=True):
        assert torch.equal(one, other)
    source.close()


def test_the_encoder_computes_in_the_precision_of_the_run() -> None:
    torch.set_num_threads(1)
    source = pretraining_scenes(SIM)
    losses, errors = [], []
    for device in (CPU, replace(CPU, precision="bfloat16")):
        torch.manual_seed(0)
        policy = device.place(DenoisingPolicy(POLICY, ROBOT))
        fit = Pretraining(policy, FIT, source, seed=0, fit_normalizer=True)
        errors.append(fit.evaluate()["object_all_median_mm"])
        losses.append(fit.update()["landmark_loss"])
        assert all(one.dtype == torch.float32 for one in fit.parameters)
    source.close()
    for exact, rounded in (losses, errors):
        assert rounded != exact
        assert rounded == pytest.approx(exact, rel=0.05)


def test_the_pool_holds_the_newest_scenes() -> None:
    source = pretraining_scenes(SIM)
    stepwise, at_once = (ScenePool(source, capacity=6, seed=0) for _ in range(2))
    for drawn in (4, 7, 10):
        stepwise.grow_to(drawn)
    at_once.grow_to(10)
    expected = source.scenes(seed=0, first=4, count=6)
    source.close()
    for pool in (stepwise, at_once):
        drawn = pool.sample(200, torch.Generator().manual_seed(0)).landmarks
        assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in expected.landmarks.tolist()}


def test_a_simulator_without_scenes_and_a_wrong_number_of_landmarks_are_errors() -> None:
    with pytest.raises(UserError, match="point has no scenes"):
        pretraining_scenes(PointEnv(num_envs=1).spec)
    source = pretraining_scenes(SIM)
    other = replace(POLICY, encoder=replace(POLICY.encoder, landmarks=3))
    with pytest.raises(UserError, match=r"landmarks must be 32, .*got 3"):
        Pretraining(DenoisingPolicy(other, ROBOT), FIT, source, seed=0, fit_normalizer=True)
    source.close()
