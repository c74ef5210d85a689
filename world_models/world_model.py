"""What passes between world models and everything that generates imagined rollouts with them.

    latent    = encode(images)                        images <-> what the model predicts
    prefill   = prefill(history)                      everything that does not depend on the coming actions
    predicted = sample_chunk(prefill, actions, length, noise)
    images    = decode(predicted.latent)              only where images are needed

One call predicts the observation ``length`` actions later directly, without the frames in between: a policy that acts
in chunks observes once per chunk, so an episode of 64 control steps takes 8 predictions in a row instead of 64.
Observations within a chunk are other values of ``length`` from the same prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass


class WorldModelError(UserError):
    """A world model that does not fit the episodes, the policy or the request; the message says which."""


@dataclass(frozen=True, kw_only=True)
class History(TensorDataclass):
    """What a prediction starts from: the episode's first frame, the last two observations, the actions between them.

    Frames are latents, states are in environment units. ``previous`` is the observation before ``past_action``, of
    which the first ``past_length`` actions were executed (0 at an episode's start, where ``previous`` equals
    ``current``).
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
    def start(
        cls,
        latent: Float[Tensor, "B cameras channels height width"],
        state: Float[Tensor, "B state_dim"],
        *,
        action_horizon: int,
        action_dim: int,
    ) -> History:
        """The history of episodes that begin with this observation."""
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

    def advance(
        self,
        latent: Float[Tensor, "B cameras channels height width"],
        state: Float[Tensor, "B state_dim"],
        action: Float[Tensor, "B H A"],
        length: Int[Tensor, " B"],
    ) -> History:
        """The history after the first ``length`` actions of ``action`` led to ``latent`` and ``state``."""
        return History(
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
class ImaginedObservation(TensorDataclass):
    """A predicted observation; the state is in environment units.

    ``error``: the model's own estimate of its root-mean-square error where the image changes, in latent units.
    """

    latent: Float[Tensor, "*B cameras channels height width"]
    state: Float[Tensor, "*B state_dim"]
    error: Float[Tensor, "*B"]
