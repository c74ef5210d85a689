"""A pretrained backbone as one file: the weights of a compact encoder and the scale of the states that it expects.

A policy copies them once, before behavior cloning; nothing refers to the file afterwards. Weights are stored in half
precision, so that a few MB ship inside the package, and used in single precision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from policies.compact_encoder import CompactEncoder, HasCompactEncoder
from policies.normalizer import Normalizer
from policies.policy import Policy
from policies.tensor_file import digest, read_tensors
from sims.devices.crossing import crossing
from sims.errors import UserError

SHIPPED = Path(__file__).parent / "pretrained"
# Settings of the encoder that do not belong to the backbone: behavior cloning alone reads them.
FREE_SETTINGS = ("forecast_steps", "forecast_dims")


class BackboneError(UserError):
    """A backbone is missing, damaged, or does not fit the policy. The message says which."""


def save_backbone(policy: Policy, path: Path, *, notes: Mapping[str, object]) -> None:
    """Write the encoder of ``policy``; ``notes``: how it was made, kept in the file's header. Raises BackboneError."""
    compact = _compact(policy)
    with crossing("weights"):
        parts = _tensors(compact.encoder, compact.normalizer).items()
        tensors = {name: tensor.detach().half().cpu().contiguous() for name, tensor in parts}
    shape = _shape(compact.encoder, policy.spec.robot.cameras, policy.spec.robot.state_dim)
    header = json.dumps(shape | {"notes": notes}, sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(tensors, {"backbone": header, "sha256": digest(tensors, header)}))


def load_backbone(policy: Policy, name: str | Path) -> None:
    """Copy a backbone into ``policy``. ``name``: a file, or one that ships with the package ("tabletop").

    The policy's normalizer then keeps the scale of states. Raises BackboneError.
    """
    compact, robot = _compact(policy), policy.spec.robot
    copy_backbone(name, compact.encoder, compact.normalizer, cameras=robot.cameras, state_dim=robot.state_dim)


def copy_backbone(
    name: str | Path, encoder: CompactEncoder, normalizer: Normalizer, *, cameras: Sequence[str], state_dim: int
) -> None:
    """As ``load_backbone``, into the parts of any network that looks through these cameras."""
    path = _file(name)
    header, stored = _read(path)
    differing = [
        f"{part}.{key} is {value}, the backbone has {header[part].get(key)}"
        for part, settings in _shape(encoder, cameras, state_dim).items()
        for key, value in settings.items()
        if value != header[part].get(key)
    ]
    if differing:
        raise BackboneError(f"{path} does not fit this encoder: {'; '.join(differing)}")
    with torch.no_grad(), crossing("weights"):
        for key, tensor in _tensors(encoder, normalizer).items():
            tensor.copy_(stored[key])
    normalizer.state_fixed = True


def backbone_sha256(name: str | Path) -> str:
    """Of the file that ``copy_backbone`` reads."""
    return hashlib.sha256(_file(name).read_bytes()).hexdigest()


def _file(name: str | Path) -> Path:
    shipped = SHIPPED / f"{name}.safetensors"
    return shipped if shipped.exists() else Path(name)


def _read(path: Path) -> tuple[dict[str, dict[str, object]], dict[str, Tensor]]:
    try:
        metadata, tensors = read_tensors(path)
        text = metadata["backbone"]
    except (OSError, SafetensorError, KeyError) as error:
        names = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.safetensors")))
        raise BackboneError(f"{path} is not a backbone ({error}); the package has: {names or 'none'}") from error
    if digest(tensors, text) != metadata.get("sha256"):
        raise BackboneError(f"{path} is damaged: its content does not match its checksum")
    header: dict[str, dict[str, object]] = json.loads(text)
    return header, tensors


def _compact(policy: Policy) -> HasCompactEncoder:
    if not isinstance(policy, HasCompactEncoder):
        raise BackboneError(f"policy {policy.config.name} has no compact encoder, which a backbone is made for")
    return policy


def _tensors(encoder: CompactEncoder, normalizer: Normalizer) -> dict[str, Tensor]:
    named = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    scale = {f"normalizer.{name}": getattr(normalizer, name) for name in ("state_mean", "state_std")}
    return named | scale


def _shape(encoder: CompactEncoder, cameras: Sequence[str], state_dim: int) -> dict[str, dict[str, object]]:
    """The settings that a network and its backbone must have in common, as JSON has them."""
    settings = {key: value for key, value in asdict(encoder.config).items() if key not in FREE_SETTINGS}
    robot = {"cameras": cameras, "state_dim": state_dim}
    shape: dict[str, dict[str, object]] = json.loads(json.dumps({"encoder": settings, "robot": robot}))
    return shape
