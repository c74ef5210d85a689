"""Controls: evaluation with a part of the observation removed or exchanged, to show what a policy makes use of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import UInt8
from torch import Tensor

from sims.devices.crossing import crossing
from sims.tensor_dataclass import pad_to_longest
from sims.vector_env import Observation, StartState, VectorEnv, decode_instructions, encode_instructions
from vla_rl.config.controls import Control


def make_change(
    control: Control, env: VectorEnv, starts: Sequence[StartState], generator: torch.Generator
) -> Callable[[Observation], Observation]:
    """What ``control`` does to the observations of the episodes of ``starts``, on the generator's device.

    "shuffled_instruction": a different one of these episodes, drawn anew for each observation; "swapped_cameras": in
    reverse order; "blank_*": zeros.
    """
    if control != "shuffled_instruction":
        return _CHANGES[control]
    instructions = encode_instructions(sorted(set(_instructions(env, starts))))
    with crossing("evaluation"):
        instructions = instructions.to(generator.device)
    return lambda obs: _with_another(obs, instructions, generator)


def why_not(control: Control, env: VectorEnv, starts: Sequence[StartState]) -> str:
    """Why ``control`` would change nothing in the episodes of ``starts``; "" where it changes something."""
    if control == "swapped_cameras" and len(env.spec.cameras) < 2:
        return "one camera" if env.spec.cameras else "no camera"
    if control == "blank_images" and not env.spec.cameras:
        return "no camera"
    if control == "shuffled_instruction":
        instructions = _instructions(env, starts)
        first = next(instructions, None)
        if all(instruction == first for instruction in instructions):
            return "one instruction"
    return ""


def _instructions(env: VectorEnv, starts: Sequence[StartState]) -> Iterator[str]:
    """Of each of ``starts``, which are begun."""
    for first in range(0, len(starts), env.spec.num_envs):
        batch = starts[first : first + env.spec.num_envs]
        rows = range(len(batch))
        env.reset(rows, start=batch)
        with crossing("evaluation"):
            texts = decode_instructions(env.observe(rows).instruction)
        yield from texts


def _with_another(
    obs: Observation, instructions: UInt8[Tensor, "n instruction_bytes"], generator: torch.Generator
) -> Observation:
    own, others = pad_to_longest([obs.instruction, instructions])
    differs = (own[:, None] != others).any(-1)
    order = torch.rand(differs.shape, generator=generator, device=generator.device)
    return replace(obs, instruction=others[order.where(differs, -1.0).argmax(-1)])


_CHANGES: Mapping[Control, Callable[[Observation], Observation]] = {
    "none": lambda obs: obs,
    "blank_instruction": lambda obs: replace(obs, instruction=torch.zeros_like(obs.instruction)),
    "blank_images": lambda obs: replace(obs, images=torch.zeros_like(obs.images)),
    "swapped_cameras": lambda obs: replace(obs, images=obs.images.flip(1)),
    "blank_state": lambda obs: replace(obs, state=torch.zeros_like(obs.state)),
}
