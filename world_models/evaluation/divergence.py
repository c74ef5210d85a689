"""Where an imagined episode and the true one diverge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from policies.device import make_generator
from sims.devices.crossing import crossing
from sims.registry import ObjectLocator
from world_models.data.clip import Clip, first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.open_loop import LOST_M
from world_models.models.flow_model import FlowWorldModel

QUANTILE = 0.95  # of the differences after one prediction: the reference
DIVERGED_M = 0.02  # of an object from its true place
Images = UInt8[Tensor, "cameras height width 3"]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Between a true and an imagined observation. ``image``: mean absolute difference over all pixels of all cameras,
    of 255. ``object_m``: between the places of the object that the instruction names; None where the simulator does not
    find it in the true images, LOST_M where it is not in the imagined ones."""

    image: float
    object_m: float | None


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Measures an imagined observation beside the true one.

    They have diverged where the images differ by more than ``reference_image_difference``, which the model exceeds
    in at most 5 % of its single predictions from recorded observations, or where an object is DIVERGED_M away from its
    true place (with ``locate``, see ``sims.registry.object_locator``).
    """

    reference_image_difference: float
    locate: ObjectLocator | None

    def distance(self, truth: Images, imagined: Images, instruction: str) -> Distance:
        both = torch.stack([truth, imagined])
        apart = None
        if self.locate is not None:
            true_place, place = self.locate(both, [instruction] * 2)
            if true_place.isfinite().all():
                apart = float(torch.nan_to_num((place - true_place).norm(), nan=LOST_M).clamp(max=LOST_M))
        return Distance(image=float(image_difference(both[:1], both[1:])), object_m=apart)

    def reason(self, distance: Distance) -> Literal["image", "object"] | None:
        """What has diverged, if anything has."""
        if distance.image > self.reference_image_difference:
            return "image"
        return "object" if distance.object_m is not None and distance.object_m > DIVERGED_M else None

    def first(self, distances: Sequence[Distance]) -> int | None:
        """The first of them at which they have diverged."""
        return next((i for i, distance in enumerate(distances) if self.reason(distance) is not None), None)


def image_difference(
    a: UInt8[Tensor, "B cameras height width 3"], b: UInt8[Tensor, "B cameras height width 3"]
) -> Float[Tensor, " B"]:
    """Mean absolute difference over all pixels of all cameras, of 255."""
    return (a.float() - b.float()).abs().flatten(1).mean(1)


@crossing("evaluation")
def reference_image_difference(model: FlowWorldModel, clips: ClipSampler, *, seed: int, count: int = 128) -> float:
    """The quantile QUANTILE of the image's error after one chunk, from a recorded observation.

    Of any observation or of the first ones of episodes, whichever is larger: robots move most at the start, and there
    an imagined episode begins.
    """
    any_clip = clips.draw(np.random.default_rng(seed), count, 1)
    first = Clip.stack([clips.clip(episode, 0, 1) for episode in range(min(count, len(clips.entries)))])
    errors = [_errors(model, clip, seed) for clip in (any_clip, first)]
    return max(float(torch.quantile(error, QUANTILE)) for error in errors)


@torch.no_grad()
def _errors(model: FlowWorldModel, clip: Clip, seed: int) -> Float[Tensor, " B"]:
    """Of the first prediction of each clip."""
    placed, noise = clip.to(model.device), model.noise(len(clip.length), make_generator(model.device, seed))
    prefill = model.prefill(first_history(model, placed))
    imagined = model.sample_chunk(prefill, placed.action[:, 0], placed.length[:, 0], noise)
    return image_difference(model.decode(imagined.latent).cpu(), clip.frames[:, 1])
