"""Controls: evaluation with a part of the observation removed or exchanged, to show what a policy makes use of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from sims.vector_env import Observation
from vla_rl.config.controls import Control


def changed(obs: Observation, control: Control, generator: torch.Generator) -> Observation:
    """``obs`` as the policy gets it under ``control``.

    "shuffled_instruction": another environment's; "swapped_cameras": in reverse order; "blank_*": zeros.
    """
    return _CHANGES[control](obs, generator)


def _shuffled_instruction(obs: Observation, generator: torch.Generator) -> Observation:
    order = torch.randperm(len(obs), generator=generator, device=generator.device)
    return replace(obs, instruction=obs.instruction[order.to(obs.instruction.device)])


_CHANGES: Mapping[Control, Callable[[Observation, torch.Generator], Observation]] = {
    "none": lambda obs, _: obs,
    "blank_instruction": lambda obs, _: replace(obs, instruction=torch.zeros_like(obs.instruction)),
    "shuffled_instruction": _shuffled_instruction,
    "blank_images": lambda obs, _: replace(obs, images=torch.zeros_like(obs.images)),
    "swapped_cameras": lambda obs, _: replace(obs, images=obs.images.flip(1)),
    "blank_state": lambda obs, _: replace(obs, state=torch.zeros_like(obs.state)),
}
