"""A fitted world model on disk: one safetensors file with its configuration and a checksum, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save

from episodes.files import write_atomically
from policies.device import CPU, Device
from policies.policy import RobotSpec
from policies.tensor_file import digest, read_tensors
from sims.devices.crossing import crossing
from sims.numbers.finite import check_tree, is_finite
from world_models.models.flow_model import FlowWorldModel
from world_models.registry import DynamicsConfig, build_world_model
from world_models.reward_model import RewardModel, RewardModelConfig
from world_models.world_model import WorldModelError

FORMAT = "vla-rl world model 3"


@dataclass(frozen=True, kw_only=True)
class WorldModelInfo:
    """``reference_error``: the 90 % quantile of the model's own error estimate on calibration episodes.

    ``metrics``: of the reward model's calibration on predicted observations. ``reward_every``: control steps between
    classifications with which its thresholds were set.
    """

    dynamics: DynamicsConfig
    reward_model: RewardModelConfig
    robot: RobotSpec
    reference_error: float
    metrics: Mapping[str, float]
    reward_every: int


@dataclass(frozen=True, kw_only=True)
class FittedWorldModel:
    """A world model and its reward model, in eval mode; ``sha256`` is of the tensors."""

    dynamics: FlowWorldModel
    reward_model: RewardModel
    info: WorldModelInfo
    sha256: str


def save_world_model(
    dynamics: FlowWorldModel,
    reward_model: RewardModel,
    path: Path,
    *,
    reference_error: float,
    metrics: Mapping[str, float],
    reward_every: int,
) -> WorldModelInfo:
    """Write both models to the file ``path``; after a crash it is the old or the new file, never a part."""
    info = WorldModelInfo(
        dynamics=dynamics.config,
        reward_model=reward_model.config,
        robot=dynamics.robot,
        reference_error=reference_error,
        metrics=dict(metrics),
        reward_every=reward_every,
    )
    tensors = {f"dynamics.{name}": value for name, value in dynamics.state_dict().items()}
    tensors |= {f"reward_model.{name}": value for name, value in reward_model.state_dict().items()}
    with crossing("weights"):
        tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    check_tree(tensors, "world model weight", where=str(path))
    metadata = {"format": FORMAT, "info": json.dumps(asdict(info)), "sha256": digest(tensors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, metadata=metadata))
    return info


def load_world_model(path: Path, device: Device = CPU) -> FittedWorldModel:
    """The models on ``device``, bit for bit as saved; the kinematics are frozen, as after their fit.

    Raises WorldModelError if the file is missing, damaged or of another version.
    """
    if not path.is_file():
        raise WorldModelError(f"{path}: no such world model; fit one with: vla-rl world-model fit CONFIG")
    try:
        metadata, tensors = read_tensors(path)
    except SafetensorError as error:
        raise WorldModelError(f"{path}: truncated or not a world model ({error}); fit it again") from None
    if metadata.get("format") != FORMAT:
        found = metadata.get("format")
        raise WorldModelError(
            f"{path}: not a world model of this version: format {found!r}, not {FORMAT!r}; fit it again"
        )
    if digest(tensors) != metadata["sha256"]:
        raise WorldModelError(f"{path}: the content does not match its checksum; fit it again")
    if wrong := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise WorldModelError(f"{path}: {wrong[0]} has entries that are not finite; fit it again")
    try:
        info = TypeAdapter(WorldModelInfo).validate_json(metadata["info"])
    except ValidationError as error:
        raise WorldModelError(f"{path}: settings of another version: {error.errors()[0]['msg']}") from None
    dynamics, reward_model = build_world_model(info.dynamics, info.robot), RewardModel(info.reward_model, info.robot)
    for prefix, module in (("dynamics.", dynamics), ("reward_model.", reward_model)):
        module.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    dynamics.kinematics.requires_grad_(False)
    return FittedWorldModel(
        dynamics=device.place(dynamics).eval(),
        reward_model=device.place(reward_model).eval(),
        info=info,
        sha256=metadata["sha256"],
    )


def check_robot(info: WorldModelInfo, robot: RobotSpec, *, what: str) -> None:
    """WorldModelError unless ``what`` (a policy, a simulator) has the observations and actions of the world model."""
    if differences := robot.differences(info.robot):
        raise WorldModelError(f"{what} does not fit the world model: {differences}; fit one for this robot")
