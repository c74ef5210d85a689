"""Fit of the kinematics: where actions lead the robot, from recorded numbers without images.

It takes seconds and is more exact than what the image network learns in minutes; errors of centimeters there would
blur all predicted images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from policies.schedule import cosine_schedule
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from world_models.data.clip import Transitions
from world_models.data.clip_sampler import ClipSampler
from world_models.models.flow_model import FlowWorldModel
from world_models.training.optimization import Optimization
from world_models.world_model import History

BATCH_SIZE, LEARNING_RATE, WARMUP = 64, 2e-3, 50


@dataclass(frozen=True, kw_only=True)
class KinematicsExamples(TensorDataclass):
    """``change``: of the state, in units of the model's ``step_std``."""

    features: Float[Tensor, "*N condition_features"]
    change: Float[Tensor, "*N state_dim"]


class KinematicsFit(Optimization[KinematicsExamples]):
    """Regression of a chunk's change of state; freeze ``model.kinematics`` afterwards."""

    def __init__(self, model: FlowWorldModel, clips: ClipSampler, *, seed: int, steps: int) -> None:
        kinematics = model.kinematics
        super().__init__(
            kinematics, torch.optim.AdamW(kinematics.parameters(), lr=LEARNING_RATE), steps=steps, seed=seed
        )
        self.kinematics = kinematics
        with crossing("batches"):
            transitions = clips.transitions(self._rng).to(model.device)
        self._examples = _examples(model, transitions)

    def draw(self) -> KinematicsExamples:
        index = torch.randint(len(self._examples), (BATCH_SIZE,), generator=self._generator, device=self.device)
        return self._examples[index]

    def learning_rate(self) -> float:
        return LEARNING_RATE * cosine_schedule(self.step, steps=self.steps, warmup=WARMUP)

    def loss(self, examples: KinematicsExamples) -> tuple[Float[Tensor, ""], dict[str, float]]:
        return F.smooth_l1_loss(self.kinematics(examples.features), examples.change, beta=0.1), {}


def _examples(model: FlowWorldModel, transitions: Transitions) -> KinematicsExamples:
    no_frame = transitions.state.new_zeros(len(transitions), 0, 0, 0, 0)  # conditioning reads no images
    history = History(
        first=no_frame,
        first_state=transitions.state,
        previous=no_frame,
        current=no_frame,
        state=transitions.state,
        previous_state=transitions.previous_state,
        past_action=transitions.past_action,
        past_length=transitions.past_length,
    )
    t = torch.ones(len(transitions), device=model.device)
    change = transitions.next_state - transitions.state
    return KinematicsExamples(
        features=model.conditioning(history, transitions.action, transitions.length, t),
        change=change / model.normalizer.state_std / model.step_std,
    )
