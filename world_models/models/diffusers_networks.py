"""Networks of the ``diffusers`` package: loaded from a folder, or built untrained from their settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from policies.tensor_file import read_tensors
from world_models.world_model import WorldModelError


def settings_of(network: Any) -> dict[str, Any]:
    """The constructor arguments of a ``diffusers`` network, as JSON values."""
    names = set(inspect.signature(type(network).__init__).parameters) & set(network.config)
    values = {name: network.config[name] for name in sorted(names)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def load_network(folder: str | Path, kinds: Sequence[str]) -> Any:
    """The network that ``save_pretrained`` of ``diffusers`` wrote into ``folder``, of a class among ``kinds``."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise WorldModelError(f"{folder} has no config.json; give a folder that save_pretrained of diffusers wrote")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if (kind := settings.get("_class_name")) not in kinds:
        raise WorldModelError(f"{folder} holds a {kind}, allowed are {', '.join(kinds)}")
    network = diffusers_class(kind).from_config(settings)
    tensors: dict[str, Tensor] = {}
    try:  # not from_pretrained: for networks with float32 parts (Wan) it requires the package accelerate
        for file in sorted(folder.glob("diffusion_pytorch_model*.safetensors")):
            tensors |= read_tensors(file)[1]
        network.load_state_dict(tensors)
    except (SafetensorError, RuntimeError) as error:
        raise WorldModelError(f"{folder}: the weights do not fit: {' '.join(str(error).split())[:200]}") from None
    return network


def diffusers_class(kind: str) -> Any:
    """Imported here because the package takes seconds to load and most runs do not need it."""
    import diffusers

    return getattr(diffusers, kind)


def build_network(kind: str, settings: dict[str, Any]) -> Any:
    """An untrained network. WorldModelError for settings that the class does not take."""
    try:
        return diffusers_class(kind)(**settings)
    except (TypeError, ValueError) as error:
        raise WorldModelError(f"{kind} cannot be built from these settings: {error}") from None
