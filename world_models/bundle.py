"""A fitted world model on disk: one safetensors file with its configuration, hashed. Never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save

from policies.bundle import write_atomically
from policies.denoising.policy import RobotSpec
from policies.tensor_file import digest, read_tensors
from world_models.models.flow_model import FlowWorld
from world_models.registry import WorldConfig, build_world
from world_models.reward_model import OutcomeConfig, OutcomeModel
from world_models.world_model import WorldModelError

FORMAT = "vla-rl world model 1"


@dataclass(frozen=True, kw_only=True)
class WorldInfo:
    """``usual_error``: the model's own error estimate that 90 % of the predictions on calibration episodes stay below.

    ``metrics``: what calibration on imagined looks gave.
    """

    world: Annotated[WorldConfig, Field(discriminator="name")]
    outcome: OutcomeConfig
    robot: RobotSpec
    usual_error: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class FittedWorld:
    """Ready to imagine; ``sha256`` is of the tensors."""

    world: FlowWorld
    outcome: OutcomeModel
    info: WorldInfo
    sha256: str


def save_world(
    world: FlowWorld, outcome: OutcomeModel, path: Path, *, usual_error: float, metrics: Mapping[str, float]
) -> WorldInfo:
    """Write both models to the file ``path``; a crash leaves the old one or the new one."""
    info = WorldInfo(
        world=world.config,  # type: ignore[arg-type]  # of a world that build_world made
        outcome=outcome.config,
        robot=world.robot,
        usual_error=usual_error,
        metrics=dict(metrics),
    )
    tensors = {f"world.{name}": value for name, value in world.state_dict().items()}
    tensors |= {f"outcome.{name}": value for name, value in outcome.state_dict().items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    metadata = {"format": FORMAT, "info": json.dumps(asdict(info)), "sha256": digest(tensors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, metadata=metadata))
    return info


def load_world(path: Path) -> FittedWorld:
    """The models in eval mode, bit for bit as saved. Raises WorldModelError if the file is missing or damaged."""
    if not path.is_file():
        raise WorldModelError(f"{path}: no such world model; fit one with: vla-rl world-model fit CONFIG")
    try:
        metadata, tensors = read_tensors(path)
    except SafetensorError as error:
        raise WorldModelError(f"{path}: truncated or not a world model ({error}); fit it again") from None
    if metadata.get("format") != FORMAT:
        raise WorldModelError(f"{path}: not a world model of this version, format {metadata.get('format')!r}")
    if digest(tensors) != metadata["sha256"]:
        raise WorldModelError(f"{path}: the content does not match its checksum; fit it again")
    try:
        info = TypeAdapter(WorldInfo).validate_json(metadata["info"])
    except ValidationError as error:
        raise WorldModelError(f"{path}: settings of another version: {error.errors()[0]['msg']}") from None
    world, outcome = build_world(info.world, info.robot), OutcomeModel(info.outcome, info.robot)
    for prefix, module in (("world.", world), ("outcome.", outcome)):
        module.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    return FittedWorld(world=world.eval(), outcome=outcome.eval(), info=info, sha256=metadata["sha256"])


def check_robot(info: WorldInfo, robot: RobotSpec, *, what: str) -> None:
    """WorldModelError unless ``what`` (a policy, a simulator) acts and sees as the world model does."""
    for name in RobotSpec.__dataclass_fields__:
        own, other = getattr(info.robot, name), getattr(robot, name)
        if own != other:
            raise WorldModelError(f"the world model has {name} {own}, {what} has {other}; fit one for this robot")
