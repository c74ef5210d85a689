"""Controls: evaluation with a part of the observation removed or exchanged, to show what a policy makes use of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from sims.devices.crossing import crossing
from sims.vector_env import Observation, StartState, VectorEnv
from vla_rl.config.controls import Control


def changed(obs: Observation, control: Control, generator: torch.Generator) -> Observation:
    """``obs`` as the policy gets it under ``control``.

    "shuffled_instruction": another environment's; "swapped_cameras": in reverse order; "blank_*": zeros.
    """
    return _CHANGES[control](obs, generator)


def why_not(control: Control, env: VectorEnv, starts: Sequence[StartState]) -> str:
    """Why ``control`` would change nothing in the episodes of ``starts``; "" where it changes something."""
    if control == "swapped_cameras" and len(env.spec.cameras) < 2:
        return "one camera" if env.spec.cameras else "no camera"
    if control == "shuffled_instruction" and env.spec.num_envs < 2:
        return "one environment, so there is no other's instruction"
    if control == "shuffled_instruction" and not _instructions_differ(env, starts):
        return "one instruction"
    return ""


def _instructions_differ(env: VectorEnv, starts: Sequence[StartState]) -> bool:
    seen = set[bytes]()
    for first in range(0, len(starts), env.spec.num_envs):
        batch = starts[first : first + env.spec.num_envs]
        rows = range(len(batch))
        env.reset(rows, start=batch)
        with crossing("evaluation"):
            seen |= {row.numpy().tobytes() for row in env.observe(rows).instruction.cpu()}
        if len(seen) > 1:
            return True
    return False


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
