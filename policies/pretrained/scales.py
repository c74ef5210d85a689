"""Published statistics of states and actions, as the linear maps of ``policies.normalizer``.

Every source's way of normalizing is linear, x -> (x - center) / scale; they differ in what is added to a divisor:

    openpi   mean_std: std + epsilon;  quantiles: (q99 - q01 + epsilon) / 2         epsilon 1e-6 (transforms.py)
    LeRobot  mean_std: std + epsilon;  quantiles, min_max: (high - low) / 2, and epsilon / 2 for a constant dimension,
             epsilon 1e-8 (processor/normalize_processor.py)
    OpenVLA  quantiles: (q99 - q01) / 2; OFT adds 1e-8; what its mask leaves out is not scaled (the gripper); a
             constant dimension is 0 (prismatic, normalize_action_and_proprio)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from policies.pretrained.checkpoint import CheckpointError, Scale

Statistics = Mapping[str, Any]  # as the file has them, which nothing has checked
# Of LeRobot before 0.4, among the weights.
_AMONG_WEIGHTS = {
    "normalize_inputs.buffer_observation_state": "observation.state",
    "unnormalize_outputs.buffer_action": "action",
}
_BOUNDS = {"quantiles": ("q01", "q99"), "min_max": ("min", "max")}


@dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """``epsilon`` is added to each divisor ("always"), or stands in for a divisor of 0 ("constant").

    A divisor that is 0 all the same is 1: a constant dimension is then only shifted, to 0.
    """

    method: Literal["mean_std", "quantiles", "min_max"] = "mean_std"
    epsilon: float = 1e-6
    add_epsilon: Literal["always", "constant"] = "always"


def scale_of(statistics: Statistics, config: ScaleConfig, dims: int, *, source: str) -> Scale:
    """Of the first ``dims`` dimensions. CheckpointError if a statistic is missing, too short or not of numbers."""
    needed = ("mean", "std") if config.method == "mean_std" else _BOUNDS[config.method]
    first, second = (_vector(statistics, name, dims, source) for name in needed)
    if config.method == "mean_std":
        center, scale = first, second + config.epsilon
    else:
        spread = second - first
        extra = config.epsilon if config.add_epsilon == "always" else torch.where(spread == 0, config.epsilon, 0.0)
        scale = (spread + extra) / 2
        center = first + scale
    if "mask" in statistics:
        mask = _vector(statistics, "mask", dims, source).bool()
        center, scale = torch.where(mask, center, 0.0), torch.where(mask, scale, 1.0)
    divisor = scale.float()
    return Scale(center=center.float(), scale=torch.where(divisor == 0, 1.0, divisor))


def read_statistics(path: Path, dataset: str | None = None) -> tuple[Statistics, Statistics]:
    """Of states and of actions, from one of the published files:

    openpi's ``norm_stats.json``, LeRobot's ``stats.json``, its normalizer's ``.safetensors`` or, of before 0.4, that of
    its weights, OpenVLA's ``config.json`` or ``dataset_statistics.json`` (``dataset`` names the part). CheckpointError
    if it is none of them.
    """
    try:
        found: Any = _nested(path) if path.suffix == ".safetensors" else json.loads(path.read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as statistics: {error}") from error
    found = _object(found, f"{path}")
    found = _object(found.get("norm_stats", found), f"{path}, norm_stats")
    if dataset is not None:
        if dataset not in found:
            raise CheckpointError(f"{path} has no statistics of {dataset!r}; it has {', '.join(sorted(found))}")
        found = _object(found[dataset], f"{path}, {dataset}")
    for state, action in (("state", "actions"), ("observation.state", "action"), ("proprio", "action")):
        if action in found and (state in found or state == "proprio"):
            return _object(found.get(state, {}), f"{path}, {state}"), _object(found[action], f"{path}, {action}")
    raise CheckpointError(
        f"{path} has no statistics of states and actions; it has {', '.join(sorted(found)) or 'none'}. If these are "
        "data sets, name one of them"
    )


def _vector(statistics: Statistics, name: str, dims: int, source: str) -> Float[Tensor, " dims"]:
    if name not in statistics:
        raise CheckpointError(f"{source} has no {name!r}; it has {', '.join(sorted(statistics))}")
    try:
        values = torch.tensor(statistics[name], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, for what is not a number
        raise CheckpointError(f"{source}: {name!r} must be a list of numbers ({error})") from error
    if values.ndim != 1 or len(values) < dims:
        raise CheckpointError(f"{source}: {name!r} must have at least {dims} numbers, got shape {list(values.shape)}")
    if not bool(values[:dims].isfinite().all()):
        raise CheckpointError(f"{source}: {name!r} has NaN or infinite entries: {values[:dims].tolist()}")
    return values[:dims]


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: statistics must be an object of names, got a {type(value).__name__}")
    return value


def _nested(path: Path) -> dict[str, dict[str, list[float]]]:
    """``observation.state.mean`` -> {"observation.state": {"mean": ...}}, of states and actions."""
    found: dict[str, dict[str, list[float]]] = {}
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        for name in names:
            feature, _, statistic = name.rpartition(".")
            feature = _AMONG_WEIGHTS.get(feature, feature)
            if feature in _AMONG_WEIGHTS.values():
                found.setdefault(feature, {})[statistic] = file.get_tensor(name).flatten().tolist()
    return found
