"""Records of recorded experience that world models are fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from episodes.catalog import FOLDS, Entry
from sims.tensor_dataclass import TensorDataclass
from world_models.models.flow_model import FlowWorldModel
from world_models.world_model import History

Part = Literal["all", "fit", "calibration", "held_out"]
RUNNING, SUCCESS, FAILED = range(3)
"""Status of the episode at an observation. FAILED: terminated without success; a time-out is RUNNING."""


HELD_OUT, CALIBRATION = 0, 1
LEARNED_FROM = tuple(fold for fold in range(FOLDS) if fold != HELD_OUT)
"""The folds (``Entry.fold``) that anything may be fitted or calibrated to."""


def part_of(entry: Entry) -> Part:
    """A tenth of all starts is held out for evaluation, a tenth is for calibration of thresholds."""
    return "held_out" if entry.fold == HELD_OUT else "calibration" if entry.fold == CALIBRATION else "fit"


@dataclass(frozen=True, kw_only=True)
class Clip(TensorDataclass):
    """A recorded observation and the M observations that followed it, at most an action chunk apart.

    ``frames[:, 0]`` is the observation that predictions start from; ``length`` is 0 in the padding after an episode's
    end. ``index``: of the observations in their sampler.
    """

    ragged: ClassVar[tuple[str, ...]] = ("instruction",)

    first: UInt8[Tensor, "*B cameras height width 3"]
    first_state: Float[Tensor, "*B state_dim"]
    previous: UInt8[Tensor, "*B cameras height width 3"]
    previous_state: Float[Tensor, "*B state_dim"]
    past_action: Float[Tensor, "*B H A"]
    past_length: Int[Tensor, "*B"]
    frames: UInt8[Tensor, "*B M_plus_1 cameras height width 3"]
    state: Float[Tensor, "*B M_plus_1 state_dim"]
    action: Float[Tensor, "*B M H A"]
    length: Int[Tensor, "*B M"]
    status: Int[Tensor, "*B M_plus_1"]
    index: Int[Tensor, "*B M_plus_1"]
    instruction: UInt8[Tensor, "*B instruction_bytes"]


@dataclass(frozen=True, kw_only=True)
class Transitions(TensorDataclass):
    """Observations and the ones a chunk later, without images; states in environment units."""

    previous_state: Float[Tensor, "*N state_dim"]
    state: Float[Tensor, "*N state_dim"]
    next_state: Float[Tensor, "*N state_dim"]
    past_action: Float[Tensor, "*N H A"]
    past_length: Int[Tensor, "*N"]
    action: Float[Tensor, "*N H A"]
    length: Int[Tensor, "*N"]


@dataclass(frozen=True, kw_only=True)
class RecordedObservations(TensorDataclass):
    """Single observations with the status of their episode."""

    ragged: ClassVar[tuple[str, ...]] = ("instruction",)

    images: UInt8[Tensor, "*B cameras height width 3"]
    state: Float[Tensor, "*B state_dim"]
    instruction: UInt8[Tensor, "*B instruction_bytes"]
    status: Int[Tensor, "*B"]


def first_history(model: FlowWorldModel[Any], clip: Clip) -> History:
    """The recorded history at the first frame of ``clip`` [B]."""
    return History(
        first=model.encode(clip.first),
        first_state=clip.first_state,
        previous=model.encode(clip.previous),
        current=model.encode(clip.frames[:, 0]),
        state=clip.state[:, 0],
        previous_state=clip.previous_state,
        past_action=clip.past_action,
        past_length=clip.past_length,
    )
