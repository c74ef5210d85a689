"""Image and object errors of open-loop predictions, beside a copy of the first frame."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from policies.device import make_generator
from sims.devices.crossing import crossing
from sims.numbers.statistics import mean_interval
from sims.registry import ObjectLocator
from sims.vector_env import decode_instructions
from world_models.data.clip import Clip, first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.models.flow_model import FlowWorldModel
from world_models.world_model import History

Images = UInt8[Tensor, "B cameras height width 3"]

LOST_M = 0.10  # the error of an object that cannot be found; larger errors count as this
MOVED_M = 0.02  # only objects that moved further since the start are compared
BATCH = 64  # episodes at a time


@torch.no_grad()
@crossing("evaluation")
def open_loop_errors(
    model: FlowWorldModel, clips: ClipSampler, *, horizons: Sequence[int], locate: ObjectLocator | None, seed: int
) -> list[dict[str, Any]]:
    """Errors after h chunks of an episode's own actions from its start, for every h of ``horizons``.

    PSNR [dB] over all cameras; object error [m] over objects that moved, found by ``locate``
    (``sims.registry.object_locator``); the same for a copy of the first frame.
    """
    rng, generator = np.random.default_rng(seed), make_generator(model.device, seed)
    parts: dict[int, list[dict[str, np.ndarray]]] = {h: [] for h in horizons}
    for begin in range(0, len(clips.entries), BATCH):
        episodes = range(begin, min(begin + BATCH, len(clips.entries)))
        clip = Clip.stack([clips.clip(i, 0, max(horizons)) for i in episodes])
        on_device = clip.to(model.device)
        history, instructions = first_history(model, on_device), decode_instructions(clip.instruction)
        start = clip.frames[:, 0]
        for i in range(max(horizons)):
            action, length = on_device.action[:, i], clip.length[:, i]
            noise = model.noise(len(episodes), generator)
            executed = on_device.length[:, i]
            imagined = model.sample_chunk(model.prefill(history), action, executed, noise)
            history = history.advance(imagined.latent, imagined.state, action, executed)
            if i + 1 in parts and (length > 0).any():
                predicted, truth = model.decode(imagined.latent).cpu(), clip.frames[:, i + 1]
                errors = {"psnr": _psnr(predicted, truth), "copy_psnr": _psnr(start, truth)}
                errors |= _object_errors(locate, instructions, start=start, predicted=predicted, truth=truth)
                parts[i + 1].append({name: value[length > 0].numpy() for name, value in errors.items()})
    return [_summary(h, part, rng) for h, part in parts.items()]


def _psnr(a: Images, b: Images) -> Float[Tensor, " B"]:
    error = (a.float() - b.float()).square().flatten(1).mean(1).clamp(min=0.01)
    return 10 * torch.log10(255**2 / error)


def _object_errors(
    locate: ObjectLocator | None, instructions: Sequence[str], *, start: Images, predicted: Images, truth: Images
) -> dict[str, Float[Tensor, " B"]]:
    """Distances [m]; NaN where the true image does not show the object or it moved less than MOVED_M."""
    if locate is None:
        return {}
    before, after, imagined = (locate(images, instructions) for images in (start, truth, predicted))
    moved = (after - before).norm(dim=1)
    counts = moved > MOVED_M
    error = torch.nan_to_num((imagined - after).norm(dim=1), nan=LOST_M).clamp(max=LOST_M)
    return {
        "object_error_m": torch.where(counts, error, torch.nan),
        "copy_object_error_m": torch.where(counts, moved.clamp(max=LOST_M), torch.nan),
    }


def _summary(horizon: int, parts: list[dict[str, np.ndarray]], rng: np.random.Generator) -> dict[str, Any]:
    out: dict[str, Any] = {"horizon": horizon, "episodes": sum(len(part["psnr"]) for part in parts)}
    for name in parts[0] if parts else ():
        values = np.concatenate([part[name] for part in parts])
        values = values[np.isfinite(values)]
        out[name] = float(values.mean()) if len(values) else None
        out[f"{name}_interval"] = mean_interval(values, rng)
        out[f"{name}_count"] = len(values)
    return out


def frames_per_second(
    model: FlowWorldModel, history: History, action: Tensor, length: Tensor, *, seconds: float = 2.0
) -> float:
    """Predicted images (every camera counts) per second of wall clock, after a warm-up."""
    batch, noise = len(action), model.noise(len(action), make_generator(model.device, 0))
    count, started = -1, 0.0
    while count < 1 or time.perf_counter() - started < seconds:
        if count == 0:
            started = time.perf_counter()
        imagined = model.sample_chunk(model.prefill(history), action, length, noise)
        model.decode(imagined.latent)
        count += 1
    return count * batch * model.cameras / (time.perf_counter() - started)
