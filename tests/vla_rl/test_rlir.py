"""Actions recovered from frames, and a world model trained by the code that trains policies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from policies.audit import audit_log_prob
from policies.denoising.kernels import FlowSDEConfig, build_kernel
from policies.denoising.objectives import FlowMatching, FlowMatchingConfig
from tests import dot_episodes
from vla_rl.algorithms.rlir import RLIR, RLIRConfig, RLIRUpdateConfig
from world_models.bundle import load_world_model, save_world_model
from world_models.data.clip import first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.models.inverse_dynamics import InverseDynamics, InverseDynamicsConfig
from world_models.training.inverse_dynamics import InverseDynamicsFit, gate
from world_models.training.world_policy import PredictionQuery, WorldPolicy
from world_models.world_model import WorldModelError


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler(
        [dot_episodes.store(tmp_path_factory.mktemp("dots") / "store")], action_horizon=dot_episodes.HORIZON
    )


@pytest.fixture(scope="module")
def inverse(clips: ClipSampler) -> InverseDynamics:
    torch.manual_seed(0)
    model = InverseDynamics(
        InverseDynamicsConfig(width=8, steps=200, batch_size=32, learning_rate=3e-3), dot_episodes.ROBOT
    )
    fit = InverseDynamicsFit(model, clips, seed=0)
    while fit.step < fit.steps:
        fit.update()
    model.eval()
    return model


def test_the_gate_tells_true_from_manipulated_clips(inverse: InverseDynamics, clips: ClipSampler) -> None:
    """The second action has no effect and cannot be recovered; the first can."""
    errors = gate(inverse, clips, seed=1)["errors"]
    assert set(errors) == {"true", "static", "blurred", "shuffled", "reversed", "wrong_action"}
    assert errors["true"] == min(errors.values())
    torch.manual_seed(1)
    blind = InverseDynamics(InverseDynamicsConfig(width=8), dot_episodes.ROBOT)
    assert not gate(blind, clips, seed=1)["passed"]


def test_sampling_and_scoring_agree(clips: ClipSampler) -> None:
    world, _ = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    clip = clips.draw(np.random.default_rng(0), 4, 1)
    query = PredictionQuery(history=first_history(world, clip), action=clip.action[:, 0], length=clip.length[:, 0])
    policy = WorldPolicy(world, build_kernel(FlowSDEConfig(steps=3), FlowMatching(FlowMatchingConfig())))
    sample = policy.sample(query, torch.Generator().manual_seed(0))
    assert sample.log_prob.shape == (4, 3, 2, 3 * 16 * 16)
    audit_log_prob(policy, query, sample)


@pytest.mark.parametrize("needs_a_policy", [{"average": 0.0}, {"average": 0.9}, {"reference_weight": 0.5}])
def test_settings_of_an_update_that_need_a_policy_are_refused(needs_a_policy: dict[str, float]) -> None:
    (name,) = needs_a_policy
    with pytest.raises(ValueError, match=rf"update.{name} copies a policy, and this trains a world model: leave it "):
        RLIRUpdateConfig(**needs_a_policy)  # type: ignore[arg-type]


def test_rlir_trains_the_world_model(inverse: InverseDynamics, clips: ClipSampler, tmp_path: Path) -> None:
    """One that was fitted and saved; where actions lead the robot stays as it was fitted."""
    made, reward_model = dot_episodes.models()
    made.fit_scales(*clips.statistics())
    torch.nn.init.normal_(made.out.weight, std=0.05)  # zero at first, when noise does not change the frames
    save_world_model(
        made, reward_model, tmp_path / "world.safetensors", reference_error=1.0, metrics={}, reward_every=2
    )
    world = load_world_model(tmp_path / "world.safetensors").dynamics
    before = {name: value.clone() for name, value in world.state_dict().items()}
    lenient = InverseDynamics(InverseDynamicsConfig(width=8, gate_ratio=1.0), dot_episodes.ROBOT)
    lenient.load_state_dict(inverse.state_dict())
    rlir = RLIR(world, lenient, clips, clips, RLIRConfig(queries=4, group_size=4), seed=0)
    metrics = rlir.iterate()
    assert metrics["reward_spread"] > 0
    assert metrics["policy_steps"] == 1
    changed = {name for name, value in world.state_dict().items() if not torch.equal(value, before[name])}
    assert "out.weight" in changed
    assert not [name for name in changed if name.startswith("kinematics.")]
    with pytest.raises(WorldModelError, match="fails its gate"):
        RLIR(
            world,
            InverseDynamics(InverseDynamicsConfig(width=8), dot_episodes.ROBOT),
            clips,
            clips,
            RLIRConfig(),
            seed=0,
        )
