"""The seam between learned worlds and everything that imagines with them.

    latent  = encode(images)                          images <-> what the model predicts
    memory  = prefill(moment)                         all that does not depend on the coming actions, once per look
    imagined = sample_chunk(memory, actions, length, noise)
    images  = decode(imagined.latent)                 only where somebody looks

One call predicts the moment ``length`` actions later at once, not frame after frame: a chunked policy looks once per
chunk, so nothing in between has to be drawn, and an episode of 64 control steps is 8 predictions deep instead of 64.
Times in between are other values of ``length`` from the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from policies.denoising.policy import RobotSpec
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass


class WorldModelError(UserError):
    """A world model that does not fit the episodes, the policy or the request; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Moment(TensorDataclass):
    """What a prediction starts from: the episode's first frame (the clean anchor), the last looks, the last actions.

    ``previous`` is the look that ``past_action`` [.., H, A] started from; only its first ``past_length`` actions were
    taken (0 at an episode's beginning, where ``previous`` equals ``current``). States are in the robot's units.
    """

    first: Float[Tensor, "*B cameras channels height width"]
    first_state: Float[Tensor, "*B state_dim"]
    previous: Float[Tensor, "*B cameras channels height width"]
    current: Float[Tensor, "*B cameras channels height width"]
    state: Float[Tensor, "*B state_dim"]
    previous_state: Float[Tensor, "*B state_dim"]
    past_action: Float[Tensor, "*B H A"]
    past_length: Int[Tensor, "*B"]

    @classmethod
    def beginning(cls, latent: Tensor, state: Tensor, *, action_horizon: int, action_dim: int) -> Moment:
        """The start of episodes [B] that are seen for the first time."""
        return cls(
            first=latent,
            first_state=state,
            previous=latent,
            current=latent,
            state=state,
            previous_state=state,
            past_action=state.new_zeros(len(state), action_horizon, action_dim),
            past_length=torch.zeros(len(state), dtype=torch.int64, device=state.device),
        )

    def advance(self, latent: Tensor, state: Tensor, action: Tensor, length: Tensor) -> Moment:
        """The moment after the first ``length`` of ``action`` [B, H, A] led to ``latent`` and ``state``."""
        return Moment(
            first=self.first,
            first_state=self.first_state,
            previous=self.current,
            current=latent,
            state=state,
            previous_state=self.state,
            past_action=action,
            past_length=length,
        )


@dataclass(frozen=True, kw_only=True)
class Imagined(TensorDataclass):
    """``error``: the model's own estimate of its root-mean-square error where things move, in latent units."""

    latent: Float[Tensor, "*B cameras channels height width"]
    state: Float[Tensor, "*B state_dim"]
    error: Float[Tensor, "*B"]


class WorldModel(Protocol):
    """Chunked, action-conditioned, multi-view video dynamics with proprioception."""

    robot: RobotSpec
    action_horizon: int
    latent_shape: tuple[int, int, int, int]  # cameras, channels, height, width

    def encode(self, images: UInt8[Tensor, "*B cameras height width 3"]) -> Tensor:
        """Images to latents [*B, *latent_shape], float32."""
        ...

    def decode(self, latent: Tensor) -> UInt8[Tensor, "*B cameras height width 3"]: ...

    def prefill(self, moment: Moment) -> TensorDataclass:
        """What every prediction from ``moment`` shares."""
        ...

    def sample_chunk(
        self,
        memory: TensorDataclass,
        action: Float[Tensor, "B H A"],
        length: Int[Tensor, " B"],
        noise: Float[Tensor, "B cameras channels height width"],
    ) -> Imagined:
        """The moment after the first ``length`` (1..H) of ``action``; the later ones are not read. No graph.

        The same memory, actions and ``noise`` give the same future.
        """
        ...
